"""Tests of clipping through torch: it reads and exchanges norms once, however many gradients there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ballast
import pytest
import torch
from ballast.ranks import Group
from ballast.torch.training.use_agreement import WATCHED_STEPS
from python.wrap.support.bodies import Routed
from python.wrap.support.loops import Loop, Tower, keywords, mean_square
from python.wrap.support.ranks import run_ranks
from torch.profiler import ProfilerActivity, profile


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


def with_gradients(**options):
    model = Tower()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=1e-2), model, **keywords(**options))
    mean_square(model, torch.linspace(-1, 1, 20)).backward()
    return model, optimizer


def operators_of(use) -> Counter[str]:
    """Return how often each of torch's operators runs, also inside of other operators."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        use()
    return Counter({event.key: event.count for event in seen.key_averages()})


CLIP = {
    "clip_grad_norm_": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 1e-3),
    "in two halves": lambda parameters: torch.nn.utils.clip_grads_with_norm_(
        parameters, 1e-3, torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    ),
}


@pytest.mark.parametrize("clip", CLIP)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_clipping_reads_one_tensor_and_makes_one(stage, clip):
    model, _ = with_gradients(stage=stage)
    parameters = list(model.parameters())
    assert sum(each.grad is not None for each in parameters) > 20
    seen = operators_of(lambda: CLIP[clip](parameters))
    assert seen["aten::item"] == 1  # it waits for a GPU
    assert seen["aten::unbind"] == 1  # it splits the one copy to a GPU


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_asks_the_library_once(stage):
    assert run_ranks(2, clips_through_torch, stage) == [(1, 1, True)] * 2


@pytest.mark.parametrize("clip", AS_TORCH)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_clip_of_torch_clips_as_for_plain_torch(stage, clip):
    """Clip by norms of every order, some gradients only, and by value, on two ranks, with one backward pass and with two."""
    for passes in (1, 2):
        expected, parameters = clips_as_torch(0, 2, -1, clip, passes)
        for seen, mine in run_ranks(2, clips_as_torch, 2, stage, clip, passes):
            assert seen == pytest.approx(expected, rel=1e-4)
            torch.testing.assert_close(mine, parameters, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [1.0, 3.0, float("inf")])
def test_the_optimizer_clips_by_other_orders(order):
    model, optimizer = with_gradients(stage=3)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    expected = float(torch.nn.utils.get_total_norm(gradients, order))
    assert float(optimizer.clip_grad_norm_(expected / 2, order)) == pytest.approx(expected, rel=1e-6)
    assert float(optimizer.clip_grad_norm_(1e9, norm_type=order)) == pytest.approx(expected / 2, rel=1e-5)


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_the_norm_of_a_step_is_that_before_some_gradients_were_clipped(clip):
    model, optimizer = with_gradients(stage=2)
    parameters = [each for each in model.parameters() if each.grad is not None]
    norm = float(torch.nn.utils.get_total_norm([each.grad for each in parameters]))
    clip(parameters[:3], 1e-3)
    optimizer.step()
    reported = optimizer.metrics()["grad_norm"]
    assert reported == pytest.approx(norm, rel=1e-5) if clip is torch.nn.utils.clip_grad_norm_ else reported < norm


@pytest.mark.parametrize("order", [0.5, 1.0, 3.0, float("inf")])
def test_norms_of_every_order_have_the_same_bits_at_every_stage(order):
    seen = {
        norms
        for ranks in (1, 2)
        for stage in (0, 2, 3)
        for norms in run_ranks(ranks, norms_of_order, stage, order)
    }
    assert len(seen) == 1


DIFFERENT = "cannot compute norms of gradients: ranks have gradients of different parameters"


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_torch_cannot_clip_gradients_of_different_parameters_but_the_optimizer_can(stage):
    for message, (before, after) in run_ranks(2, clips_different_gradients, stage):
        assert DIFFERENT in message and "rank 1" in message and "optimizer.clip_grad_norm_(max_norm)" in message, message
        assert before > 0.02
        assert after == pytest.approx(0.01, rel=1e-4)


def test_clipping_on_a_rank_without_a_batch_fails_on_all_ranks_at_once():
    assert all(DIFFERENT in message for message in run_ranks(2, clips_on_a_rank_without_a_batch))


def test_a_norm_that_is_written_to_changes_no_other_norm():
    model, _ = with_gradients(stage=2)
    gradient = model.last.weight.grad
    expected = float(gradient.norm())
    gradient.norm().zero_(), model.first.weight.grad.norm().zero_()
    assert float(gradient.norm()) == expected > 0


