"""Tests that ranks with different options are refused, and that options of a rank's own are allowed."""

from collections.abc import Callable
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.bodies import Heard
from python.wrap.support.loops import keywords, mean_square, mlp
from python.wrap.support.ranks import run_ranks


def schedules_its_own_lr(rank: int, stage: int) -> tuple[str, int]:
    """Train until the learning rate of rank 1 differs. Return the error and the steps."""
    model = mlp()
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, tuning=ballast.Tuning(timeout=20)
    )
    try:
        for step in range(4):
            optimizer.param_groups[0]["lr"] = 2e-2 if (rank, step) == (1, 2) else 1e-2 / (step + 1)
            mean_square(model, torch.ones(20)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except ballast.Error as error:
        return str(error), optimizer.steps
    return "", optimizer.steps


def trains_with(rank: int, of_ranks: list[dict[str, Any]]) -> tuple[str, int]:
    """Train a step with the options of this rank. Return the error, or nothing, and the steps."""
    options = dict(of_ranks[rank])
    make, group = options.pop("make", torch.optim.AdamW), options.pop("group", {"lr": 1e-2})
    model = mlp()
    optimizer = ballast.wrap(make(model.parameters(), **group), model, **keywords(timeout=20, **options))
    try:
        mean_square(model, torch.ones(20)).backward()
        optimizer.step()
    except ballast.Error as error:
        return str(error), optimizer.steps
    return "", optimizer.steps


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))


def with_layers_in_reverse(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([each for layer in reversed([*model]) for each in layer.parameters()], lr=0.1)


def in_other_groups(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [*model[:2].parameters()]}, {"params": [*model[2].parameters()]}], lr=0.1)


def with_one_less(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters()][:-1], lr=0.1)


def with_another_shape(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    model[0].weight.data = model[0].weight.data.reshape(2, 8)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_another_buffer(model: torch.nn.Sequential) -> torch.optim.Optimizer:
    model[1].register_buffer("seen", torch.zeros(2, device="cpu"))
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wraps_what_rank_1_lists(
    rank: int, stages: list[int], lists: list[Callable[[torch.nn.Sequential], torch.optim.Optimizer]]
) -> list[tuple[str, bool]]:
    """Wrap parameters that rank 1 lists differently. Return the errors, and whether they left all values as they were."""
    said = []
    for stage in stages:
        for of_rank_1 in lists:
            torch.manual_seed(rank)
            model = layers()
            plain = of_rank_1(model) if rank == 1 else torch.optim.SGD(model.parameters(), lr=0.1)
            before = [each.detach().clone() for each in model.parameters()]
            error = ""
            try:
                ballast.wrap(plain, model, stage=stage, tuning=ballast.Tuning(timeout=20))
            except ballast.Error as refused:
                error = str(refused)
            said.append((error, all(map(torch.equal, before, model.parameters()))))
    return said


def freezes_or_adds_in_its_own_way(rank: int, stage: int) -> list[tuple[str, int]]:
    """Train other parameters after wrap(), and other ones on rank 1. Return the errors and the steps."""
    said = []
    for adds in (False, True):
        model = layers()
        optimizer = ballast.wrap(
            torch.optim.SGD([*model[: 1 if adds else 3].parameters()]), model, stage=stage, tuning=ballast.Tuning(timeout=20)
        )
        if adds:
            optimizer.add_param_group({"params": [*model[1 + rank].parameters(), *model[2 - rank].parameters()]})
        else:
            model[1 + rank].weight.requires_grad_(False)
        error = ""
        try:
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        except ballast.Error as refused:
            error = str(refused)
        said.append((error, optimizer.steps))
        optimizer.close()
    return said


def discards_on_rank_1(rank: int) -> list[str]:
    """Make a step on rank 0 only, and compute a norm on rank 0 only."""
    said = []
    for use in ("step", "norm"):
        model = layers()
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, tuning=ballast.Tuning(timeout=20))
        model(torch.ones(4)).sum().backward()
        try:
            if rank == 1:
                optimizer.zero_grad()
            elif use == "step":
                optimizer.step()
            else:
                optimizer.clip_grad_norm_(1.0)
        except ballast.Error as refused:
            said.append(str(refused))
    return said


def logs_of_own_values(rank: int, stages: list[int]) -> list[list[str]]:
    """Wrap models without and with averages of their own, and a list of optimizers. Return the lines of the log of each."""
    kinds: list[Callable[[int], torch.nn.Module]] = [
        torch.nn.SyncBatchNorm,
        torch.nn.InstanceNorm1d,
        lambda width: torch.nn.Sequential(torch.nn.BatchNorm1d(width), torch.nn.BatchNorm2d(width)),
    ]
    heard, found = Heard(), []
    for stage in stages:
        for make in kinds:
            model = torch.nn.Sequential(torch.nn.Linear(4, 4), make(4), torch.nn.Linear(4, 4))
            plain = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model[0], model[2])]
            for optimizer in ballast.wrap(plain, model, stage=stage):
                optimizer.close()
            found.append(heard.lines)
            heard.lines = []
    ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1)).close()
    return [*found, heard.lines]


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
    for answers in run_ranks(2, discards_on_rank_1):
        assert len(answers) == 2
        for message in answers:
            assert message.startswith("B1001 cannot make a step: rank 1 discarded its gradients"), message
            assert "rank 0 did not" in message


DIFFERENT_LISTS = {
    with_layers_in_reverse: ("2.weight, torch.float32 of shape [4, 4], in", "0.weight, torch.float32 of shape [4, 4]"),
    in_other_groups: ("2.weight, torch.float32 of shape [4, 4], in parameter group 1", "in parameter group 0"),
    with_one_less: ("0.weight, torch.float32 of shape [4, 4] on rank 1", "2.bias, torch.float32 of shape [4], in"),
    with_another_shape: ("0.weight, torch.float32 of shape [2, 8], in", "0.weight, torch.float32 of shape [4, 4], in"),
    with_another_buffer: ("1.seen, torch.float32 of shape [2] on", "nothing on rank 0"),
}


def test_parameters_that_a_rank_lists_in_another_way_are_refused_before_values_are_exchanged():
    for answers in run_ranks(2, wraps_what_rank_1_lists, [0, 2, 3], [*DIFFERENT_LISTS]):
        for (there, here), (message, is_as_before) in zip([*DIFFERENT_LISTS.values()] * 3, answers, strict=True):
            assert message.startswith("B1001 cannot train: rank 1 has other parameters than rank 0"), message
            assert there in message and here in message and "A set of parameters" in message, message
            assert is_as_before


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_that_a_rank_freezes_or_adds_in_another_way_are_refused(stage):
    for frozen, added in run_ranks(2, freezes_or_adds_in_its_own_way, stage):
        assert "rank 1 has other parameters than rank 0" in frozen[0] and "1.weight" in frozen[0], frozen
        assert "rank 1 has other parameters than rank 0" in added[0] and "2.weight" in added[0], added
        assert (frozen[1], added[1]) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_0_logs_once_which_values_each_rank_keeps_of_its_own(ranks):
    answers = run_ranks(ranks, logs_of_own_values, [0, 3])
    lines = [[line for line in each if "each" in line] for each in answers[0]]
    expected = ["", "", "WARNING each rank averages the statistics of its own batches in 1 BatchNorm1d, 1 BatchNorm2d, and"]
    expected += ["", "", ""]  # the same words of other models are not repeated
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
