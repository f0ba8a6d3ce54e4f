"""Tests of stage 3: partitioned parameters train to the same bits as full ones."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support import bodies
from python.wrap.support.bodies import Trained, loop_of
from python.wrap.support.loops import Loop, Run, Tower, check_close, check_equal, keywords, mlp
from python.wrap.support.ranks import run_ranks
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def averaged(rank: int, configurations: list[dict[str, Any]]) -> list[Trained]:
    """Average the parameters over the steps, and evaluate each average. Without options the optimizer is torch's. Return the
    losses of training, and the average."""
    found = []
    for options in configurations:
        model = mlp()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options)) if options else optimizer
        gathered = partial(ballast.gather, model) if options else nullcontext
        with gathered():
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def update(model: torch.nn.Module, _: Any, average: Any = average, gathered: Any = gathered) -> None:
            with gathered():
                average.update_parameters(model)
            average(torch.ones(20)).sum().backward()

        run = loop_of(rank, steps=4, after_step=update).train(model, optimizer)
        found.append((run.losses, [each.detach() for each in average.parameters()]))
    return found


def changes_while_gathered(rank: int) -> tuple[list[float], list[float]]:
    """Write to trained and frozen parameters inside gather(), in stages 2 and 3. Return their means and the later losses."""
    losses, seen = [], [0.0]
    for stage in (2, 3):
        loop = loop_of(rank, make_model=Tower, steps=2)
        run = loop.run(stage=stage)
        with ballast.gather(run.model), torch.no_grad():
            run.model.blocks[3].down.weight.fill_(3.0)
            run.model.blocks[1].down.weight.fill_(0.5)
        longer = loop_of(rank, steps=4)
        losses.append(longer.train(run.model, run.optimizer, 2).losses)
        run = loop.run(stage=stage)
        with ballast.gather(run.model), torch.no_grad():
            run.model.blocks[3].down.weight.fill_(3.0)
            run.model.blocks[1].down.weight.fill_(0.5)
        with ballast.gather(run.model.blocks):
            seen = [float(run.model.blocks[block].down.weight.mean()) for block in (1, 3)]
    return seen, losses


def deletes_its_optimizer(rank: int, folder: str) -> tuple[int, int, str]:
    """Return how many files on the drive are open before and after, and the error of a gather() afterwards."""

    def open_files() -> int:
        entries = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        links = [os.readlink(entry) for entry in entries if os.path.lexists(entry)]  # the listing's own entry is gone
        return sum(link.startswith(folder) for link in links)

    run = loop_of(rank, make_model=Tower, steps=2).run(stage=3, offload=f"nvme:{folder}")
    before, model = open_files(), run.model
    del run
    try:
        with ballast.gather(model):
            pass
    except ballast.Error as error:
        return before, open_files(), str(error)
    return before, open_files(), ""


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_one_rank_trains_a_tower_as_below_stage_3(checkpointing, micro_steps):
    loop = Loop(make_model=partial(Tower, checkpointing), micro_steps=micro_steps, clip=0.5)
    plain, full, ours = loop.run(), loop.run(stage=2), loop.run(stage=3)
    with ballast.gather(ours.model):
        check_equal(full, ours)
        # Torch leaves unused parameters alone, while Ballast updates them with gradients of zero.
        torch.nn.init.zeros_(plain.model.unused.weight), torch.nn.init.zeros_(ours.model.unused.weight)
        torch.nn.init.zeros_(plain.model.unused.bias), torch.nn.init.zeros_(ours.model.unused.bias)
        check_close(plain, ours, 1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("checkpointing", ["none", "not reentrant"])
def test_ranks_and_tiers_give_the_same_bits(ranks, checkpointing, tmp_path):
    everywhere = [
        {"stage": 3},
        {"stage": 3, "offload": "host"},
        {"stage": 3, "offload": {"parameters": f"nvme:{tmp_path}", "gradients": "host", "state": f"nvme:{tmp_path}"}},
    ]
    for full, *others in run_ranks(ranks, bodies.towers, checkpointing, [{"stage": 2}, *everywhere]):
        for other in others:
            assert other[0] == full[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], full[1]))


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_steps_of_a_model_that_runs_as_declared_follow_the_plan_from_the_first_on(frozen):
    def make_model():
        model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
        model[:frozen].requires_grad_(False)
        return model

    on_demand = []
    note = lambda model, optimizer: on_demand.append(optimizer._ballast._last_step.metrics.on_demand)
    Loop(make_model=make_model, steps=3, after_step=note).run(stage=3)
    assert on_demand == [0, 0, 0]


def test_using_a_sharded_parameter_is_refused_with_a_remedy():
    run = Loop(make_model=Tower, steps=1).run(stage=3)
    weight = run.model.blocks[0].up.weight
    assert weight.shape == (32, 16)
    with pytest.raises(ballast.UsageError, match="B1007(.|\n)*blocks.0.up.weight(.|\n)*ballast.gather"):
        weight.sum()
    with pytest.raises(ballast.UsageError, match="B1007"):
        weight.T
    with ballast.gather(weight):
        assert torch.isfinite(weight).all()
    with pytest.raises(ballast.UsageError, match="ballast.gather"):
        run.model.state_dict()


@pytest.mark.parametrize("gathers", [lambda model: model, lambda model: model.blocks[3].up.weight], ids=["all", "one"])
def test_backward_inside_gather_finds_the_values_of_forward(gathers):
    loop, outside, inside = Loop(make_model=Tower), Loop(make_model=Tower).run(stage=3), Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(inside.parameters(), lr=1e-2), inside, stage=3)
    losses = []
    for step in range(loop.steps):
        loss = loop.loss(inside, loop.batch(step))
        with ballast.gather(gathers(inside)):
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(outside.model), ballast.gather(inside):
        check_equal(outside, Run(inside, optimizer, losses))


@pytest.mark.parametrize("gathers", [lambda model: model, lambda model: model.blocks[3]], ids=["all", "one"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
def test_backward_after_gather_finds_the_values_of_forward_inside(gathers, checkpointing):
    loop = Loop(make_model=partial(Tower, checkpointing), steps=3)
    outside, inside = loop.run(stage=3), Tower(checkpointing)
    optimizer = ballast.wrap(torch.optim.AdamW(inside.parameters(), lr=1e-2), inside, stage=3)
    losses = []
    for number in range(3):
        with ballast.gather(gathers(inside)):
            loss = loop.loss(inside, loop.batch(number))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(inside), ballast.gather(outside.model):
        check_equal(outside, Run(inside, optimizer, losses))


@pytest.mark.parametrize("is_inside", [False, True])
def test_backward_after_other_memory_was_assigned_inside_gather_is_refused(is_inside):
    run = Loop(steps=1).run(stage=3)
    with ballast.gather(run.model):
        loss = run.model(torch.ones(20)).square().sum()
        run.model[2].weight.data = run.model[2].weight.data * 2
        if is_inside:
            with pytest.raises(ballast.UsageError, match="cannot continue (.|\n)* written to(.|\n)*2.weight"):
                loss.backward()
    if not is_inside:
        with pytest.raises(ballast.UsageError, match="cannot continue (.|\n)* written to(.|\n)*2.weight"):
            loss.backward()


def test_writes_while_gathered_are_kept_on_all_ranks():
    for changed, losses in run_ranks(2, changes_while_gathered):
        assert changed == [0.5, 3.0]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_averaged_model_is_updated_inside_of_gather(ranks):
    plain = [{}] if ranks == 1 else []  # its gradients are those of one rank
    for found in run_ranks(ranks, averaged, [{"stage": 0}, {"stage": 2}, {"stage": 3}, *plain]):
        (losses, average), *others = found
        for other_losses, other_average in others:
            torch.testing.assert_close(other_losses, losses)
            torch.testing.assert_close(other_average, average)
        for _, other_average in others[:2]:
            assert all(map(torch.equal, other_average, average))


def test_an_averaged_model_outside_of_gather_is_refused():
    run = Loop(steps=1).run(stage=3)
    with ballast.gather(run.model):
        average = AveragedModel(run.model)
    for use in (AveragedModel, average.update_parameters):
        with pytest.raises(ballast.UsageError, match=r"B1007(.|\n)*with ballast\.gather\(model\)"):
            use(run.model)


def test_evaluation_between_steps_changes_nothing():
    loop = Loop(make_model=Tower)
    quiet, ours = loop.run(stage=3), Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters(), lr=1e-2), ours, stage=3)
    losses = []
    for step in range(loop.steps):
        ours.eval()
        with torch.no_grad():
            for _ in range(3):
                ours(loop.batch(99))
        ours.train()
        loss = loop.loss(ours, loop.batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses == quiet.losses


def test_an_interrupt_from_the_keyboard_leaves_nothing_behind():
    """An interrupt leaves nothing behind, although torch then calls no hooks of the modules that were running."""
    loop = Loop(make_model=Tower)
    quiet, ours = loop.run(stage=3), Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters(), lr=1e-2), ours, stage=3)
    run = interrupted(loop, ours, optimizer)
    with pytest.raises(ballast.UsageError, match="ballast.gather"):
        ours.first.weight.sum()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with ballast.gather(quiet.model), ballast.gather(ours):
        check_equal(run, quiet)


def interrupted(loop, model, optimizer):
    """Train, and interrupt a forward and a backward pass before each step, which then repeats them."""

    def interrupt(*_):
        raise KeyboardInterrupt

    losses = []
    for first in range(loop.steps):
        with pytest.raises(KeyboardInterrupt):
            hook = model.blocks[2].down.register_forward_hook(interrupt)
            loop.loss(model, loop.batch(first))
        hook.remove()
        hook = model.blocks[2].down.register_full_backward_pre_hook(interrupt)
        loss = loop.loss(model, loop.batch(first))
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        hook.remove()
        optimizer.zero_grad()
        part = Loop(make_model=loop.make_model, steps=first + 1)
        losses += part.train(model, optimizer, first).losses
    return Run(model, optimizer, losses)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"units": ["Block"]}, r"cannot use units=\('Block',\): in stage 2 each rank keeps all(.|\n)*stage 3, or no units"),
        ({"units": "Block", "stage": 0}, r"cannot use units=\('Block',\): in stage 0"),
        ({"units": 3, "stage": 3}, "cannot use units=3(.|\n)*names of classes"),
        ({"units": [Tower], "stage": 3}, "cannot use units=(.|\n)*names of classes"),
    ],
    ids=str,
)
def test_units_that_have_no_effect_or_no_names_are_refused(options, said):
    model = Tower()
    with pytest.raises(ballast.UsageError, match=said):
        ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(**options))


def test_units_may_be_named_where_the_stage_is_chosen():
    model = Tower()
    optimizer = ballast.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, stage="auto", tuning=ballast.Tuning(units=["Block"])
    )
    assert "parameters" in optimizer.memory()


def test_units_can_be_named():
    with pytest.raises(ballast.UsageError, match="no module is a Blok"):
        Loop(make_model=Tower, steps=1).run(stage=3, units=("Blok",))
    loop = Loop(make_model=Tower)
    check = loop.run(stage=3, units=("Block",))
    assert check.losses == loop.run(stage=3).losses


def test_a_model_is_needed():
    with pytest.raises(ballast.UsageError, match="without a model"):
        ballast.wrap(torch.optim.AdamW(Tower().parameters()), stage=3)


def test_an_optimizer_that_is_deleted_leaves_full_parameters():
    run = Loop(make_model=Tower, steps=2).run(stage=3)
    with ballast.gather(run.model):
        expected = run.parameters
    model = run.model
    del run
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), expected))
    model(torch.ones(20)).sum().backward()


class Graph(torch.nn.Module):
    """A layer of a graph network: the sums over neighbours are products with a sparse matrix, which autograd saves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(20, 20), torch.nn.Linear(20, 20)])
        self.neighbours = (torch.eye(8) + torch.eye(8).roll(1, 0)).to_sparse()

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.sparse.mm(self.neighbours, layer(inputs))
        return inputs


