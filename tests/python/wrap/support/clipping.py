"""Clips through torch on several ranks, and counts the calls and exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ballast
import torch
from ballast.ranks import Group
from ballast.torch.training.use_agreement import WATCHED_STEPS
from python.wrap.support.bodies import Routed
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, Tower, mean_square


class CountingCore:
    """Stands in for a training of the library. Counts its calls by name."""

    def __init__(self, core: Any, calls: Counter[str]):
        self._core, self._calls = core, calls

    def __getattr__(self, name: str) -> Any:
        self._calls[name] += 1
        return getattr(self._core, name)


def clips_through_torch(rank: int, stage: int) -> tuple[int, int, bool]:
    """Return how often norms are computed, how often the ranks agree on anything else, and whether the norm is that of the
    wrapped optimizer."""
    loop = Loop(make_model=Tower, rank=rank, ranks=2)
    model = loop.make_model()
    optimizer: Any = ballast.wrap(torch.optim.SGD(model.parameters(), lr=1e-3), model, stage=stage)
    calls: Counter[str] = Counter()
    norms = []
    for clip in (*["warm-up"] * WATCHED_STEPS, "torch", "optimizer"):  # ranks of stage 3 also compare uses in these steps
        loss = mean_square(model, loop.batch(1))
        loss.backward()
        if clip == "torch":
            partition = optimizer._ballast.current
            core, all_reduce = partition.core, Group.all_reduce
            partition.core = CountingCore(core, calls)
            Group.all_reduce = lambda group, values: calls.update(["all_reduce"]) or all_reduce(group, values)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
            partition.core, Group.all_reduce = core, all_reduce
            optimizer.zero_grad()
            continue
        if clip == "optimizer":
            norms.append(float(optimizer.clip_grad_norm_(1e9)))
        optimizer.step()
        optimizer.zero_grad()
    is_equal = abs(norms[0] - norms[1]) <= 1e-6 * norms[1]
    return calls["tensor_norms"] + calls["gradient_norm"], calls["all_reduce"], is_equal


def clips_by_hand(rank: int, stage: int) -> tuple[list[float], list[torch.Tensor]]:
    """Make steps whose gradients are those of a backward pass, of the caller, or none, each rank with its own. Return the
    norms before and after each step, and the parameters in the end."""
    loop = Loop(rank=rank, ranks=2)
    model = loop.make_model()
    optimizer: Any = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    seen = [float(optimizer.clip_grad_norm_(0.1))]
    for step, by_hand in enumerate((True, False, True)):
        if by_hand:
            for parameter in model.parameters():
                parameter.grad = torch.full(parameter.shape, rank + 1.0, device="cpu")
        else:
            loop.loss(model, loop.batch(step)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        seen.append(float(optimizer.clip_grad_norm_(0.1)))
        optimizer.step()
        if not by_hand:
            seen.append(sum(float(each.grad.norm()) ** 2 for each in model.parameters()) ** 0.5)
        optimizer.zero_grad()
    with ballast.gather(model):
        return seen, [each.detach().clone() for each in model.parameters()]


def norms_in_reports(rank: int, stage: int, clip: str) -> list[tuple[float, float, str]]:
    """Make steps with clipped gradients. Return the norm that each clip has returned, the one in metrics(), and StepLine's."""
    loop = Loop(rank=rank, ranks=2)
    model = loop.make_model()
    optimizer: Any = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    line = ballast.StepLine(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    seen = []
    for step, max_norm in enumerate((1e-3, 0.0, 1e9)):
        if step == 1 and rank == 1:
            loss = 0 * loop.loss(model, loop.batch(step))
        else:
            loss = loop.loss(model, loop.batch(step))
        scaler.scale(loss).backward()
        if step == 0:  # a factor is no clipping before the norm is known
            for each in model.parameters():
                each.grad.mul_(0.5)
        scaler.unscale_(optimizer)
        norm = CLIPS[clip](model, optimizer, max_norm)
        scaler.step(optimizer)
        seen.append((norm, optimizer.metrics()["grad_norm"], line.postfix()["norm"]))
        scaler.update()
        optimizer.zero_grad()
    return seen


def clips_with_a_number(model: torch.nn.Module, max_norm: float) -> float:
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]))
    for each in model.parameters():
        each.grad.mul_(min(1.0, max_norm / norm))
    return norm


CLIPS: dict[str, Callable[[torch.nn.Module, Any, float], float]] = {
    "of the optimizer": lambda model, optimizer, max_norm: float(optimizer.clip_grad_norm_(max_norm)),
    "of torch": lambda model, optimizer, max_norm: float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)),
    "one by one": lambda model, optimizer, max_norm: float(
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=False)
    ),
    "by hand": lambda model, optimizer, max_norm: clips_with_a_number(model, max_norm),
    "twice": lambda model, optimizer, max_norm: max(
        float(optimizer.clip_grad_norm_(each * max_norm)) for each in (1.0, 0.5)
    ),
}


