"""Tests on several ranks: they train like torch's DistributedDataParallel."""

from __future__ import annotations

import copy
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from ports import free_port
from python.wrap.support import bodies
from python.wrap.support.bodies import Routed, Trained, loop_of
from python.wrap.support.loops import adapted, keywords, mean_square, mlp, only_trained
from python.wrap.support.programs import Program
from python.wrap.support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh


def freezes(rank: int, configurations: list[dict[str, Any]]) -> list[Trained]:
    """Freeze a layer after two steps, and thaw it two steps later."""
    trained = []
    for options in configurations:
        loop, model = loop_of(rank, steps=6), mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
        losses = []
        for first in (0, 2, 4):
            model[0].requires_grad_(first != 2)
            loop.steps = first + 2
            run = loop.train(model, optimizer, first)
            losses += run.losses
        with ballast.gather(model):
            trained.append((losses, run.parameters))
    return trained


def begins_again(rank: int, configurations: list[dict[str, Any]]) -> list[Trained]:
    """Clear the optimizer's state after two steps, and replace a part of it after four."""
    trained = []
    for options in configurations:
        loop, model = loop_of(rank, steps=2), mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
        loop.train(model, optimizer)
        optimizer.state.clear()
        loop.steps = 4
        losses = loop.train(model, optimizer, 2).losses
        optimizer.state[model[0].weight] = {}
        optimizer.state[model[2].weight]["exp_avg"] = torch.full((5, 24), 0.01)
        loop.steps = 6
        run = loop.train(model, optimizer, 4)
        with ballast.gather(model):
            trained.append((losses + run.losses, run.parameters))
    return trained


def loses_some_state(rank: int) -> str:
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=2)
    loop_of(rank, steps=1).train(model, optimizer)
    del optimizer.state[model[2].weight]
    try:
        model(torch.ones(20)).sum().backward()
    except ballast.UsageError as error:
        return str(error)
    return "nothing"


