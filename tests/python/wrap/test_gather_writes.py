"""Tests that writes to parameters inside ballast.gather() are kept, however they are made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast.torch.parameters.writes import checksum_on_device
from python.wrap.support.loops import Loop, keywords, mlp
from python.wrap.support.models import blocks
from python.wrap.support.ranks import run_ranks

Write = Callable[[torch.nn.Module, str], None]  # a function that writes to the parameter of this name


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


def loaded_after_a_read(stage: int, folder: Path, gathers: bool) -> torch.Tensor:
    """Return a bf16 weight of a training that loads its own checkpoints, where it was read since the last step or not."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5, dtype=torch.bfloat16)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=2e-5), model, stage=stage, state_format="fp32")
    for number in range(9):
        for _ in range(7):
            model(torch.ones(1, 20, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if gathers:
            with ballast.gather(model):
                pass
        ballast.save(folder / str(number), model, optimizer)
        ballast.load_checkpoint(folder / str(number), model, optimizer)
    with ballast.gather(model):
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


def gathers_on_rank_0_only(rank: int) -> str:
    """Return this rank's error when rank 0 alone uses gather(), and rank 1 begins the next step."""
    run = Loop(steps=2, rank=rank, ranks=2).run(stage=3)
    with pytest.raises(ballast.Error) as caught:
        if rank == 0:
            with ballast.gather(run.model):
                run.model[0].weight.sum()
        run.model(torch.ones(2, run.model[0].in_features)).sum().backward()
    return str(caught.value)


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


BF16 = torch.bfloat16
ROUNDED = ["compact", "4bit"]
FORMATS = ["fp32", "split", "fp32 of bf16", *ROUNDED, *(f"{name}, stage 3" for name in ROUNDED)]


def options_of(folder):
    """Return for each format its dtype, and the options of stages and tiers that must all give the same bits."""
    tiers = [None, "host", f"nvme:{folder}", {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}]
    stages = [{"stage": stage, "offload": tier} for stage in range(3) for tier in tiers[:3]]
    stages += [{"stage": 3, "offload": tier} for tier in tiers]
    return {
        "fp32": (torch.float32, stages),
        "split": (BF16, stages),
        "fp32 of bf16": (BF16, [{**each, "state_format": "fp32"} for each in stages]),
        # Rounding depends on an element's index in its unit, and stage 3 has other units.
        **{name: (BF16, [{"stage": stage, "state_format": name} for stage in range(3)]) for name in ROUNDED},
        **{
            f"{name}, stage 3": (BF16, [{"stage": 3, "state_format": name, "offload": tier} for tier in tiers])
            for name in ROUNDED
        },
    }


def check_same_bits(results):
    first, *others = [tensors for by_write in results for tensors in by_write.values()]
    for other in others:
        assert len(other) == len(first)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, first))


@pytest.mark.parametrize("kept", FORMATS)
def test_every_kind_of_write_is_kept_at_every_stage_and_tier(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    check_same_bits(trained_on_each_rank(0, dtype, options))


@pytest.mark.parametrize("kept", FORMATS)
def test_every_kind_of_write_is_kept_on_two_ranks(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    options = options if kept == "fp32" else options[FORMATS.index(kept) % 2 :: 2]
    for results in run_ranks(2, trained_on_each_rank, dtype, options):
        check_same_bits(results)


@pytest.mark.parametrize("kept", ["fp32", "split"])
def test_every_kind_of_write_survives_a_backward_pass_that_is_dropped(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    check_same_bits([*trained_on_each_rank(0, dtype, options), *trained_on_each_rank(0, dtype, options, True)])


@pytest.mark.parametrize("stage", range(4))
def test_a_write_survives_the_end_of_a_training_in_the_middle_of_a_step(stage):
    weight = closed_in_the_middle_of_a_step({"stage": stage, "offload": "host"})
    assert torch.equal(weight, torch.full_like(weight, 5.0))


def test_writes_in_the_middle_of_every_step_reach_all_uses_after_them(tmp_path):
    in_stage_3 = [{}, {"keep_gathered": True}, {"offload": {"parameters": "host", "state": "host"}}]
    in_stage_3 += [{"offload": {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}}]
    configurations = [{"stage": 2}, {"stage": 2, "offload": "host"}, *({"stage": 3, **options} for options in in_stage_3)]
    for by_moment in run_ranks(2, losses_with_writes, configurations):
        for moment, (plain, *others) in by_moment.items():
            for options, losses in zip(configurations, others):
                assert losses == pytest.approx(plain, rel=1e-4), (moment, options)


@pytest.mark.parametrize("stage", range(4))
def test_a_write_does_not_change_masters_of_other_parameters(stage):
    """A write to a parameter does not change the masters of others, even in the same tile."""
    undisturbed, disturbed = (rounded_from(stage, write) for write in (None, in_place_of_data))
    assert torch.equal(undisturbed, disturbed)


@pytest.mark.parametrize("stage", range(3))
def test_a_step_inside_of_gather_is_no_write(stage):
    outside, inside = (steps_inside_of_gather(stage, gathers) for gathers in (False, True))
    assert torch.equal(outside, inside)


@pytest.mark.parametrize("stage", range(4))
def test_a_load_after_a_read_is_no_write(stage, tmp_path):
    unread, read = (loaded_after_a_read(stage, tmp_path / str(gathers), gathers) for gathers in (False, True))
    assert torch.equal(unread, read)


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}])
def test_in_stage_3_copies_are_gathered_that_no_step_updates(options):
    loop = Loop(steps=2)
    run = loop.run(stage=3, **options)
    with pytest.raises(ballast.UsageError, match="cannot (make a step|update parameters)(.|\n)*: parameters are gathered"):
        with ballast.gather(run.model):
            loop.steps = 3
            loop.train(run.model, run.optimizer, 2)


