"""Tests of mixtures of experts: a rank without tokens for an expert adds zeros to its gradients, at every stage."""

import pytest
import torch
from python.wrap.support import experts
from python.wrap.support.ranks import run_ranks

BLOCKS = {"units": ["Mixture"]}
LINEAR = {"units": ["Linear"]}  # each expert is a unit


def bits(parameters):
    return [each.tolist() for each in parameters]


def check(answers):
    """Compare with torch, and the bits of all configurations. Ranks must have lacked tokens for different experts."""
    for (expected, unused), *ours in answers:
        assert min(unused) > 0
        for parameters, also_unused in ours:
            assert also_unused == unused
            for mine, theirs in zip(parameters, expected, strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
            assert bits(parameters) == bits(ours[0][0])
    counts = [answer[0][1] for answer in answers]
    assert any(len({*of_ranks}) > 1 for of_ranks in zip(*counts)), counts


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_stage_3_trains_experts_that_lack_tokens_on_some_ranks(ranks, is_checkpointed, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    configurations = [{"stage": 0}, {"stage": 2}, {"stage": 3}, {"stage": 3, **BLOCKS}]
    configurations += [{"stage": 3, "offload": on_drive}, {"stage": 3, "update_in_backward": True}]
    configurations += [{"stage": 3, **LINEAR}, {"stage": 3, **LINEAR, "update_in_backward": True}]
    check(run_ranks(ranks, experts.trained, is_checkpointed, {}, configurations))


def test_gradients_are_accumulated_and_clipped_by_torch():
    configurations = [{"stage": 3}, {"stage": 3, **BLOCKS}, {"stage": 3, **LINEAR}]
    check(run_ranks(2, experts.trained, False, {"micro_steps": 2, "clip": 0.1}, configurations))
