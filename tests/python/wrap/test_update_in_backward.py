"""Tests of update_in_backward: it gives the same bits, and calls that would come too late are refused."""

import ballast
import pytest
import torch
from python.wrap.support import bodies
from python.wrap.support.loops import Loop, Tower, check_equal
from python.wrap.support.ranks import run_ranks

IN_BACKWARD = {"stage": 3, "update_in_backward": True}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("checkpointing", ["none", "not reentrant"])
def test_all_tiers_give_the_bits_of_updates_at_the_step(ranks, checkpointing, tmp_path):
    configurations = [
        {"stage": 2},
        IN_BACKWARD,
        {**IN_BACKWARD, "offload": "host"},
        {**IN_BACKWARD, "offload": f"nvme:{tmp_path}"},
        {**IN_BACKWARD, "offload": {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}},
    ]
    for at_the_step, *others in run_ranks(ranks, bodies.towers, checkpointing, configurations, 1, None):
        for other in others:
            assert other[0] == at_the_step[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], at_the_step[1]))


def test_a_learning_rate_that_changes_between_steps_is_the_one_of_its_step():
    def run(**options):
        model = Tower()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        loop = Loop(steps=4)
        losses = []
        for step in range(loop.steps):
            loss = loop.loss(model, loop.batch(step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return losses

    assert run(**IN_BACKWARD) == run(stage=3)


def begun() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a training in the middle of a step."""
    run = Loop(make_model=Tower, steps=1).run(**IN_BACKWARD)
    run.model(torch.ones(20)).sum().backward()
    return run.model, run.optimizer


def test_a_second_pass_is_refused():
    model, _ = begun()
    with pytest.raises(ballast.UsageError, match="call the model between a backward (.|\n)*update_in_backward"):
        model(torch.ones(20)).sum().backward()


def test_gradients_cannot_be_discarded():
    _, optimizer = begun()
    with pytest.raises(ballast.UsageError, match="discard(.|\n)*update_in_backward"):
        optimizer.zero_grad()


def test_norms_are_refused():
    model, optimizer = begun()
    with pytest.raises(ballast.UsageError, match="before it is known"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ballast.UsageError, match="before it is known"):
        optimizer.clip_grad_norm_(1.0)


def test_losses_cannot_be_scaled():
    _, optimizer = begun()
    optimizer.grad_scale = torch.tensor(8.0)
    with pytest.raises(ballast.UsageError, match="scaled by 8.0"):
        optimizer.step()


def test_gradients_that_are_not_finite_are_reported(caplog):
    run = Loop(make_model=Tower, steps=1).run(**IN_BACKWARD)
    (run.model(torch.ones(20)).sum() * float("inf")).backward()
    run.optimizer.step()
    assert "the parameters are updated with them already" in caplog.text


@pytest.mark.parametrize("other", [{"stage": 2}, {"max_grad_norm": 1.0}])
def test_incompatible_options_are_refused(other):
    model = Tower()
    with pytest.raises(ballast.UsageError, match="update_in_backward"):
        ballast.wrap(torch.optim.AdamW(model.parameters()), model, **{**IN_BACKWARD, **other})


def test_one_rank_trains_as_with_updates_at_the_step():
    loop = Loop(make_model=Tower)
    ours, plain = loop.run(**IN_BACKWARD), loop.run(stage=3)
    with ballast.gather(ours.model), ballast.gather(plain.model):
        check_equal(ours, plain)
