"""Tests of hosts that are lost while they exchange parameters through an outer optimizer. Hosts are ranks of one machine."""

import pytest
from ballast import DiLoCo
from python.wrap.support import outer
from python.wrap.support.outer_torch import PlainTorch, check_close, is_equal
from python.wrap.support.ranks import run_ranks


@pytest.mark.parametrize(("stage", "lost", "store"), [(2, 0, "file"), (3, 1, "tcp")])
def test_a_lost_host_leaves_the_others_training_and_saving(stage, lost, store, tmp_path):
    options = {"stage": stage, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    body = outer.lose_between_steps, lost, 5, options, str(tmp_path)
    ended = run_ranks(3, *body, lost=[lost], store=store)
    expected = PlainTorch(hosts=3, ranks=1, every=4, steps=10, lost=(lost, 5)).train()
    left = [host for host in range(3) if host != lost]
    for host in left:
        (_, parameters), lines = ended[host]
        check_close(parameters, expected[host])
        assert any(f"lost host {lost} (" in line and "2 of 3 hosts continue" in line for line in lines)
    resumed = run_ranks(2, outer.resume, str(tmp_path), [{"stage": 2, "outer": DiLoCo(every=4, hosts=2)}], 10, 10)
    folders = (1, 1) if lost == 0 else (0, 2)  # those of the same number, else of another one
    for host, [(_, parameters)] in zip(folders, resumed, strict=True):
        assert is_equal(parameters, ended[host][0][1])


def test_the_others_end_where_the_lost_host_had_the_store():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(3, outer.lose_and_fail, 0, options, lost=[0], store="tcp")
    for host in (1, 2):
        assert "B3301 cannot continue without the lost host: the store of torch.distributed is gone" in ended[host]


@pytest.mark.parametrize(("wire", "tolerance"), [("exact", 2e-6), ("int8", 0.02)])
def test_a_host_that_is_lost_in_an_exchange_leaves_the_others_training(wire, tolerance):
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, wire=wire, survive_lost_hosts=True)}
    ended = run_ranks(3, outer.lose_in_exchange, 2, options, lost=[2])
    expected = PlainTorch(hosts=3, ranks=1, every=4, steps=8, lost=(2, 5)).train()
    for host in (0, 1):
        check_close(ended[host][0][1], expected[host], tolerance)
        assert is_equal(ended[host][0][1], ended[0][0][1])


def test_ranks_of_a_host_keep_the_same_values_when_another_host_is_lost_in_an_exchange():
    options = {"stage": 0, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(6, outer.lose_in_exchange, 4, options, lost=[4, 5])  # rank 5 makes the exchange that rank 4 does not
    for rank in range(4):
        assert is_equal(ended[rank][0][1], ended[0][0][1])


def test_a_host_that_has_missed_the_end_of_an_exchange_catches_up():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(3, outer.lose_at_the_end_of_an_exchange, 2, 1, options, lost=[2])
    expected = PlainTorch(hosts=3, ranks=1, every=4, steps=8, lost=(2, 5)).train()
    for host in (0, 1):
        check_close(ended[host][0][1], expected[host])
        assert is_equal(ended[host][0][1], ended[0][0][1])


def test_a_late_host_continues_when_a_rank_of_another_one_is_lost():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(6, outer.lose_one_while_another_is_late, 2, 0, options, lost=[2, 3])  # rank 3 fails with its neighbour
    expected = PlainTorch(hosts=3, ranks=2, every=4, steps=8, lost=(1, 5)).train()
    for rank in (0, 1, 4, 5):
        check_close(ended[rank][0][1], expected[rank // 2])
    assert any("host 1 (" in line and "rank 2 of the job" in line for line in ended[4][1])


def test_without_the_option_a_lost_host_ends_the_others():
    ended = run_ranks(3, outer.lose_and_fail, 1, {"stage": 2, "outer": DiLoCo(every=4, hosts=3)}, lost=[1])
    for host in (0, 2):
        assert "B3301 host 1 (" in ended[host]
        assert "), rank 1 of the job, died" in ended[host]
