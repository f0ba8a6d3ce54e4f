"""Tests of plans in which ranks with other data divide the experts of each layer."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import ballast
import pytest

BLOCKS, DENSE, EXPERTS = 4, (512, 512), (16, 512, 256)
MODEL = {f"h.{number}": {"q": DENSE, "mlp.experts.up": EXPERTS} for number in range(BLOCKS)}
MACHINE: dict[str, Any] = {"gpu_memory": "24GiB", "flops": "100T", "offload": "none", "activations": "1MiB"}


def plan(ranks: int, expert_parallel: int, **options: Any) -> Any:
    return ballast.plan(MODEL, ranks=ranks, expert_parallel=expert_parallel, **MACHINE, **options)


def size_of(shape: tuple[int, ...]) -> int:
    elements = 1
    for each in shape:
        elements *= each
    return elements


@pytest.mark.parametrize("stage", [2, 3])
def test_bytes_of_a_rank_are_those_of_its_part_of_the_experts(stage):
    dense, experts = BLOCKS * size_of(DENSE), BLOCKS * size_of(EXPERTS)
    for ranks, parts in ((8, 2), (8, 8)):
        whole, divided = (plan(ranks, each, stage=stage) for each in (1, parts))
        in_bf16 = (dense + experts) // ranks if stage == 3 else dense + experts // parts
        assert divided.memory["device"]["parameters"] == 2 * in_bf16
        assert divided.memory["device"]["state"] == whole.memory["device"]["state"]
        assert divided.parameters == whole.parameters == dense + experts
        assert divided.expert_parallel == parts and f"{parts} ranks divide the experts" in str(divided)


def test_ranks_gather_and_sum_only_their_experts():
    def moved(kind: str, parts: int) -> set[tuple[str, str]]:
        return set(re.findall(rf"{kind} unit=(\d+)( over=part)?", plan(8, parts, stage=3).program()))

    for kind in ("gather", "reduce"):
        assert {over for _, over in moved(kind, 1)} == {""}
        assert moved(kind, 2) == {(str(unit), " over=part" if unit % 2 else "") for unit in range(2 * BLOCKS)}
    assert not any(over for _, over in moved("gather", 8))  # each rank has all of its experts


def test_what_cannot_be_divided_is_named():
    cases = [
        (dict(model="llama-8b", ranks=8, expert_parallel=2), "the model has none"),
        (dict(model=MODEL, ranks=6, expert_parallel=4), "no multiple"),
        (dict(model=MODEL, ranks=32, expert_parallel=32), "cannot divide experts among 32 ranks(.|\n)*mlp.experts.up"),
        (dict(model=MODEL, ranks=8, expert_parallel=2, stage=0), "in stage 0"),
        (dict(model=MODEL, ranks=8, expert_parallel=2, resumable=True, drive_space="1TiB"), "a run, an outer optimizer"),
        (dict(model={"h.0.experts.0.up": (8, 8)}, ranks=8, expert_parallel=2), "in one tensor"),
    ]
    for options, said in cases:
        model = options.pop("model")
        with pytest.raises(ballast.UsageError, match=said):
            ballast.plan(model, **options)


def test_the_command_has_a_flag():
    options = ["--ranks", "16", "--gpu", "h100", "--expert-parallel", "8"]
    answer = subprocess.run([sys.executable, "-m", "ballast", "plan", "mixtral-8x7b", *options], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "8 ranks divide the experts of each layer" in answer.stdout
