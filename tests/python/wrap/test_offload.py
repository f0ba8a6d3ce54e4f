"""Tests of offload() and reload(): device memory is free in between, and the training does not change."""

from __future__ import annotations

from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.bodies import Trained, loop_of, train_and_offload
from python.wrap.support.loops import Loop, Tower
from python.wrap.support.ranks import run_ranks
from python.wrap.support.resident import resident


def with_and_without_offload(rank: int, configurations: list[dict[str, Any]]) -> list[tuple[Trained, Trained]]:
    loop = loop_of(rank, make_model=Tower, steps=3)
    return [(train_and_offload(loop, False, **options), train_and_offload(loop, True, **options)) for options in configurations]


def one_rank_is_in_the_middle_of_a_step(rank: int) -> str:
    run = loop_of(rank, steps=1).run(stage=2)
    if rank == 1:
        run.model(torch.ones(20)).sum().backward()
    try:
        run.optimizer.offload()
    except ballast.UsageError as error:
        return str(error)
    return "offloaded"


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_and_reloaded_trainings_give_the_same_bits(ranks, tmp_path):
    configurations = [
        {"stage": 0},
        {"stage": 2},
        {"stage": 2, "offload": "host"},
        {"stage": 3},
        {"stage": 3, "offload": {"parameters": "host", "state": f"nvme:{tmp_path}"}},
        {"stage": 3, "update_in_backward": True},
    ]
    for trained in run_ranks(ranks, with_and_without_offload, configurations):
        for plain, offloaded in trained:
            assert plain[0] == offloaded[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain[1], offloaded[1]))


def test_an_optimizer_with_its_own_step_is_offloaded_and_reloaded():
    loop = Loop(make_model=Tower, make_optimizer=torch.optim.NAdam, steps=3)
    plain, offloaded = (train_and_offload(loop, offloads, stage=2) for offloads in (False, True))
    assert plain[0] == offloaded[0]


def test_offload_frees_memory_of_gradients_too():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    for _ in range(2):
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = resident()
    optimizer.offload()
    parameters = 16 * 4 * 1024 * 1024
    assert before - resident() > 0.9 * parameters  # the sums of gradients take that much
    optimizer.reload()
    model(torch.ones(1, 1024)).sum().backward()


def trained(**options) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    run = Loop(make_model=Tower, steps=1).run(**options)
    return run.model, run.optimizer


@pytest.mark.parametrize("stage", [2, 3])
def test_using_an_offloaded_training_is_refused_with_a_remedy(stage, tmp_path):
    model, optimizer = trained(stage=stage)
    weight = next(model.parameters())
    checkpoint = tmp_path / "checkpoint"
    ballast.save(checkpoint, model, optimizer)
    optimizer.offload()
    uses = [
        lambda: model(torch.ones(20)),
        lambda: weight + 1,
        lambda: optimizer.step(),
        lambda: optimizer.state[weight]["exp_avg"] + 1,
        lambda: ballast.gather(model).__enter__(),
        lambda: ballast.save(tmp_path, model, optimizer),
        lambda: ballast.load_checkpoint(checkpoint, model, optimizer),
        lambda: optimizer.offload(),
    ]
    for use in uses:
        with pytest.raises(ballast.UsageError, match=r"B1007(.|\n)*reload\(\)"):
            use()
    assert weight.shape == next(Tower().parameters()).shape
    optimizer.reload()
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 2
    with pytest.raises(ballast.UsageError, match="B1007"):
        optimizer.reload()


def test_parameters_that_are_not_offloaded_can_be_used():
    model, optimizer = trained(stage=2)
    with torch.no_grad():
        before = model(torch.ones(20))
        optimizer.offload(parameters=False)
        assert torch.equal(model(torch.ones(20)), before)
    with pytest.raises(ballast.UsageError, match="B1007"):
        model(torch.ones(20))
    optimizer.reload()
    model(torch.ones(20)).sum().backward()
    optimizer.step()


def test_offload_without_parameters_is_refused_in_stage_3():
    _, optimizer = trained(stage=3)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*stage 3"):
        optimizer.offload(parameters=False)


def test_offload_is_refused_in_the_middle_of_a_step():
    for said in run_ranks(2, one_rank_is_in_the_middle_of_a_step):
        assert "B1007 cannot offload the optimizer between a backward pass and its step" in said


def test_writes_before_offload_are_kept_after_reload():
    model, optimizer = trained(stage=2, offload="host")
    with torch.no_grad():
        model[0].weight.fill_(0.5) if isinstance(model, torch.nn.Sequential) else next(model.parameters()).fill_(0.5)
    optimizer.offload()
    optimizer.reload()
    assert torch.all(next(model.parameters()) == 0.5)
    optimizer.offload()
    optimizer.close()  # restores the full parameters
    assert torch.all(next(model.parameters()) == 0.5)
    assert type(next(model.parameters())) is torch.nn.Parameter


def test_writes_after_the_backward_pass_survive_a_refused_offload():
    model, optimizer = trained(stage=2, offload="host")
    model(torch.ones(20)).sum().backward()
    weight = next(model.parameters())
    with torch.no_grad():
        weight.fill_(0.5)
    with pytest.raises(ballast.UsageError, match="B1007"):
        optimizer.offload()
    optimizer.step()
    assert torch.all((weight - 0.5).abs() < 0.05)


def test_offload_is_refused_while_parameters_are_gathered():
    model, optimizer = trained(stage=3)
    with ballast.gather(model):
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*outside of"):
            optimizer.offload()
    optimizer.offload()
    optimizer.reload()


def test_deleting_an_offloaded_optimizer_restores_parameters_on_one_rank():
    model, optimizer = trained(stage=3)
    with ballast.gather(model):
        before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.offload()
    del optimizer
    assert all(torch.equal(mine, kept) for mine, kept in zip(model.parameters(), before))
