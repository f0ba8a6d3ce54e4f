"""Tests of keep_gathered, by which units stay from forward to backward in stage 3, and of prefetch. Equal bits are tested in
test_ranks.py."""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any, NamedTuple

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast import _core
from ballast.torch.parameters import gathered_memory
from python.wrap.support.loops import Loop, keywords
from python.wrap.support.models import BLOCKS, WIDTH, blocks
from python.wrap.support.ranks import run_ranks


class Kept(NamedTuple):
    """What a training shows after each step, and at its end."""

    losses: list[float]
    device_bytes: list[int]
    sent: list[float]


def kept_by_itself(rank: int, hosts: int, configurations: list[dict[str, Any]], free: list[int]) -> list[Kept]:
    """Train in stage 3 in each configuration, with ranks that count as those of so many hosts. Let the machine have these free
    bytes one after the other, the last one from then on."""
    _core.machine_name = lambda: f"host {rank * hosts // dist.get_world_size()}"
    found = []
    for options in configurations:
        left = [*free]
        gathered_memory.available_memory = lambda _, left=left: left.pop(0) if len(left) > 1 else left[0]
        gathered_memory.bytes_below_peak = lambda: 0
        bytes_: list[int] = []
        sent: list[float] = []

        def look(model: Any, optimizer: Any, bytes_: list[int] = bytes_, sent: list[float] = sent) -> None:
            metrics = optimizer.metrics()
            bytes_.append(int(metrics["memory_bytes/device"]))
            sent.append(metrics["sent_bytes/across"] + metrics["sent_bytes/inside"])

        loop = Loop(rank=rank, ranks=dist.get_world_size(), make_model=blocks, steps=40, after_step=look)
        found.append(Kept(loop.run(stage=3, **options).losses, bytes_, sent))
    return found


def sent_and_kept(rank: int, micro_steps: int, configurations: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the bytes that this rank sends in a step of stage 3, and those of its memory, in each configuration."""
    results = []
    for options in configurations:
        sent: list[float] = []
        loop = Loop(
            rank=rank,
            ranks=dist.get_world_size(),
            make_model=blocks,
            micro_steps=micro_steps,
            steps=24,
            after_step=lambda model, optimizer: sent.append(optimizer.metrics()["sent_bytes/inside"]),
        )
        memory = loop.run(stage=3, **options).optimizer.metrics()["memory_bytes/device"]
        # The first steps are on demand. A gather for the next step is counted in this one or in the next one.
        results.append((statistics.fmean(sent[4:]), memory))
    return results


UNIT = 512 * 4  # 400 elements in fp32, in shards of whole blocks of 128


def in_units(sent, less):
    """Return how much more a rank sends in a step than in another training, in units' shards on two ranks."""
    return round((sent - less) / (UNIT / 2))


def test_units_that_stay_are_gathered_once_in_a_step():
    configurations = [{}, {"keep_gathered": 4 * UNIT}, {"keep_gathered": True}]
    for results in run_ranks(2, sent_and_kept, 1, configurations):
        (plain, least), (some, more), (every, most) = results
        assert in_units(plain, every) == BLOCKS - 2  # the last two stay in any case
        assert in_units(plain, some) == 2
        assert (more - least, most - least) == (2 * UNIT, (BLOCKS - 2) * UNIT)


def test_micro_steps_gather_no_unit_again():
    [[(one, _)], _] = run_ranks(2, sent_and_kept, 1, [{"keep_gathered": True}])
    for [(three, _)] in run_ranks(2, sent_and_kept, 3, [{"keep_gathered": True}]):
        assert in_units(three, one) == 2 * BLOCKS  # the reductions of two more backward passes


def test_each_unit_that_is_gathered_ahead_takes_its_memory():
    for results in run_ranks(2, sent_and_kept, 1, [{"prefetch": units} for units in (1, 0, 3)]):
        (sent, one), (least_sent, none), (most_sent, three) = results
        assert (one - none, three - one) == (UNIT, 2 * UNIT)
        assert in_units(least_sent, sent) == 1  # the last unit of forward is the first of backward, and no other stays
        assert in_units(sent, most_sent) == 2


GIB = 1 << 30
TWICE = {"keep_gathered": False}


def test_between_hosts_parameters_stay_by_themselves_once_the_order_is_known():
    configurations = [TWICE, {}, {"keep_gathered": True}]
    for twice, auto, once in run_ranks(2, kept_by_itself, 2, configurations, [GIB]):
        assert auto.losses == twice.losses == once.losses
        assert auto.device_bytes[0] == twice.device_bytes[0] < once.device_bytes[0] == auto.device_bytes[-1]
        assert sum(auto.sent[-20:]) == pytest.approx(sum(once.sent[-20:]), rel=0.05)
        assert sum(auto.sent[-20:]) < 0.8 * sum(twice.sent[-20:])


def test_on_one_host_nothing_stays_by_itself():
    for twice, auto in run_ranks(2, kept_by_itself, 1, [TWICE, {}], [GIB]):
        assert auto.device_bytes == twice.device_bytes


@pytest.mark.parametrize(("free", "stays"), [(3 * UNIT, 2), (0, 0)])
def test_three_quarters_of_what_is_free_are_for_parameters_that_stay(free, stays):
    for [auto] in run_ranks(2, kept_by_itself, 2, [{}], [free]):
        assert stays * UNIT <= auto.device_bytes[-1] - auto.device_bytes[0] < (stays + 1) * UNIT


def test_memory_is_given_back_when_less_is_free():
    for twice, auto in run_ranks(2, kept_by_itself, 2, [TWICE, {}], [GIB, GIB, 1]):
        assert auto.losses == twice.losses
        assert auto.device_bytes[0] == auto.device_bytes[-1] < max(auto.device_bytes)


def test_parameters_stay_in_what_the_limit_leaves():
    configurations = [TWICE, {"memory": "36KiB"}]
    for twice, auto in run_ranks(2, kept_by_itself, 1, configurations, [0]):
        assert auto.losses == twice.losses
        assert twice.device_bytes[-1] < auto.device_bytes[-1] <= 36 << 10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_gathered": True, "stage": 2}, "cannot use keep_gathered=True: in stage 2"),
        ({"keep_gathered": "some", "stage": 3}, "some"),
        ({"keep_gathered": -1, "stage": 3}, "-1 is not a size"),
        ({"prefetch": 2, "stage": 2}, "cannot use prefetch=2: in stage 2"),
        ({"prefetch": -1, "stage": 3}, "cannot use prefetch=-1: it is below 0"),
        ({"prefetch": 1.5, "stage": 3}, "cannot use prefetch=1.5: it is not a whole number"),
    ],
)
def test_other_values_are_refused(options, words):
    model = torch.nn.Linear(4, 1)
    with pytest.raises(ballast.UsageError, match=words):
        ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(**options))


