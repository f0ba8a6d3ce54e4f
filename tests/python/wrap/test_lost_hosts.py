"""Tests of hosts that are lost while they exchange parameters through an outer optimizer. Hosts are ranks of one machine."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from typing import Any

import ballast
import pytest
import torch
from ballast import DiLoCo
from ballast.outer import hosts as hosts_module
from ballast.outer.hosts import HostGroup
from python.wrap.support import outer
from python.wrap.support.outer import PlainTorch, Trained, check_close, is_equal, loop_of, result_of
from python.wrap.support.ranks import run_ranks

Lines = list[str]


class Heard(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: Lines = []
        logging.getLogger("ballast").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_between_steps(
    rank: int, lost: int, step: int, options: dict[str, Any], folder: str = ""
) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies after a step. With a folder, the others train two more steps and save."""
    heard, ended = Heard(), [0]

    def after_step(*_: Any) -> None:
        ended[0] += 1
        if rank == lost and ended[0] == step:
            die()

    loop = loop_of(rank, steps=8, after_step=after_step)
    run = loop.run(**options)
    if folder:
        run = replace(loop, steps=10).train(run.model, run.optimizer, 8)
        ballast.save(folder, run.model, run.optimizer)
    return result_of(run), heard.lines


def lose_one_while_another_is_late(rank: int, lost: int, late: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies after the fifth, and another host comes to the next exchange when it has been waited
    for longer than for hosts that have failed."""
    hosts_module.GRACE = 0.2
    heard, ended = Heard(), [0]

    def after_step(*_: Any) -> None:
        ended[0] += 1
        if rank == lost and ended[0] == 5:
            die()
        if rank // 2 == late and ended[0] == 7:
            time.sleep(1.5)

    run = loop_of(rank, steps=8, after_step=after_step).run(**options)
    return result_of(run), heard.lines


def lose_and_fail(rank: int, lost: int, options: dict[str, Any]) -> str:
    try:
        lose_between_steps(rank, lost, 5, options)
    except ballast.FailureError as error:
        return str(error)
    return ""


def lose_in_exchange(rank: int, lost: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies when the first chunk of the second exchange is summed."""
    heard, average, exchanges = Heard(), HostGroup.average, [0]
    hosts_module.CHUNK = 64

    def average_and_die(group: HostGroup, values: torch.Tensor, **of_exchange: int) -> torch.Tensor:
        exchanges[0] += 1
        if rank == lost and exchanges[0] == 2:
            group._sum(values[:64], of_exchange["step"], number=0)
            die()
        return average(group, values, **of_exchange)

    HostGroup.average = average_and_die  # type: ignore[method-assign]
    run = loop_of(rank, steps=8).run(**options)
    return result_of(run), heard.lines


def lose_at_the_end_of_an_exchange(rank: int, lost: int, misses: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies when the first exchange is complete, and another one loses it before it knows so."""
    heard, average, exchanges = Heard(), HostGroup.average, [0]

    def average_and_fail(group: HostGroup, values: torch.Tensor, **of_exchange: int) -> torch.Tensor:
        exchanges[0] += 1
        averages = average(group, values, **of_exchange)
        if exchanges[0] == 1 and rank == lost:
            die()
        if exchanges[0] == 1 and rank == misses:
            while not group.group.failed_ranks:
                time.sleep(0.01)
            group.group.all_reduce([1])  # raises the error
        return averages

    HostGroup.average = average_and_fail  # type: ignore[method-assign]
    run = loop_of(rank, steps=8).run(**options)
    return result_of(run), heard.lines


@pytest.mark.parametrize(("stage", "lost", "store"), [(2, 0, "file"), (3, 1, "tcp")])
def test_a_lost_host_leaves_the_others_training_and_saving(stage, lost, store, tmp_path):
    options = {"stage": stage, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    body = lose_between_steps, lost, 5, options, str(tmp_path)
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
    ended = run_ranks(3, lose_and_fail, 0, options, lost=[0], store="tcp")
    for host in (1, 2):
        assert "B3301 cannot continue without the lost host: the store of torch.distributed is gone" in ended[host]


@pytest.mark.parametrize(("wire", "tolerance"), [("exact", 2e-6), ("int8", 0.02)])
def test_a_host_that_is_lost_in_an_exchange_leaves_the_others_training(wire, tolerance):
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, wire=wire, survive_lost_hosts=True)}
    ended = run_ranks(3, lose_in_exchange, 2, options, lost=[2])
    expected = PlainTorch(hosts=3, ranks=1, every=4, steps=8, lost=(2, 5)).train()
    for host in (0, 1):
        check_close(ended[host][0][1], expected[host], tolerance)
        assert is_equal(ended[host][0][1], ended[0][0][1])


def test_ranks_of_a_host_keep_the_same_values_when_another_host_is_lost_in_an_exchange():
    options = {"stage": 0, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(6, lose_in_exchange, 4, options, lost=[4, 5])  # rank 5 makes the exchange that rank 4 does not
    for rank in range(4):
        assert is_equal(ended[rank][0][1], ended[0][0][1])


def test_a_host_that_has_missed_the_end_of_an_exchange_catches_up():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(3, lose_at_the_end_of_an_exchange, 2, 1, options, lost=[2])
    expected = PlainTorch(hosts=3, ranks=1, every=4, steps=8, lost=(2, 5)).train()
    for host in (0, 1):
        check_close(ended[host][0][1], expected[host])
        assert is_equal(ended[host][0][1], ended[0][0][1])


def test_a_late_host_continues_when_a_rank_of_another_one_is_lost():
    options = {"stage": 2, "outer": DiLoCo(every=4, hosts=3, survive_lost_hosts=True)}
    ended = run_ranks(6, lose_one_while_another_is_late, 2, 0, options, lost=[2, 3])  # rank 3 fails with its neighbour
    expected = PlainTorch(hosts=3, ranks=2, every=4, steps=8, lost=(1, 5)).train()
    for rank in (0, 1, 4, 5):
        check_close(ended[rank][0][1], expected[rank // 2])
    assert any("host 1 (" in line and "rank 2 of the job" in line for line in ended[4][1])


def test_without_the_option_a_lost_host_ends_the_others():
    ended = run_ranks(3, lose_and_fail, 1, {"stage": 2, "outer": DiLoCo(every=4, hosts=3)}, lost=[1])
    for host in (0, 2):
        assert "B3301 host 1 (" in ended[host]
        assert "), rank 1 of the job, died" in ended[host]