def others_freeze(rank: int, kind: Any, configurations: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train a bf16 layer whose updates are smaller than the spacing of its values: alone, and while another layer repeatedly
    freezes and thaws."""

    def trained(freezes: bool, options: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(40, 24), torch.nn.Linear(8, 8)]).to(torch.bfloat16)
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        model.forward = lambda batch: model[0](batch)
        optimizer = ballast.wrap(kind(model.parameters(), lr=3e-4), model, **keywords(**options))
        for step in range(16):
            model[1].requires_grad_(not (freezes and step % 3 == 1))
            batch = torch.linspace(1, 2, 40, dtype=torch.bfloat16) * (1 + rank + step % 2)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with ballast.gather(model):
            return model[0].weight.detach().clone()

    return [(trained(False, options), trained(True, options)) for options in configurations]


def different_initial_values(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    model = torch.nn.Linear(20, 5)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    return before + [parameter.detach().clone() for parameter in model.parameters()]


def routed(rank: int, configurations: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Train with torch's DistributedDataParallel first, then in each configuration."""
    loop = loop_of(rank, make_model=Routed, micro_steps=2, optimizer_options={"lr": 1e-2, "weight_decay": 0.0})
    ddp = torch.nn.parallel.DistributedDataParallel(Routed(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, weight_decay=0.0)
    trained = [loop.train(ddp, optimizer).parameters]
    for options in configurations:
        run = loop.run(**options)
        with ballast.gather(run.model):
            trained.append(run.parameters)
    return trained


def one_rank_has_no_batch(rank: int) -> list[torch.Tensor]:
    model = mlp()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == 0:
        mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def saved_state(rank: int) -> tuple[dict[str, Any], list[float], list[float]]:
    """Return the state saved after three steps, the losses of three more, and those of another training that loads it."""
    loop = loop_of(rank, steps=3)
    run = loop.run(stage=2)
    saved = torch.nn.Module.state_dict(run.model), run.optimizer.state_dict()
    parts = {name: value.clone() for name, value in saved[0].items()}
    state = {
        key: {name: torch.clone(value) for name, value in values.items()} for key, values in saved[1]["state"].items()
    }
    longer = loop_of(rank, steps=6)
    on = longer.train(run.model, run.optimizer, 3).losses
    model = mlp(24)
    model.load_state_dict(parts)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.load_state_dict({"state": state, "param_groups": saved[1]["param_groups"]})
    return state, on, longer.train(model, optimizer, 3).losses


def with_tensor_parallelism(rank: int, ranks_of_data: int) -> list[float]:
    """Train halves of a layer: each half is held by ranks with different data, in a process group of its own."""
    halves = dist.get_world_size() // ranks_of_data
    groups = [dist.new_group([half + halves * i for i in range(ranks_of_data)]) for half in range(halves)]
    half = rank % halves
    torch.manual_seed(half)
    weight = torch.nn.Parameter(torch.randn(5, 20))
    optimizer = ballast.wrap(torch.optim.SGD([weight], lr=0.1), mesh=DeviceMesh.from_group(groups[half], "cpu"))
    (weight.sum() * (1 + rank // halves)).backward()
    optimizer.step()
    return [optimizer.metrics()["grad_norm"], float(weight.sum())]


def different_models(rank: int) -> str:
    """Return the error that a rank gets when ranks train different parameters."""
    model = mlp() if rank == 0 else mlp(30)
    try:
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), tuning=ballast.Tuning(timeout=20))
        mean_square(model, torch.ones(20)).backward()
        optimizer.step()
    except ballast.Error as error:
        return str(error)
    return ""


def inside_of_ddp(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """Return parameters trained inside DDP, those trained without it, and the error if wrap() is not given the DDP model."""
    loop = loop_of(rank, micro_steps=2)
    expected = loop.run(stage=2).parameters
    ddp = torch.nn.parallel.DistributedDataParallel(mlp())
    known = ballast.wrap(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
    ours = loop.train(ddp, known).parameters
    ddp = torch.nn.parallel.DistributedDataParallel(mlp())
    unknown = ballast.wrap(torch.optim.AdamW(ddp.parameters(), lr=1e-2))
    try:
        loop.train(ddp, unknown)
    except ballast.Error as error:
        return ours, expected, str(error)
    return ours, expected, ""


def loads_state_of_another_rank(rank: int) -> str:
    run = loop_of(rank, steps=2).run(stage=2)
    saved = run.optimizer.state_dict()
    run.optimizer.load_state_dict(saved)
    saved["ballast_part"]["rank"] = 1 - rank
    try:
        run.optimizer.load_state_dict(saved)
    except ballast.Error as error:
        return str(error)
    return ""


def warnings_of_state_dicts(rank: int, folder: str, stages: list[int]) -> list[tuple[list[str], list[str]]]:
    """Return the warnings at each stage: those of harmless calls, and those of two state_dict() calls."""
    answers = []
    for stage in stages:
        loop = loop_of(rank, steps=1)
        model = loop.make_model()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
        with warnings.catch_warnings(record=True) as harmless:
            warnings.simplefilter("always")
            optimizer.load_state_dict(optimizer.state_dict())  # empty, as when Accelerate prepares the optimizer
            loop.train(model, optimizer)
            ballast.save(f"{folder}/{stage}", model, optimizer)
            ballast.load_checkpoint(f"{folder}/{stage}", model, optimizer)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.state_dict()
            optimizer.state_dict()
        answers.append(([str(each.message) for each in harmless], [str(each.message) for each in told]))
        assert all(each.category is UserWarning and each.filename == __file__ for each in told)
    return answers


def begins_a_step_and_loads(rank: int, stage: int) -> tuple[list[float], list[torch.Tensor]]:
    """Load the state in the middle of a step, as after a bad batch whose gradients the model has cleared, and train. At the end
    close in the middle of a step."""
    loop = loop_of(rank, steps=2)
    run = loop.run(stage=stage)
    kept = copy.deepcopy(run.optimizer.state_dict())
    run.model(torch.full((20,), 9.0)).sum().backward()
    run.model.zero_grad()
    run.optimizer.load_state_dict(kept)
    again = replace(loop, steps=4).train(run.model, run.optimizer, first=2)
    run.model(torch.full((20,), 9.0)).sum().backward()
    run.optimizer.close()
    return run.losses + again.losses, run.parameters


def gradients_after_close(rank: int) -> list[torch.Tensor]:
    """Return the gradients of this rank's batch in DistributedDataParallel, after the optimizer that reduced them is closed."""
    ddp = torch.nn.parallel.DistributedDataParallel(mlp())
    optimizer = ballast.wrap(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
    mean_square(ddp, torch.ones(20)).backward()
    optimizer.step()
    optimizer.close()
    mean_square(ddp, torch.full((20,), float(rank))).backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


REMEDY = "Call ballast.save() and ballast.load_checkpoint() on all ranks; or save and load a file for each rank."


def check_close(one, other, tolerance=1e-6):
    for mine, theirs in zip(one, other):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=10 * tolerance)


# The last bit of a sum can change how autocast rounds an activation to bfloat16, whose values are 2^-8 apart.
@pytest.mark.parametrize(
    ("ranks", "training", "tolerance"),
    [
        (2, {}, 1e-6),
        (2, {"micro_steps": 3, "clip": 0.05}, 1e-6),
        (3, {"micro_steps": 3, "clip": 0.05}, 1e-6),
        (4, {"micro_steps": 2, "clip": 0.05}, 1e-6),
        (2, {"autocast": True, "micro_steps": 3, "clip": 0.05}, 2e-4),
        (4, {"autocast": True}, 2e-4),
        (2, {"make_model": adapted, "make_optimizer": only_trained, "clip": 0.05}, 1e-6),
    ],
)
def test_all_stages_and_tiers_train_as_ddp_does_and_with_the_same_bits(ranks, training, tolerance, tmp_path):
    configurations = [{"stage": stage} for stage in (0, 1, 2, 3)]
    configurations += [{"stage": stage, "overlap_gathers": True} for stage in (0, 2)]
    configurations += [{"stage": 3, "keep_gathered": kept} for kept in (True, "1KiB")]
    configurations += [{"stage": 3, "prefetch": units} for units in (0, 3)]
    configurations += [{"stage": stage, "offload": where} for stage in (0, 2) for where in ("host", f"nvme:{tmp_path}")]
    for (losses, parameters), first, *others in run_ranks(ranks, bodies.in_every_configuration, training, configurations):
        check_close([torch.tensor(first[0])], [torch.tensor(losses)], tolerance)
        check_close(first[1], parameters, tolerance)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


@pytest.mark.parametrize("training", [freezes, begins_again])
def test_freezing_and_beginning_again_gives_the_same_bits_at_all_stages(training):
    for first, *others in run_ranks(2, training, [{"stage": stage} for stage in range(4)]):
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam])
def test_another_plan_keeps_the_masters(kind):
    configurations = [{"stage": stage} for stage in range(4)]
    if kind is torch.optim.AdamW:
        configurations += [{"stage": 3, "state_format": format} for format in ("fp32", "bf16", "compact", "4bit")]
    for undisturbed, disturbed in run_ranks(2, others_freeze, kind, configurations)[0]:
        assert (undisturbed != 1.0).any()
        assert torch.equal(undisturbed, disturbed)


def test_ranks_begin_with_the_parameters_of_rank_0():
    one, other = run_ranks(2, different_initial_values)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


def test_parameters_that_are_used_on_some_ranks_only():
    # All ranks gather the same units in stage 3.
    configurations = [{"stage": 0}, {"stage": 2}, {"stage": 2, "overlap_gathers": True}, {"stage": 3, "units": ("Routed",)}]
    for expected, *all_ours in run_ranks(2, routed, configurations):
        for ours in all_ours:
            check_close(ours, expected)


def test_a_rank_without_a_batch_adds_zeros():
    one, other = run_ranks(2, one_rank_has_no_batch)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


def test_a_state_dict_holds_a_ranks_shard_and_resumes():
    answers = run_ranks(2, saved_state)
    kept = [sum(values["exp_avg"].numel() for values in state.values()) for state, _, _ in answers]
    assert all(0 < count < 20 * 24 + 24 + 24 * 5 + 5 for count in kept)
    assert sum(kept) == 20 * 24 + 24 + 24 * 5 + 5
    for _, losses, loaded_losses in answers:
        assert losses == loaded_losses


def test_removing_a_part_of_sharded_state_is_refused():
    for said in run_ranks(2, loses_some_state):
        assert "B1001" in said and "parameter 2.weight" in said and "optimizer.state.clear()" in said


def test_a_state_dict_of_another_rank_is_refused():
    for rank, said in enumerate(run_ranks(2, loads_state_of_another_rank)):
        assert f"rank {rank} of 2 cannot load the state_dict() of rank {1 - rank} of 2" in said
        assert REMEDY in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_dict_of_one_of_several_ranks_warns_once(ranks, tmp_path):
    for rank, answers in enumerate(run_ranks(ranks, warnings_of_state_dicts, str(tmp_path), [0, 1, 2, 3])):
        for stage, (harmless, told) in enumerate(answers):
            assert harmless == []
            assert len(told) == int(ranks > 1 and stage > 0)
            assert all(f"the shard of rank {rank} of 2" in line and REMEDY in line for line in told)


def test_distributed_data_parallel_around_a_model_does_nothing_or_is_refused():
    for ours, expected, said in run_ranks(2, inside_of_ddp):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected))
        assert "DistributedDataParallel" in said
        assert "wrap(optimizer, model)" in said


