"""Tests that ranks with different options are refused, and that options of a rank's own are allowed."""

import ballast
import pytest
import torch
from python.wrap.support import options
from python.wrap.support.loops import mlp
from python.wrap.support.options import schedules_its_own_lr, trains_with
from python.wrap.support.ranks import run_ranks

DIFFERENT = {
    "lr of parameter group 0": ({}, {"group": {"lr": 2e-2}}),
    "betas of parameter group 0": ({}, {"group": {"lr": 1e-2, "betas": (0.8, 0.999)}}),
    "optimizer": ({}, {"make": torch.optim.Adam}),
    "max_grad_norm": ({"max_grad_norm": 1.0}, {}),
    "state_format": ({"state_format": "bf16"}, {"state_format": "fp32"}),
    "gradient_format": ({"gradient_format": "bf16"}, {}),
    "stage": ({"stage": 1}, {"stage": 2}),
    "offload": ({"stage": 3}, {"stage": 3, "offload": "host"}),
    "tile": ({"tile": 128}, {"tile": 256}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_with_different_options_are_refused_before_the_first_step(name):
    for message, steps in run_ranks(2, trains_with, list(DIFFERENT[name])):
        assert message.startswith(f"B1001 cannot train: rank 1 has another {name} than rank 0"), message
        assert steps == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_a_learning_rate_that_differs_in_a_later_step_is_refused_before_its_update(stage):
    for message, steps in run_ranks(2, schedules_its_own_lr, stage):
        assert "rank 1 has another lr of parameter group 0 than rank 0" in message
        assert "0.02 on rank 1, and 0.003" in message
        assert steps == 2


def test_a_rank_may_have_its_own_threads_timeline_and_directory(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    own = [
        {"stage": 3, "offload": {"state": f"nvme:{tmp_path / 'a'}"}, "threads": 1, "timeline": True},
        {"stage": 3, "offload": {"state": f"nvme:{tmp_path / 'b'}"}, "threads": 2},
    ]
    assert run_ranks(2, trains_with, own) == [("", 1), ("", 1)]


def test_a_rank_that_discards_its_gradients_alone_is_named():
    for answers in run_ranks(2, options.discards_on_rank_1):
        assert len(answers) == 2
        for message in answers:
            assert message.startswith("B1001 cannot make a step: rank 1 discarded its gradients"), message
            assert "rank 0 did not" in message


DIFFERENT_LISTS = {
    options.with_layers_in_reverse: ("2.weight, torch.float32 of shape [4, 4], in", "0.weight, torch.float32 of shape [4, 4]"),
    options.in_other_groups: ("2.weight, torch.float32 of shape [4, 4], in parameter group 1", "in parameter group 0"),
    options.with_one_less: ("0.weight, torch.float32 of shape [4, 4] on rank 1", "2.bias, torch.float32 of shape [4], in"),
    options.with_another_shape: ("0.weight, torch.float32 of shape [2, 8], in", "0.weight, torch.float32 of shape [4, 4], in"),
    options.with_another_buffer: ("1.seen, torch.float32 of shape [2] on", "nothing on rank 0"),
}


def test_parameters_that_a_rank_lists_in_another_way_are_refused_before_values_are_exchanged():
    for answers in run_ranks(2, options.wraps_what_rank_1_lists, [0, 2, 3], [*DIFFERENT_LISTS]):
        for (there, here), (message, is_as_before) in zip([*DIFFERENT_LISTS.values()] * 3, answers, strict=True):
            assert message.startswith("B1001 cannot train: rank 1 has other parameters than rank 0"), message
            assert there in message and here in message and "A set of parameters" in message, message
            assert is_as_before


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_a_rank_freezes_or_adds_in_another_way_are_refused(stage):
    for frozen, added in run_ranks(2, options.freezes_or_adds_in_its_own_way, stage):
        assert "rank 1 has other parameters than rank 0" in frozen[0] and "1.weight" in frozen[0], frozen
        assert "rank 1 has other parameters than rank 0" in added[0] and "2.weight" in added[0], added
        assert (frozen[1], added[1]) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_logs_once_which_values_each_rank_keeps_of_its_own(ranks):
    answers = run_ranks(ranks, options.logs_of_own_values, [0, 3])
    lines = [[line for line in each if "each" in line] for each in answers[0]]
    expected = ["", "", "WARNING each rank averages the statistics of its own batches in 1 BatchNorm1d, 1 BatchNorm2d, and"] * 2
    expected.append("INFO ballast.wrap() has no model: ranks begin with rank 0's values of the optimizer's parameters")
    for said, begin in zip(lines, expected, strict=True):
        assert len(said) == int(ranks == 2 and begin != "")
        assert all(line.startswith(begin) for line in said)
    assert all(not any("each" in line for line in each) for answer in answers[1:] for each in answer)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_optimizer_of_another_model_is_refused(stage):
    other = mlp()
    with pytest.raises(ballast.UsageError, match="none of its 4 parameters is in the model"):
        ballast.wrap(torch.optim.AdamW(other.parameters()), mlp(), stage=stage)
