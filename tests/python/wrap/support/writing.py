"""Writes to parameters inside ballast.gather(), in trainings of all stages and tiers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.gathered_once import blocks
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, mlp

Write = Callable[[torch.nn.Module, str], None]  # to the parameter of this name


def of(model: torch.nn.Module, name: str) -> torch.nn.Parameter:
    return model.get_parameter(name)


def in_place(model: torch.nn.Module, name: str) -> None:
    with torch.no_grad():
        of(model, name).mul_(2)


def in_place_of_data(model: torch.nn.Module, name: str) -> None:
    of(model, name).data.mul_(2)


def copied_to_data(model: torch.nn.Module, name: str) -> None:
    of(model, name).data.copy_(of(model, name).data * 2)


def added_to_data(model: torch.nn.Module, name: str) -> None:
    of(model, name).data += of(model, name).data.clone()


def new_data(model: torch.nn.Module, name: str) -> None:
    of(model, name).data = of(model, name).data * 2


def new_data_of_other_strides(model: torch.nn.Module, name: str) -> None:
    parameter = of(model, name)
    twice = parameter.data * 2
    # A frozen parameter keeps these strides below stage 3, where torch's products would then round differently.
    parameter.data = twice.t().contiguous().t() if twice.dim() == 2 and parameter.requires_grad else twice


def written_as_bytes(model: torch.nn.Module, name: str) -> None:
    """Write through a NumPy array on the parameter's memory, which torch does not notice."""
    memory = of(model, name).detach().view(torch.uint8).numpy()
    memory[...] = (of(model, name).detach() * 2).view(torch.uint8).numpy()


def loaded(model: torch.nn.Module, name: str) -> None:
    model.load_state_dict({name: of(model, name).detach() * 2}, strict=False)


WRITES: list[Write] = [
    in_place,
    in_place_of_data,
    copied_to_data,
    added_to_data,
    new_data,
    new_data_of_other_strides,
    written_as_bytes,
    loaded,
]

WRITTEN = ["0.weight", "0.bias", "2.weight"]  # the same unit has other parameters too; "2.weight" is frozen


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Tanh(), torch.nn.Linear(20, 5)).to(dtype)
    model[2].weight.requires_grad_(False)
    return model


def square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch.to(next(model.parameters()).dtype)).square().mean()


def trained(write: Write, dtype: torch.dtype, options: dict[str, Any], *, drops: bool = False) -> list[torch.Tensor]:
    """Return the parameters after they were written to, and those two steps later. With `drops`, a backward pass between the
    write and those steps is dropped."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    loop = Loop(make_model=lambda: model_of(dtype), loss=square, steps=2, rank=rank, ranks=ranks)
    run = loop.run(**options)
    with ballast.gather(run.model):
        wanted = {name: of(run.model, name).detach().clone() * 2 for name in WRITTEN}
        for name in WRITTEN:
            write(run.model, name)
    if drops:
        square(run.model, loop.batch(9)).backward()
        run.optimizer.zero_grad()
    with ballast.gather(run.model):
        for name in WRITTEN:
            assert torch.equal(of(run.model, name), wanted[name]), f"{write.__name__} to {name} is lost"
        seen = run.parameters
    loop.steps = 4
    loop.train(run.model, run.optimizer, 2)
    with ballast.gather(run.model):
        seen += run.parameters
    run.optimizer.close()
    return seen


def trained_on_each_rank(
    rank: int, dtype: torch.dtype, configurations: list[dict[str, Any]], drops: bool = False
) -> list[dict[str, list[torch.Tensor]]]:
    return [
        {write.__name__: trained(write, dtype, options, drops=drops) for write in WRITES} for options in configurations
    ]


def closed_in_the_middle_of_a_step(options: dict[str, Any]) -> torch.Tensor:
    """Return a weight that was written to before a backward pass, after close() has dropped that."""
    run = Loop(steps=2).run(**options)
    with ballast.gather(run.model), torch.no_grad():
        run.model[0].weight.fill_(5.0)
    square(run.model, Loop().batch(9)).backward()
    run.optimizer.close()
    return run.model[0].weight.detach()


def writes_on_rank_1_only(rank: int, stage: int, by_data: bool) -> str:
    """Return this rank's error when only rank 1 writes inside gather()."""
    run = Loop(steps=2, rank=rank, ranks=2).run(stage=stage)
    try:
        with ballast.gather(run.model), torch.no_grad():
            weight = run.model[0].weight
            if rank == 1:
                (weight.data if by_data else weight).fill_(3.0)
        Loop(steps=3, rank=rank, ranks=2).train(run.model, run.optimizer, 2)
    except ballast.Error as error:
        return str(error)
    return ""


