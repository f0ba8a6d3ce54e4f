"""Tests that the call which a plan prints runs the program that the plan forecasts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from python.conftest import PACKAGE
from python.wrap.support.forecast_programs import Configuration, on_ranks, programs
from python.wrap.support.ranks import run_ranks

BF16: dict[str, Any] = {"dtype": torch.bfloat16}
WIDE: dict[str, Any] = {"width": 1024}  # a matrix has several tiles, which the host and the GPU share
STATE_ON_HOST = {"state": "host"}


def of(model: dict[str, Any] | None = None, steps: int = 0, **options: Any) -> Configuration:
    return Configuration(options, model or {}, steps)


ON_A_GPU = {
    "chosen": of(),
    "stage 0": of(stage=0),
    "stage 2": of(stage=2),
    "stage 3": of(stage=3),
    "fp32 on the host": of(WIDE, stage=2, offload=STATE_ON_HOST),
    "split on the host": of({**WIDE, **BF16}, stage=2, offload=STATE_ON_HOST),
    "split on the host in stage 3": of({**WIDE, **BF16}, stage=3, offload=STATE_ON_HOST),
    "compact on the host": of({**WIDE, **BF16}, stage=2, offload=STATE_ON_HOST, state_format="compact"),
    "4bit on the host": of({**WIDE, **BF16}, stage=2, offload=STATE_ON_HOST, state_format="4bit"),
    "gradients on the host": of({**WIDE, **BF16}, stage=2, offload={"gradients": "host", "state": "host"}),
    "gradients in bf16": of({**WIDE, **BF16}, stage=2, offload=STATE_ON_HOST, gradient_format="bf16"),
    "state in bf16": of(BF16, stage=2, state_format="bf16"),
    "half of the state on the host": of(WIDE, stage=2, offload={"state": {"device": 0.5, "host": 0.5}}),
    "host and drive": of(WIDE, stage=2, offload={"state": {"host": 0.5, "nvme": 0.5}}),
    "parameters on the host": of(BF16, stage=3, offload={"parameters": "host", "gradients": "host", "state": "host"}),
    "parameters on a drive": of(stage=3, offload={"parameters": "nvme", "gradients": "host", "state": "nvme"}),
    "drive": of(stage=2, offload={"state": "nvme"}),
    "a run": of(stage=3, offload={"state": "nvme"}, resumable=True),
    "in backward": of(stage=3, update_in_backward=True),
    "in backward, stage chosen": of(update_in_backward=True),
    "in backward on the host": of(WIDE, stage=3, update_in_backward=True, offload=STATE_ON_HOST),
    "accumulated": of(stage=2, micro_steps=2, steps=4),
    "accumulated in stage 3": of(stage=3, micro_steps=2, steps=4, offload=STATE_ON_HOST),
    "prefetched": of(stage=3, prefetch=2),
    "Muon": of(stage=2, optimizer="muon"),
    "Muon on the host": of(stage=3, optimizer="muon", offload=STATE_ON_HOST),
    "SGD": of(stage=2, optimizer="sgd"),
    "tied": of({"tied": True}, stage=2),
    "tied in stage 3": of({"tied": True}, stage=3),
    "frozen": of({"frozen": 2}, stage=3, offload={"parameters": "host", "gradients": "host", "state": "host"}),
}

ON_GPUS = {
    "stage 0": of(stage=0),
    "stage 2": of(stage=2),
    "stage 3": of(stage=3),
    "host": of({**WIDE, **BF16}, stage=2, offload=STATE_ON_HOST),
    "host in stage 3": of({**WIDE, **BF16}, stage=3, offload=STATE_ON_HOST, state_format="compact"),
    "all on the host": of(BF16, stage=3, offload={"parameters": "host", "gradients": "host", "state": "host"}),
    "codes": of(BF16, stage=3, wire="int8"),
    "kept": of(stage=3, keep_gathered=True),
    "accumulated": of(stage=2, micro_steps=2, steps=4),
    "Muon": of(stage=2, optimizer="muon"),
}

ON_CPUS = {
    "stage 0": of(stage=0),
    "stage 2": of(stage=2),
    "stage 3": of(stage=3),
    "drive": of(stage=2, offload={"state": "nvme"}),
    "a run": of(stage=3, offload={"state": "nvme"}, resumable=True),
    "accumulated": of(stage=3, micro_steps=2, steps=4),
    "frozen": of({"frozen": 1, "tied": True}, stage=3),
}


def operations(program: str) -> str:
    """Return the slots and the operations without their order: where micro-steps follow each other, the training issues some
    of the next one earlier than the planner, which knows them as micro-steps."""
    lines = re.sub(r"^%\d+ | after=\S+$", "", program, flags=re.MULTILINE).split("\n")
    return "\n".join(sorted(lines))


def check(found: str, expected: str, configuration: Configuration) -> None:
    """Compare line by line: pytest takes minutes for a difference of long texts."""
    if configuration.options.get("micro_steps", 1) > 1:
        found, expected = operations(found), operations(expected)
    lines = [(one, other) for one, other in zip(found.split("\n"), expected.split("\n")) if one != other]
    assert not lines, "\n".join(f"runs {one}\nplan {other}" for one, other in lines[:3])
    assert found.count("\n") == expected.count("\n")


@pytest.mark.emulated
@pytest.mark.parametrize("name", ON_A_GPU)
def test_a_gpu_runs_the_program_of_its_plan(tmp_path, name):
    check(*programs(0, 1, "emulated", tmp_path, ON_A_GPU[name]), ON_A_GPU[name])


@pytest.mark.emulated
def test_gpus_run_the_programs_of_their_plan(tmp_path):
    for of_rank in run_ranks(2, on_ranks, 2, PACKAGE, tmp_path, [*ON_GPUS.values()]):
        for pair, configuration in zip(of_rank, ON_GPUS.values(), strict=True):
            check(*pair, configuration)


def test_cpus_run_the_programs_of_their_plan(tmp_path):
    alone = run_ranks(1, on_ranks, 1, None, tmp_path, [*ON_CPUS.values()])
    for of_rank in alone + run_ranks(2, on_ranks, 2, None, tmp_path, [*ON_CPUS.values()]):
        for pair, configuration in zip(of_rank, ON_CPUS.values(), strict=True):
            check(*pair, configuration)
