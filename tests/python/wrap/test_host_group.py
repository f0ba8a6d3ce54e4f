"""Tests of the group of hosts when one is lost. Hosts are threads of this process."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ballast
import pytest
import torch
from ballast import DiLoCo
from ballast.outer import hosts as hosts_module
from ballast.outer.fragments import BYTES_OF_GROUP
from ballast.outer.hosts import HostGroup, HostRank, HostRendezvous, connect_hosts, host_ranks, log_hosts

NAMES = ("a", "b", "c")


def on_hosts(body, timeout=60.0, wire="exact"):
    """Return what body(hosts, host) returns on each of three hosts, or its error. They are the second ranks of two."""
    store = torch.distributed.HashStore()

    def run(host):
        own = HostRank(host, NAMES, rank=1, ranks=2, peers=(1, 3, 5))
        hosts = HostGroup(own, HostRendezvous(store, "job", "", timeout, survives=True), wire)
        try:
            return body(hosts, host)
        except ballast.Error as error:
            return error

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(run, range(3)))


# --- Averages ---

ELEMENTS = 100_001


def values_of(host):
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(host)) * torch.linspace(1e-3, 2, ELEMENTS)


def averages(hosts, host):
    """Return the averages after some steps, and the bytes that the first one has sent."""
    before = sum(hosts.sent_bytes)
    made = [hosts.average(values_of(host), fragment=0, step=4)]
    sent = sum(hosts.sent_bytes) - before
    made += [hosts.average(values_of(host), fragment=fragment, step=step) for fragment, step in ((0, 4), (0, 8), (1, 4))]
    return made, sent


@pytest.mark.parametrize(("wire", "largest_code"), [("exact", 0), ("int8", 127), ("int4", 7)])
def test_averages_in_codes_have_the_same_bits_on_all_hosts(wire, largest_code, monkeypatch):
    """And send the bytes that the planner counts."""
    monkeypatch.setattr(hosts_module, "CHUNK", 1 << 16)  # the last chunk is no multiple of a group
    (first, sent), *others = on_hosts(averages, wire=wire)
    for made, sent_too in others:
        assert sent_too == sent
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, first, strict=True))
    assert torch.equal(first[1], first[0])  # the same exchange again
    expected = torch.stack([values_of(host) for host in range(3)]).mean(0)
    if wire == "exact":
        torch.testing.assert_close(first[0], expected)
    else:
        assert not torch.equal(first[2], first[0]) and not torch.equal(first[3], first[0])  # other random bits
        assert (first[0] - expected).abs().max() < 20 / largest_code  # values are below 10, and so are averages
        assert (torch.stack(first[1:]).mean(0) - expected).square().mean() < (first[0] - expected).square().mean() / 2
    blocks = sum(math.ceil(count / 128 / 3) for count in (1 << 16, ELEMENTS - (1 << 16)))  # each host's blocks of a chunk
    assert abs(sent / (4 * blocks * BYTES_OF_GROUP[wire]) - 1) < 0.02  # a part goes to two hosts, twice


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_a_value_that_is_not_finite_arrives_on_all_hosts(wire):
    def body(hosts, host):
        values = torch.ones(1000)
        values[500] = torch.inf if host == 1 else 1.0
        return hosts.average(values, fragment=0, step=1)

    for average in on_hosts(body, wire=wire):
        assert average[500].isnan()
        assert torch.equal(average[:384], torch.ones(384)) and torch.equal(average[512:], torch.ones(488))


# --- Lost hosts ---


def lose(hosts):
    """Leave as a rank does whose neighbour in its host has died."""
    hosts.group.fail("FailureError: B3301 rank 0 (a, pid 3) died")


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
    monkeypatch.setattr(hosts_module, "GRACE", 0.1)

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
            hosts._connect = lambda: pytest.fail("it ends")  # host 1 has reported by then
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


@pytest.mark.parametrize("is_broken", [False, True])
def test_hosts_that_are_all_there_connect_again_a_few_times(is_broken, monkeypatch, caplog):
    """After an error of a connection that breaks while both hosts live."""
    attempts = []

    def body(hosts, host):
        connect, error = hosts._connect, ballast.FailureError("B3301 lost the connection to rank 1")
        error.code, error.what_happened = "B3301", "lost the connection to rank 1"

        def connect_or_fail():
            if host == 0:
                attempts.append(host)
            if is_broken:
                raise error
            return connect()

        monkeypatch.setattr(hosts, "_connect", connect_or_fail)
        hosts.own = replace(hosts.own, rank=0)
        hosts.barrier()
        if is_broken:
            with pytest.raises(ballast.FailureError, match="lost the connection"):
                hosts.regroup(error)
            return None
        hosts.regroup(error)
        return hosts.members, len(hosts.rows([host]))

    found = on_hosts(body)
    assert found == [None] * 3 if is_broken else found == [([0, 1, 2], 3)] * 3
    assert len(attempts) == (hosts_module.MOST_REPEATS if is_broken else 1)
    assert "all 3 hosts connect again" in caplog.text
