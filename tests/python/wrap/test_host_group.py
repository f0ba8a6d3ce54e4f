"""Tests of the group of hosts when one is lost. Hosts are threads of this process."""

import time
from concurrent.futures import ThreadPoolExecutor

import ballast
import pytest
import torch
from ballast import DiLoCo
from ballast.outer import survivors
from ballast.outer.host_group import HostGroup
from ballast.outer.host_rank import HostRank, host_ranks
from ballast.outer.hosts import connect_hosts, log_hosts
from ballast.outer.survivors import HostRendezvous

NAMES = ("a", "b", "c")


def on_hosts(body, timeout=60.0):
    """Return what body(hosts, host) returns on each of three hosts, or its error. They are the second ranks of two."""
    store = torch.distributed.HashStore()

    def run(host):
        own = HostRank(host, NAMES, rank=1, ranks=2, peers=(1, 3, 5))
        hosts = HostGroup(own, HostRendezvous(store, "job", "", timeout, survives=True))
        try:
            return body(hosts, host)
        except ballast.Error as error:
            return error

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(run, range(3)))


def lose(hosts):
    """Leave as a rank does whose neighbour in its host has died."""
    hosts.group._core.fail("FailureError: B3301 rank 0 (a, pid 3) died")


def regrouped(hosts):
    """Return the hosts that are left when one is lost, and the error."""
    try:
        while True:
            hosts.barrier()
    except ballast.FailureError as error:
        hosts.regroup(error)
        assert [row[0] for row in hosts.rows([hosts.own.host])] == hosts.members
        return hosts.members, error.what_happened


def test_a_late_host_is_not_left_out_because_of_the_words_of_a_lost_one(monkeypatch):
    monkeypatch.setattr(survivors, "GRACE", 0.1)

    def body(hosts, host):
        if host == 1:
            return lose(hosts)
        time.sleep(0.6 if host == 0 else 0)
        return regrouped(hosts)

    first, _, last = on_hosts(body)
    words = "host 1 (b), rank 3 of the job, left: FailureError: B3301 rank 0 (a, pid 3) died"
    assert first == ([0, 2], words)
    assert last == ([0, 2], words)


def test_another_host_may_be_lost_while_hosts_regroup():
    def body(hosts, host):
        if host == 2:
            return lose(hosts)
        if host == 1:
            hosts._connect = lambda: pytest.fail("it ends")  # after it has reported
            with pytest.raises(pytest.fail.Exception):
                regrouped(hosts)
            return None
        return regrouped(hosts)[0]

    assert on_hosts(body, timeout=1.0)[0] == [0]


def test_a_host_that_comes_too_late_is_told_so():
    def body(hosts, host):
        if host == 1:
            return lose(hosts)
        time.sleep(1.5 if host == 0 else 0)
        return regrouped(hosts)

    late, _, other = on_hosts(body, timeout=0.5)
    assert "cannot continue to train on host 0 (a): the other hosts have left it out" in str(late)
    assert other[0] == [2]


def test_an_error_of_this_host_alone_does_not_end_the_group():
    def body(hosts, host):
        error = ballast.FailureError("B3202 a drive failed")
        error.code = "B3202"
        with pytest.raises(ballast.FailureError, match="B3202"):
            hosts.regroup(error)
        return len(hosts.rows([host]))

    assert on_hosts(body) == [3, 3, 3]


def test_hosts_wait_for_each_other_longer_than_their_ranks_do():
    _, hosts = connect_hosts(None, DiLoCo(every=2, timeout=900), 5.0)
    assert hosts._rendezvous.timeout == 900


def test_machines_with_the_same_name_are_different_hosts():
    of_ranks = host_ranks(["boot-1", "boot-1", "boot-2", "boot-2"], ["container"] * 4, None)
    assert [(each.host, each.rank, each.peers) for each in of_ranks] == [
        *((0, 0, (0, 2)), (0, 1, (1, 3))),
        *((1, 0, (0, 2)), (1, 1, (1, 3))),
    ]


@pytest.mark.parametrize(("hosts", "warnings"), [(None, 1), (1, 0)])
def test_ranks_of_one_machine_are_told_that_they_are_one_host(hosts, warnings, caplog):
    [own, *_] = host_ranks(["here"] * 4, ["a"] * 4, hosts)
    with caplog.at_level("INFO", "ballast"):
        log_hosts(own, DiLoCo(every=2, hosts=hosts))
    assert "1 hosts of 4 ranks: a" in caplog.text
    assert sum(record.levelname == "WARNING" for record in caplog.records) == warnings
