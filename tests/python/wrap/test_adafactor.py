"""Tests of torch's Adafactor, whose step needs sums of rows and columns that several ranks have."""

from __future__ import annotations

import copy
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.custom_optimizers import train_on_batches_of_all_ranks
from python.wrap.support.loops import Loop, Run, check_close
from python.wrap.support.models import Shapes
from python.wrap.support.ranks import run_ranks

Trained = tuple[list[float], dict[str, torch.Tensor]]
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {"lr": 0.03, "weight_decay": 0.1, "eps": (1e-3, 1e-2), "d": 1.5, "beta2_decay": -0.5, "maximize": True},
}


def loop_of(options: dict[str, Any], **changes: Any) -> Loop:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return Loop(
        make_model=Shapes, make_optimizer=torch.optim.Adafactor, optimizer_options=options, rank=rank, ranks=ranks, **changes
    )


def parameters_of(run: Run) -> dict[str, torch.Tensor]:
    with ballast.gather(run.model):
        return {name: value.detach().clone() for name, value in run.model.named_parameters()}


def in_every_configuration(
    rank: int, options: dict[str, Any], configurations: list[dict[str, Any]]
) -> tuple[Trained, list[Trained]]:
    """Return the run of one process with all ranks' batches, and the runs of this rank in each configuration."""
    loop = loop_of(options, micro_steps=2, clip=0.5)
    plain = train_on_batches_of_all_ranks(loop)
    runs = []
    for configuration in configurations:
        run = loop.run(**configuration)
        runs.append((run.losses, parameters_of(run)))
        run.optimizer.close()
    return (plain.losses, dict(plain.model.named_parameters())), runs


def trained_and_saved(rank: int, folder: str) -> list[float]:
    """Save after three steps, and return the losses of three more."""
    run = loop_of({}, steps=3).run(stage=3)
    ballast.save(folder, run.model, run.optimizer)
    return loop_of({}, steps=6).train(run.model, run.optimizer, 3).losses


def resumed(rank: int, folder: str, stages: list[int]) -> list[list[float]]:
    """Return the losses of three steps after loading, in each of these stages."""
    losses = []
    for stage in stages:
        model = Shapes()
        optimizer = ballast.wrap(torch.optim.Adafactor(model.parameters()), model, stage=stage)
        ballast.load_checkpoint(folder, model, optimizer)
        losses.append(loop_of({}, steps=6).train(model, optimizer, 3).losses)
        optimizer.close()
    return losses


def state_after_loading(rank: int, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's state of matrices, by the parameter's name."""
    model = Shapes()
    optimizer = ballast.wrap(torch.optim.Adafactor(model.parameters()), model, stage=2)
    ballast.load_checkpoint(folder, model, optimizer)
    state = {name: copy.deepcopy(optimizer.state.get(each, {})) for name, each in model.named_parameters()}
    optimizer.close()
    return {name: values for name, values in state.items() if "row_var" in values}


CONFIGURATIONS = [
    {"stage": 0},
    {"stage": 2, "offload": {"state": "host", "gradients": "host"}},
    {"stage": 3},
]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_rank_trains_as_torch_does(options):
    loop = loop_of(options, micro_steps=2, clip=0.5)
    plain = loop.run()
    for configuration in CONFIGURATIONS:
        run = loop.run(**configuration)
        run.optimizer.close()
        check_close(plain, run, 2e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_one_process_does_with_all_batches(ranks):
    """Sums over matrices are rounded where shards end, so stages differ by that."""
    for options in OPTIONS.values():
        for (losses, parameters), runs in run_ranks(ranks, in_every_configuration, options, CONFIGURATIONS):
            for mine in runs:
                torch.testing.assert_close(torch.tensor(mine[0]), torch.tensor(losses), atol=5e-6, rtol=5e-6)
                for name, value in parameters.items():
                    torch.testing.assert_close(mine[1][name], value, atol=5e-6, rtol=5e-6, msg=name)


def test_the_state_is_torchs():
    plain, ours = loop_of({}).run(), loop_of({}).run(stage=2)
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters()):
        state, expected = ours.optimizer.state[mine], plain.optimizer.state[theirs]
        assert set(state) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5)


def test_a_state_dict_goes_to_the_plain_optimizer_and_back():
    first = loop_of({}, steps=3)
    plain, ours = first.run(), first.run(stage=2)
    parameters, state = copy.deepcopy(ours.model.state_dict()), copy.deepcopy(ours.optimizer.state_dict())
    longer = loop_of({}, steps=6)
    expected = longer.train(plain.model, plain.optimizer, 3)
    for wrap in (False, True):
        model = Shapes()
        model.load_state_dict(parameters)
        optimizer = torch.optim.Adafactor(model.parameters())
        optimizer = ballast.wrap(optimizer, model, stage=3) if wrap else optimizer
        optimizer.load_state_dict(copy.deepcopy(state))
        run = longer.train(model, optimizer, 3)
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert isinstance(optimizer, torch.optim.Adafactor)


def test_any_number_of_ranks_resumes_a_checkpoint(tmp_path):
    expected = run_ranks(2, trained_and_saved, str(tmp_path))
    for losses, of_stages in zip(expected, run_ranks(2, resumed, str(tmp_path), [2, 3, 0])):
        for of_stage in of_stages:
            assert of_stage == pytest.approx(losses, rel=1e-5)
    first = run_ranks(3, state_after_loading, str(tmp_path))
    [alone] = run_ranks(1, state_after_loading, str(tmp_path))
    matrices = {name for name, each in Shapes().named_parameters() if each.dim() > 1}
    assert set(alone) == set().union(*first) == matrices
    for state in first:
        for name, values in state.items():
            assert torch.equal(values["row_var"], alone[name]["row_var"])
            assert torch.equal(values["col_var"], alone[name]["col_var"])


def test_state_on_a_drive_is_refused(tmp_path):
    model = Shapes()
    with pytest.raises(ballast.UsageError) as raised:
        ballast.wrap(torch.optim.Adafactor(model.parameters()), model, offload=f"nvme:{tmp_path}")
    assert "B1005" in str(raised.value)
    assert "Adafactor" in str(raised.value)
    assert "host" in str(raised.value)


def test_gradients_that_are_not_finite_skip_the_step():
    model = Shapes()
    optimizer = ballast.wrap(torch.optim.Adafactor(model.parameters()), model)
    before = [parameter.clone() for parameter in model.parameters()]
    (model(torch.ones(2, 20)).sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.metrics()["skipped"] == 1.0
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(before, model.parameters()))