def test_norms_and_factors_follow_each_scaling():
    model, optimizer = with_gradients(stage=2)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    first = [float(each.norm()) for each in gradients]
    factor = torch.tensor(0.5)
    for gradient in gradients:
        gradient.mul_(factor)
    factor.fill_(0.25)  # the same tensor with another value
    for gradient in gradients:
        gradient.mul_(factor)
    with torch.inference_mode():
        uncounted = torch.full((), 2.0)  # torch does not count writes to it
        for value in (2.0, 0.5):
            uncounted.fill_(value)
            for gradient in gradients:
                gradient.div_(uncounted)
    assert [float(each.norm()) for each in gradients] == pytest.approx([norm / 8 for norm in first], rel=1e-6)
    optimizer.step()


def test_a_norm_that_is_not_a_number_is_refused():
    loop = Loop()
    model = loop.make_model()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=0)
    mean_square(model, loop.batch(0)).backward()
    with pytest.raises(ballast.UsageError, match="cannot clip gradients to a norm of nan"):
        optimizer.clip_grad_norm_(float("nan"))


def head_beside(optimizer_of_body):
    """Return a model whose head is trained by plain torch, with its gradients."""
    torch.manual_seed(1)
    body, head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(body, head)
    optimizer = optimizer_of_body(torch.optim.SGD(body.parameters(), lr=0.5), model)
    return model, optimizer, torch.optim.SGD(head.parameters(), lr=0.5)


@pytest.mark.parametrize("stage", [0, 2])  # every parameter of a model is partitioned in stage 3
@pytest.mark.parametrize("foreach", [False, True])
def test_torch_clips_and_unscales_its_own_gradients_beside_those_of_a_training(stage, foreach):
    def step(model, *optimizers):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(4, 8)).square().sum()).backward()
        for each in optimizers:
            scaler.unscale_(each)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
        for each in optimizers:
            scaler.step(each)
        return norm

    model, *ours = head_beside(lambda optimizer, model: ballast.wrap(optimizer, model, stage=stage))
    plain, *theirs = head_beside(lambda optimizer, model: optimizer)
    assert step(model, *ours).item() == pytest.approx(step(plain, *theirs).item(), rel=1e-5)
    with ballast.gather(model):
        for mine, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def nan_in_the_head(gradient):
    return gradient * float("nan")


def scale_by_zero_over_zero(parameters):
    for each in parameters:
        each.grad.mul_(torch.zeros(()) / 0)


NO_NUMBER = {  # the parameters whose gradients become NaN in backward, and a function that scales or clips after it
    "of another optimizer": (True, lambda body, every: torch.nn.utils.clip_grad_norm_(every, 1.0)),
    "by hand": (False, lambda body, every: scale_by_zero_over_zero(body)),
    "by hand in parts": (False, lambda body, every: scale_by_zero_over_zero(body[:1])),
}


@pytest.mark.parametrize("factor", NO_NUMBER)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_factor_that_is_no_number_skips_the_step(stage, is_plain, factor, caplog):
    has_nan, scale = NO_NUMBER[factor]
    model, body, head = head_beside(lambda optimizer, model: optimizer)
    if is_plain:
        body = ballast.wrap(body, model, stage=stage)
    else:
        body, head = ballast.wrap([body, head], model, stage=stage)
    hook = model[1].weight.register_hook(nan_in_the_head) if has_nan else None
    before = model[0].weight.detach().clone()
    model(torch.ones(4, 8)).square().sum().backward()
    scale([*model[0].parameters()], [*model.parameters()])
    assert torch.isnan(body.clip_grad_norm_(1.0))
    body.step()
    assert torch.equal(model[0].weight, before)
    assert (body.steps, body.metrics()["skipped_steps"]) == (0, 1)
    [message] = [each.message for each in caplog.records if "skipped" in each.message]
    assert message.startswith("step 1 was skipped: the gradients are finite, but a factor that scales or clips them is not")
    body.zero_grad(), head.zero_grad()
    if hook is not None:
        hook.remove()
    model(torch.ones(4, 8)).square().sum().backward()
    body.step()  # its gradients are new
    assert body.steps == 1 and not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_factor_that_is_no_number_on_one_rank_skips_the_step_on_all(stage):
    run_ranks(2, skips_by_a_factor_of_one_rank, stage)
