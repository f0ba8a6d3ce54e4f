"""Tests of plans that choose among state and gradient formats."""

import ballast
import pytest

MACHINE = {"gpu": "h100", "host_memory": "2TiB", "drive_space": "30TB"}
SMALL = {"h.0.weight": (512, 512), "h.1.weight": (512, 512)}
CARD = {"ranks": 1, "gpu": "rtx4090", "rates": {"host_memory": "400GB/s"}, "headroom": 0}
PAIRS = [(state, gradients) for state in ("split", "bf16", "compact", "4bit") for gradients in ("fp32", "bf16")]


def plan_with(pair, **machine):
    try:
        return ballast.plan("llama-8b", state_format=pair[0], gradient_format=pair[1], **machine)
    except ballast.OutOfMemoryError:
        return None


def test_the_most_exact_formats_that_fit_are_chosen():
    chosen = []
    for host in ("256GiB", "64GiB", "52GiB"):
        machine = {**CARD, "host_memory": host}
        fitting = {pair: plan for pair in PAIRS if (plan := plan_with(pair, **machine)) is not None}
        fastest = min(plan.seconds for plan in fitting.values())
        expected = next(plan for plan in fitting.values() if plan.seconds <= 1.05 * fastest)
        found = ballast.plan("llama-8b", state_format="auto", gradient_format="auto", **machine)
        assert found.is_as(expected)
        assert (found.memory, found.seconds) == (expected.memory, expected.seconds)
        front = ballast.pareto_front("llama-8b", state_format="auto", gradient_format="auto", **machine)
        assert all(each.fits for each in front)
        chosen.append((found.state_format, found.gradient_format))
    assert chosen[0] == ("split", "fp32")
    assert len(set(chosen)) == len(chosen)  # each machine needs smaller ones than the one before


def test_formats_that_save_much_time_are_chosen_before_exact_ones():
    machine = {**CARD, "host_memory": "37GiB", "drive_space": "1TiB", "rates": {"read": "1GB/s", "write": "1GB/s"}}
    plans = [ballast.plan("llama-8b", state_format=name, **machine) for name in ("split", "compact")]
    chosen = ballast.plan("llama-8b", state_format="compact,split", **machine)
    assert plans[0].seconds > 1.05 * plans[1].seconds
    assert (chosen.state_format, chosen.seconds) == ("compact", plans[1].seconds)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_gradients_in_bf16_take_half_of_the_memory_wherever_they_are(tier):
    machine = {"ranks": 2, "stage": 3, "offload": {"gradients": tier, "state": "host"}, **MACHINE}
    plans = {name: ballast.plan(SMALL, gradient_format=name, **machine) for name in ("fp32", "bf16")}
    elements = 2 * 512 * 512
    assert plans["fp32"].memory[tier]["reduced"] == 4 * elements // 2
    assert plans["bf16"].memory[tier]["reduced"] == 2 * elements // 2
    assert plans["bf16"].bytes_in("host") < plans["fp32"].bytes_in("host")  # gradients on their way are smaller too
    assert "gradients in bf16" in str(plans["bf16"]) and "gradients in" not in str(plans["fp32"])
    in_fp32 = ballast.plan(SMALL, gradient_format="bf16", dtype="fp32", **machine)
    assert in_fp32.memory[tier]["reduced"] == 4 * elements // 2