def test_distributed_data_parallel_reduces_gradients_again_after_close():
    one, other = run_ranks(2, gradients_after_close)
    assert len(one) == 4 and all(map(torch.equal, one, other))


def test_a_process_group_limits_which_ranks_share():
    answers = run_ranks(4, with_tensor_parallelism, 2)
    assert answers[0] == answers[2] != answers[1] == answers[3]
    assert all(norm == pytest.approx(15.0) for norm, _ in answers)  # the norm of 100 elements, each the mean of 1 and 2


DIES = """
import os, torch, ballast
model = torch.nn.Linear(20, 5)
optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage={stage}, tuning=ballast.Tuning(timeout=120))
for step in range(5):
    model(torch.ones(20)).sum().backward()
    if step == 3 and os.environ["RANK"] == "1":
        raise RuntimeError("this batch is bad")
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_ends_by_an_error_ends_the_others_with_its_name(stage, environment, tmp_path):
    port = str(free_port())
    rendezvous = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "BALLAST_PORT": port}
    script = tmp_path / "dies.py"
    script.write_text(DIES.format(stage=stage))
    with ExitStack() as programs:
        environments = ({**environment, **rendezvous, "RANK": str(rank)} for rank in range(2))
        ranks = [programs.enter_context(Program([script], each)) for each in environments]
        first, second = (rank.wait(timeout=100).stderr for rank in ranks)
    assert "RuntimeError: this batch is bad" in second
    assert "B3301 rank 1" in first


def test_ranks_that_train_different_models_are_refused():
    failures = run_ranks(2, different_models)
    assert all(failure.startswith("B") for failure in failures), failures


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_has_begun_ends_where_state_is_loaded_or_the_optimizer_closed(ranks, stage):
    expected = run_ranks(ranks, bodies.in_every_configuration, {"steps": 4}, [{"stage": 0}])
    for (losses, parameters), (_, (right, right_parameters)) in zip(
        run_ranks(ranks, begins_a_step_and_loads, stage), expected
    ):
        assert losses == right
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, right_parameters))
