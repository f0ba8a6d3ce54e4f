"""Tests of parameters without a gradient: those that no rank uses stay as they are, as in torch; others count as zero."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks

STEPS = 9


class Branches(torch.nn.Module):
    """Layers of which one has a turn in every third step only, on all ranks or on one, and one is never used."""

    def __init__(self, bias: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(20, 20, bias)
        self.branch = torch.nn.Linear(20, 20, bias)
        self.never = torch.nn.Linear(20, 20, bias)
        self.last = torch.nn.Linear(20, 20, bias)

    def forward(self, batch: torch.Tensor, takes_branch: bool = False) -> torch.Tensor:
        batch = torch.tanh(self.first(batch))
        return self.last(self.branch(batch) if takes_branch else batch)


class OneUnit(torch.nn.Module):
    """The same in a single block: a unit of stage 3 of which a rank uses a part."""

    def __init__(self, bias: bool = True):
        super().__init__()
        self.block = Branches(bias)

    def forward(self, batch: torch.Tensor, takes_branch: bool = False) -> torch.Tensor:
        return self.block(batch, takes_branch)


def takes_branch(step: int, part: int, alone: bool) -> bool:
    return step % 3 == 1 and (part == 0 or not alone)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    parts: range,
    *,
    alone: bool = False,
    set_to_none: bool = True,
) -> None:
    """Train on these parts of each batch, one by one. If `alone`, the first part alone takes the branch."""
    for step in steps:
        for part in parts:
            batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + part))
            (model(batch, takes_branch(step, part, alone)).square().mean() / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


Made = Callable[[Any], torch.optim.Optimizer]


def counts_of(optimizer: torch.optim.Optimizer) -> list[float | None]:
    """Return the count of steps of each parameter; None where the state_dict() of this rank has none."""
    state = optimizer.state_dict()["state"]
    steps = [state.get(number, {}).get("step") for number in range(sum(len(each["params"]) for each in optimizer.param_groups))]
    return [None if each is None else float(each) for each in steps]


def values_and_counts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    with ballast.gather(model):
        return [each.detach().clone() for each in model.parameters()], counts_of(optimizer)


def trained(
    rank: int, kind: Callable[[], torch.nn.Module], make: Made, configurations: list[dict], parts: int, ranks: int, **how: Any
) -> list[Any]:
    """Return the values and the counts of steps of a training in each configuration. A rank has every part of so many."""
    found = []
    for options in configurations:
        model = kind()
        optimizer = ballast.wrap(make(model.parameters()), model, **keywords(**options))
        train(model, optimizer, range(STEPS), range(rank, parts, ranks), **how)
        found.append(values_and_counts(model, optimizer))
        optimizer.close()
    return found


def resumed(rank: int, folder: Path, options: dict, steps: range, parts: int, ranks: int) -> Any:
    """Train for these steps, of which a checkpoint or the run has those before. Return the values and the counts of steps."""
    model = Branches()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), model, **keywords(**options))
    saves = "run" not in options
    if saves and steps.start > 0:
        ballast.load_checkpoint(folder, model, optimizer)
    assert optimizer.steps == steps.start
    train(model, optimizer, steps, range(rank, parts, ranks))
    if saves:
        ballast.save(folder, model, optimizer)
    found = values_and_counts(model, optimizer)
    optimizer.close()
    return found


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
KINDS = {
    "AdamW": ADAMW,
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, weight_decay=0.1, lr_decay=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, weight_decay=0.1),
}


def everywhere(folder, stages=(0, 1, 2, 3), **more):
    configurations = [
        *({"stage": stage, **offload} for stage in stages for offload in ({}, {"offload": "host"})),
        *({"stage": stage, "offload": {"state": f"nvme:{folder}"}} for stage in stages),
        {"stage": 3, "offload": f"nvme:{folder}"},
    ]
    of_one_unit = {"units": ["Branches"]}  # OneUnit needs it: else each of its layers is a unit
    return [{**each, **more, **(of_one_unit if each["stage"] == 3 else {})} for each in configurations]


def plain(kind=Branches, make=ADAMW, parts=2, **how):
    model = kind()
    optimizer = make(model.parameters())
    train(model, optimizer, range(STEPS), range(parts), **how)
    return [each.detach() for each in model.parameters()], counts_of(optimizer)


def require_same(one, other, *, bits=False):
    """Compare the values, and the counts of steps where both have one."""
    tolerance = {"rtol": 0, "atol": 0} if bits else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(one[0], other[0], **tolerance)
    assert all(mine == others for mine, others in zip(one[1], other[1]) if mine is not None and others is not None)


def check_as_plain(ranks, configurations, kind=OneUnit, make=ADAMW, parts=2, *, bits=True, **how):
    """Compare trainings in these configurations with each other, bit for bit, and with a plain one."""
    expected = plain(kind, make, parts, **how)
    for found in run_ranks(ranks, partial(trained, **how), kind, make, configurations, parts, ranks):
        for each in found:
            require_same(each, found[0], bits=bits)
        require_same(found[0], expected)
    return found[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_parameter_that_no_rank_uses_stays_as_it_is(name, ranks, tmp_path):
    is_factored = name == "Adafactor"
    configurations = [each for each in everywhere(tmp_path) if not is_factored or "nvme" not in str(each)]
    for kind in (Branches, OneUnit):
        of_kind = configurations if kind is OneUnit else [{"stage": 3}, *configurations[:1]]
        values, counts = check_as_plain(ranks, of_kind, kind, KINDS[name], bits=not is_factored)
        assert all(map(torch.equal, values[4:6], Branches().never.parameters()))
        assert counts[4:6] == ([0, 0] if name == "Adagrad" else [None, None])  # torch makes Adagrad's entries with it


@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_of_muon_stay_as_they_are(ranks, tmp_path):
    kind, make = partial(OneUnit, bias=False), partial(torch.optim.Muon, lr=1e-2)
    expected, _ = plain(kind, make)
    for found in run_ranks(ranks, trained, kind, make, everywhere(tmp_path), 2, ranks):
        for each in found:
            require_same(each, found[0], bits=True)
        torch.testing.assert_close(found[0][0], expected, rtol=3e-2, atol=3e-3)  # sums in bfloat16
        assert torch.equal(found[0][0][2], Branches(bias=False).never.weight)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_parameter_that_some_parts_of_a_batch_use_counts_as_zero_in_the_others(name, ranks, parts, tmp_path):
    check_as_plain(ranks, everywhere(tmp_path), make=KINDS[name], parts=parts, alone=True)
    check_as_plain(ranks, [{"stage": 2}, {"stage": 3}], Branches, KINDS[name], parts, alone=True)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_in_the_backward_pass_leave_them_out_too(ranks, alone, tmp_path):
    configurations = [{"stage": 2}, *everywhere(tmp_path, (3,), update_in_backward=True)]
    check_as_plain(ranks, configurations, parts=ranks, alone=alone)
    check_as_plain(ranks, [{"stage": 2}, {"stage": 3, "update_in_backward": True}], Branches, parts=ranks, alone=alone)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_gradients_of_zeros_are_used(name):
    check_as_plain(1, [{"stage": 2}, {"stage": 3}], Branches, KINDS[name], set_to_none=False)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("stops_at", [2, 3])
def test_the_counts_are_those_of_before_after_a_restart(stops_at, in_backward, saves, tmp_path):
    options = {"stage": 3, "offload": {"state": f"nvme:{tmp_path}"}, "update_in_backward": in_backward}
    if not saves:
        options["run"] = "mine"
    for steps, ranks in ((range(stops_at), 2), (range(stops_at, 6), 2), (range(6, STEPS), 1 if not in_backward else 2)):
        found = run_ranks(ranks, resumed, tmp_path / "saved", options, steps, 2, ranks)
    for each in found:
        require_same(each, plain())