def test_a_model_uses_sparse_tensors():
    loop = Loop(make_model=Graph)
    full, ours = loop.run(stage=2), loop.run(stage=3)
    with ballast.gather(ours.model):
        check_equal(full, ours)


def test_a_rank_that_deletes_its_optimizer_alone_keeps_no_files_and_gets_a_remedy(tmp_path):
    for before, after, said in run_ranks(2, deletes_its_optimizer, str(tmp_path)):
        assert before > 0
        assert after == 0
        assert "optimizer.close()" in said


EXITS = """
import atexit, torch, ballast
model = torch.nn.Linear(4, 4)
atexit.register(lambda: print(type(model.weight).__name__))  # after what is registered later
optimizer = ballast.wrap(torch.optim.SGD(model.parameters()), model, stage=3)
optimizer.memory()
print(type(model.weight).__name__)
"""


def test_memory_is_released_before_python_ends(environment):
    """Parameters are restored before Python ends, as destructors that use torch later can crash."""
    said = subprocess.run([sys.executable, "-c", EXITS], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["Placeholder", "Parameter"]


@pytest.mark.parametrize("name", ["uniform_", "normal_", "constant_", "kaiming_uniform_", "xavier_uniform_", "zeros_"])
def test_a_sharded_parameter_is_initialized_again_inside_of_gather(name):
    model = mlp()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    model(torch.ones(20))
    with ballast.gather(model):
        values = model[0].weight.detach().clone()

    def initialize(weight):
        torch.manual_seed(1)
        getattr(torch.nn.init, name)(weight, *([0.5] if name == "constant_" else []))

    with pytest.raises(ballast.UsageError, match=r"B1007 cannot use a parameter(.|\n)*parameter 0.weight(.|\n)*ballast.gather"):
        initialize(model[0].weight)
    with ballast.gather(model):
        initialize(model[0].weight)
    initialize(values)
    with ballast.gather(model):
        assert torch.equal(model[0].weight, values)
    optimizer.close()
