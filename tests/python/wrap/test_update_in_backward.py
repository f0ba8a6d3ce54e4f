"""Tests of update_in_backward: it gives the same bits, and calls that would come too late are refused."""

import ballast
import pytest
import torch
from python.wrap.support import bodies
from python.wrap.support.loops import Loop, Tower, check_equal, keywords, mean_square
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
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))
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
    with pytest.raises(ballast.UsageError, match="norm: update_in_backward updates parameters before it is known"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ballast.UsageError, match="before it is known"):
        optimizer.clip_grad_norm_(1.0)


def test_losses_cannot_be_scaled():
    _, optimizer = begun()
    optimizer.grad_scale = torch.tensor(8.0)
    with pytest.raises(ballast.UsageError, match="scaled by 8.0"):
        optimizer.step()


def test_options_that_are_set_after_the_backward_pass_are_refused():
    run = Loop(make_model=Tower, steps=1).run(**IN_BACKWARD)
    plain = Loop(make_model=Tower, steps=1).run(stage=3)
    for each in (run, plain):
        mean_square(each.model, torch.ones(20)).backward()
    group = run.optimizer.param_groups[0]
    group["lr"], group["initial_lr"] = 0.5, 0.01
    with pytest.raises(ballast.UsageError, match="B1007 cannot use lr=0.5 of parameter group 0(.|\n)*lr=0.01 until"):
        run.optimizer.step()
    group["lr"] = 0.01
    for each in (run, plain):
        each.optimizer.step()
    with ballast.gather(run.model), ballast.gather(plain.model):
        check_equal(run, plain)


def test_scaled_gradients_are_refused_and_the_step_is_not():
    model, optimizer = begun()
    for scale in (lambda each: each.mul_(0.1), lambda each: each.div_(2.0), lambda each: torch._foreach_mul_([each], 0.5)):
        with pytest.raises(ballast.UsageError, match="B1007 cannot scale gradients(.|\n)*update_in_backward"):
            scale(model.first.weight.grad)
    model.first.weight.grad.mul_(1.0)
    optimizer.step()
    assert optimizer.steps == 2


@pytest.mark.parametrize("spoil", ["rate", "hook", "clear"])
def test_a_training_ends_where_its_step_is_refused(spoil):
    loop = Loop(make_model=Tower, steps=1)
    run, plain = loop.run(**IN_BACKWARD), loop.run(stage=3)
    if spoil == "hook":
        run.model.first.bias.register_post_accumulate_grad_hook(lambda each: [each.grad.add_(1.0)].clear())
    for each in (run, plain):
        each.model(torch.ones(20)).sum().backward()
    plain.optimizer.step()
    if spoil == "rate":
        run.optimizer.param_groups[0]["lr"] = 0.5
    elif spoil == "clear":
        run.model.zero_grad()
    with pytest.raises(ballast.UsageError, match="cannot"):
        run.optimizer.step()
    run.optimizer.close(), plain.optimizer.close()
    check_equal(run, plain)


def test_gradients_that_are_not_finite_are_reported(caplog):
    run = Loop(make_model=Tower, steps=1).run(**IN_BACKWARD)
    (run.model(torch.ones(20)).sum() * float("inf")).backward()
    run.optimizer.step()
    assert "the parameters are updated with them already" in caplog.text


@pytest.mark.parametrize("other", [{"stage": 2}, {"max_grad_norm": 1.0}])
def test_incompatible_options_are_refused(other):
    model = Tower()
    with pytest.raises(ballast.UsageError, match="update_in_backward"):
        ballast.wrap(torch.optim.AdamW(model.parameters()), model, **keywords(**{**IN_BACKWARD, **other}))


def test_one_rank_trains_as_with_updates_at_the_step():
    loop = Loop(make_model=Tower)
    ours, plain = loop.run(**IN_BACKWARD), loop.run(stage=3)
    with ballast.gather(ours.model), ballast.gather(plain.model):
        check_equal(ours, plain)