def test_a_plan_says_what_staying_parameters_cost_and_gain():
    once = ballast.plan("llama-8b", ranks=8, gpu="h100", stage=3, rates={"network": "10GB/s"}, keep_gathered=True)
    twice = ballast.plan("llama-8b", ranks=8, gpu="h100", stage=3, rates={"network": "10GB/s"})
    assert once.seconds < twice.seconds
    assert once.memory["device"]["gathered"] > 10 * twice.memory["device"]["gathered"]
    assert once.wrap_call() == "ballast.wrap(optimizer, model, stage=3, tuning=ballast.Tuning(keep_gathered=True))"
    below = ballast.plan("llama-8b", ranks=8, gpu="h100", keep_gathered="all")
    assert below.stage < 3
    assert "keep_gathered" not in below.wrap_call()


def test_a_plan_says_what_units_ahead_cost():
    plans = [ballast.plan("llama-8b", ranks=8, gpu="h100", stage=3, prefetch=units) for units in (0, 1, 2)]
    gathered = [plan.memory["device"]["gathered"] for plan in plans]
    assert gathered == sorted(set(gathered))
    assert plans[2].wrap_call() == "ballast.wrap(optimizer, model, stage=3, tuning=ballast.Tuning(prefetch=2))"
    assert "prefetch" not in plans[1].wrap_call()


def test_parameters_that_stay_count_in_memory():
    for options, fits in (({}, True), ({"keep_gathered": True}, False)):
        model = blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offload = {"parameters": "host", "state": "host"}  # only those are not there all the time without ranks
        ballast.wrap(optimizer, model, **keywords(stage=3, offload=offload, memory="36KiB", **options))
        with nullcontext() if fits else pytest.raises(ballast.OutOfMemoryError, match=r"less of ballast.Tuning\(keep"):
            model(torch.ones(WIDTH))