def test_in_stage_3_a_checkpoint_has_no_copies(tmp_path):
    run = Loop(steps=2).run(stage=3)
    with ballast.gather(run.model), pytest.raises(ballast.UsageError, match="save a checkpoint: parameters are gathered"):
        ballast.save(tmp_path, run.model, run.optimizer)


# Each block ends with a write in stage 3, and the master of a bf16 parameter restarts from the written values.
SWAPS = [(stage, torch.float32) for stage in range(4)] + [(stage, BF16) for stage in range(3)]


@pytest.mark.parametrize(("stage", "dtype"), SWAPS)
def test_averages_are_swapped_in_and_out_again(stage, dtype):
    """Swapping averages in and out through .data, as scripts do for an evaluation, changes nothing."""
    assert all(torch.equal(*pair) for pair in zip(*(swapped(stage, dtype, swaps) for swaps in (0, 2))))


@pytest.mark.parametrize("stage", range(3))
def test_memory_of_a_parameter_that_another_tensor_uses_is_not_overwritten(stage):
    with pytest.raises(ballast.UsageError, match="another tensor uses the parameter's own memory(.|\n)*clone"):
        swapped(stage, torch.float32, 1)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("by_data", [True, False])
def test_values_that_differ_between_ranks_are_refused_on_all_of_them(stage, by_data):
    for error in run_ranks(2, writes_on_rank_1_only, stage, by_data):
        assert "cannot keep a write to a parameter: ranks hold different values" in error
        assert "parameter 0.weight; rank 1 differs from rank 0" in error


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("gathers", [True, False])
def test_values_that_differ_when_training_begins_are_refused(stage, gathers):
    for error in run_ranks(2, begins_with_other_values, stage, gathers):
        assert "cannot begin to train: ranks hold different values" in error
        assert "parameter 0.weight; rank 1 differs from rank 0" in error


def test_an_exception_inside_of_gather_is_raised_on_its_rank():
    first, second = run_ranks(2, raises_on_rank_1_only)
    assert "B3301 cannot keep writes: a block of ballast.gather() failed on other ranks: ValueError: mine\n" in first
    assert "rank 1" in first and second == "ValueError: mine"


def test_a_rank_that_leaves_gather_alone_is_told_that_the_other_makes_another_call():
    for error in run_ranks(2, gathers_on_rank_0_only):
        assert "B1003 rank" in error and "makes another call than this rank" in error


@pytest.mark.parametrize("stage", range(4))
def test_writes_that_one_rank_cannot_keep_are_refused_on_all(stage):
    first, second = run_ranks(2, casts_on_rank_1_only, stage)
    assert "B3301 keeping what was written to parameters failed on other ranks" in first
    assert "torch.float64" in second and "parameter 0.weight" in second


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("assign", ASSIGNMENTS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_new_parameter_in_its_place_is_refused_and_loses_nothing(stage, assign, steps):
    loop = Loop(steps=steps)
    run = loop.run(stage=stage)
    weight = run.model[0].weight
    with pytest.raises(ballast.UsageError, match="cannot keep a new Parameter(.|\n)*0.weight(.|\n)*copy_"):
        with ballast.gather(run.model[0]):
            kept = weight.detach().clone()
            assign(run.model[0])
    assert run.model[0].weight is weight
    with ballast.gather(weight):
        assert torch.equal(weight, kept)
    loop.steps = 4
    longer = loop.train(run.model, run.optimizer, steps)
    assert longer.losses == Loop(steps=4).run(stage=stage).losses[steps:]


def test_a_checksum_on_a_device_detects_every_write():
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(BF16)
    changed = [values.clone() for _ in range(4)]
    changed[0][:2].neg_()
    changed[1][[0, 1]] = changed[1][[1, 0]]
    changed[2][-1] += 1
    changed[3].view(torch.int16)[1500] ^= 1
    known = [checksum_on_device(each.view(torch.uint8)) for each in (values, *changed)]
    assert len(set(known)) == len(known)
    assert checksum_on_device(values.clone().view(torch.uint8)) == known[0]
    assert checksum_on_device(torch.empty(0, dtype=torch.uint8)) == 0