def casts_on_rank_1_only(rank: int, stage: int) -> str:
    """Return this rank's error when only rank 1 changes a parameter's dtype inside gather()."""
    run = Loop(steps=2, rank=rank, ranks=2).run(stage=stage)
    try:
        with ballast.gather(run.model):
            if rank == 1:
                run.model[0].weight.data = run.model[0].weight.data.double()
        run.optimizer.step()
        run.model[0].bias.grad = torch.zeros_like(run.model[0].bias)
        run.optimizer.step()
    except ballast.Error as error:
        return str(error)
    return ""


def rounded_from(stage: int, write: Write | None) -> torch.Tensor:
    """Return a bf16 bias whose updates only its master resolves, after a write to another parameter of its tile."""

    def step(count: int) -> None:
        for _ in range(count):
            model(torch.ones(1, 20, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    model = torch.nn.Linear(20, 100, dtype=torch.bfloat16)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=2e-5), model, stage=stage, state_format="fp32")
    step(9)
    with ballast.gather(model):
        if write is not None:
            write(model, "weight")
    step(9)
    with ballast.gather(model):
        return model.bias.detach().clone()


def steps_inside_of_gather(stage: int, gathers: bool) -> torch.Tensor:
    """Return a bf16 weight of a training that steps inside gather() without writing, or outside of it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5, dtype=torch.bfloat16)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=2e-5), model, stage=stage, state_format="fp32")
    for _ in range(9):
        with ballast.gather(model) if gathers else nullcontext():
            for _ in range(7):
                model(torch.ones(1, 20, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return model.weight.detach().clone()


def swapped(stage: int, dtype: torch.dtype, swaps: int) -> list[torch.Tensor]:
    """Swap parameters with averages `swaps` times, then take a step. Return the parameters before and after it."""
    loop = Loop(make_model=lambda: model_of(dtype), loss=square, steps=2)
    run = loop.run(stage=stage)
    averages = [torch.zeros_like(each, requires_grad=False) for each in model_of(dtype).parameters()]
    for _ in range(swaps):
        with ballast.gather(run.model):
            for parameter, average in zip(run.model.parameters(), averages):
                parameter.data, average.data = average.data, parameter.data
    with ballast.gather(run.model):
        seen = run.parameters
    loop.steps = 3
    loop.train(run.model, run.optimizer, 2)
    with ballast.gather(run.model):
        return seen + run.parameters


def begins_with_other_values(rank: int, stage: int, gathers: bool) -> str:
    """Return this rank's error when rank 0 writes after wrap() and before the first step."""
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
    try:
        with ballast.gather(model) if gathers else nullcontext(), torch.no_grad():
            if rank == 0:
                model[0].weight.fill_(5.0)
        Loop(steps=1, rank=rank, ranks=2).train(model, optimizer)
    except ballast.Error as error:
        return str(error)
    return ""


def raises_on_rank_1_only(rank: int) -> str:
    """Return this rank's error when rank 1 raises inside gather()."""
    run = Loop(steps=2, rank=rank, ranks=2).run(stage=3)
    try:
        with ballast.gather(run.model), torch.no_grad():
            run.model[0].weight.fill_(5.0)
            if rank == 1:
                raise ValueError("mine")
            run.model[0].bias.fill_(5.0)
    except ballast.Error as error:
        return str(error)
    except ValueError as error:
        return f"ValueError: {error}"
    return ""


def assigns_a_parameter(layer: torch.nn.Module) -> None:
    layer.weight = torch.nn.Parameter(torch.ones_like(layer.weight))


def loads_by_assigning(layer: torch.nn.Module) -> None:
    layer.load_state_dict({"weight": torch.ones_like(layer.weight)}, strict=False, assign=True)


ASSIGNMENTS = [assigns_a_parameter, loads_by_assigning]


CLIPPED = "between clipping and the step"
MOMENTS = (
    *("before forward", "between forward and backward", "between two backward passes", "before the last backward pass"),
    CLIPPED,
)


def losses_with_writes(rank: int, configurations: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Write to a parameter at the same moment of each step. Return the losses of plain torch and of each configuration."""
    return {moment: [_losses_with_writes(options, moment) for options in ({}, *configurations)] for moment in MOMENTS}


def _losses_with_writes(options: dict[str, Any], chosen: str) -> list[float]:
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    losses = []

    def write_at(moment: str) -> None:
        if moment == chosen:
            with ballast.gather(model[2]) if options else nullcontext():
                model[2].weight.data.mul_(1.5)

    def loss() -> torch.Tensor:
        losses.append(model(torch.ones(20)).square().sum())
        return losses[-1]

    for _ in range(4):  # the third one, if not before, has the writes in its plan
        write_at("before forward")
        first = loss()
        write_at("between forward and backward")
        first.backward()
        write_at("between two backward passes")
        second = loss()
        write_at("before the last backward pass")
        second.backward()
        if chosen == CLIPPED:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            write_at(CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
    return [each.item() for each in losses]