Clip = Callable[[list[torch.nn.Parameter]], Any]

AS_TORCH: dict[str, Clip] = {
    **{f"order {order}": partial(torch.nn.utils.clip_grad_norm_, max_norm=0.05, norm_type=order)
       for order in (0.5, 1.0, 3.0, float("inf"))},
    "one by one": partial(torch.nn.utils.clip_grad_norm_, max_norm=0.05, norm_type=1.0, foreach=False),
    "some": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters[:2], 0.05),
    "some by another order": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters[2:], 0.05, norm_type=1.0),
    "each": lambda parameters: sum(torch.nn.utils.clip_grad_norm_([each], 0.02) for each in parameters),
    "some, then all": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters[:2], 0.05)
    + torch.nn.utils.clip_grad_norm_(parameters, 0.05),
    "value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.005) or 0.0,
    "value one by one": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.005, foreach=False) or 0.0,
    "value and norm": lambda parameters: (torch.nn.utils.clip_grad_value_(parameters, 0.005) or 0.0)
    + torch.nn.utils.clip_grad_norm_(parameters, 0.01),
    "norm and value": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.05)
    + (torch.nn.utils.clip_grad_value_(parameters, 0.005) or 0.0),
}


def clips_as_torch(rank: int, ranks: int, stage: int, clip: str, passes: int) -> tuple[list[float], list[torch.Tensor]]:
    """Make steps with clipped gradients, of which the norms are also read before the last backward pass. Return the norms and
    the parameters."""
    loop = Loop(rank=rank, ranks=ranks)
    model = loop.make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if stage >= 0:
        optimizer = ballast.wrap(optimizer, model, stage=stage, tuning=ballast.Tuning(timeout=20))
    seen = []
    for step in range(3):
        for number in range(passes):
            if number > 0:
                seen.append(float(torch.nn.utils.clip_grad_norm_([*model.parameters()], 1e9)))
            batches = [loop] if stage >= 0 else [replace(loop, rank=each) for each in range(ranks)]
            for each in batches:
                (each.loss(model, each.batch(step * passes + number)) / len(batches)).backward()
        seen.append(float(AS_TORCH[clip]([*model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(model):
        return seen, [each.detach().clone() for each in model.parameters()]


def clips_different_gradients(rank: int, stage: int) -> tuple[str, list[float]]:
    """Unscale and clip gradients that each rank has of other parameters. Return what torch's function says, and the norms
    before and after clipping through the optimizer."""
    model = Routed()
    options = {"units": ("Routed",)} if stage == 3 else {}  # all ranks gather the same units
    optimizer: Any = ballast.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(stage=stage, timeout=20, **options)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(mean_square(model, torch.full((20,), 0.05))).backward()
    scaler.unscale_(optimizer)  # this asks whether norms are finite
    error = ""
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    except ballast.Error as refused:
        error = str(refused)
    norms = [float(optimizer.clip_grad_norm_(0.01)), float(optimizer.clip_grad_norm_(1e9))]
    optimizer.step()
    return error, norms


def clips_on_a_rank_without_a_batch(rank: int) -> str:
    model = torch.nn.Linear(20, 5)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, tuning=ballast.Tuning(timeout=20))
    if rank == 0:
        mean_square(model, torch.ones(20)).backward()
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    except ballast.Error as refused:
        return str(refused)
    return ""


def skips_by_a_factor_of_one_rank(rank: int, stage: int) -> None:
    """Make a step whose gradients rank 1 has scaled by NaN, and one without."""
    loop = Loop(rank=rank, ranks=2)
    model = loop.make_model()
    optimizer: Any = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    with ballast.gather(model):
        before = [each.detach().clone() for each in model.parameters()]
    for factor, updates in ((float("nan"), 0), (1.0, 1)):
        loop.loss(model, loop.batch(0)).backward()
        for each in model.parameters() if rank == 1 else ():
            each.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        assert (optimizer.steps, optimizer.metrics()["skipped_steps"]) == (updates, 1)
        with ballast.gather(model):
            is_same = all(map(torch.equal, model.parameters(), before))
        assert is_same == (updates == 0)


def norms_of_order(rank: int, stage: int, order: float) -> tuple[float, ...]:
    """Return the norms of gradients that are the same on all ranks."""
    loop = Loop()
    model = loop.make_model()
    optimizer: Any = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    loop.loss(model, loop.batch(0)).backward()
    norms = tuple(optimizer._ballast.partition()._tensor_norms(order))
    optimizer.zero_grad()
    return norms
