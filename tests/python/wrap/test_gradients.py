"""Tests of what users do with gradients that Ballast has taken: it does as torch does, or refuses and trains on."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import Loop, keywords, mean_square, mlp
from python.wrap.support.ranks import run_ranks


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


BATCH = torch.linspace(-1, 1, 20)


class Training:
    """A training of a small model, with a plain optimizer or with a wrapped one."""

    def __init__(self, kind=torch.optim.AdamW, rate=0.1, **options):
        self.model = mlp()
        self.optimizer = kind(self.model.parameters(), lr=rate, weight_decay=0.1)
        self.options = options
        if options:
            self.optimizer = ballast.wrap(self.optimizer, self.model, **keywords(**options))

    @property
    def gradients(self):
        return [each.grad for each in self.model.parameters()]

    def backward(self, scale=1.0):
        (mean_square(self.model, BATCH) * scale).backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self):
        if not self.options:
            return [each.detach().clone() for each in self.model.parameters()]
        with ballast.gather(self.model):
            return [each.detach().clone() for each in self.model.parameters()]

    def require_values_of(self, plain):
        torch.testing.assert_close(self.values(), plain.values(), rtol=1e-5, atol=1e-6)


def check_as_plain(body, kind=torch.optim.AdamW, configurations=({"stage": 2}, {"stage": 3})):
    """Compare trainings in which `body` does the same: what it returns, and the parameters in the end."""
    plain = Training(kind)
    expected = body(plain) or []
    for options in configurations:
        ours = Training(kind, **options)
        assert (body(ours) or []) == pytest.approx(expected, rel=1e-5)
        ours.require_values_of(plain)


def check_trains_on(after, kind=torch.optim.AdamW):
    """Compare a training with a plain one, in which `after` runs between the backward pass and the step and changes nothing."""
    plain = Training(kind)
    plain.step(), plain.step()
    for stage in (2, 3):
        ours = Training(kind, stage=stage)
        ours.backward()
        after(ours)
        ours.optimizer.step()
        ours.optimizer.zero_grad()
        ours.step()
        ours.require_values_of(plain)


# --- Norms after a step ---


def norms(training):
    return [float(each.norm()) for each in training.gradients]


def test_norms_that_were_known_before_a_step_are_known_after_it():
    def clipped(training):
        seen = []
        for _ in range(2):
            training.backward()
            seen.append(float(torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)))
            training.optimizer.step()
            seen += norms(training)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.02)
            seen += norms(training)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.005)  # it comes too late, and clips no later step
            training.optimizer.zero_grad()
        return seen

    check_as_plain(clipped)


@pytest.mark.parametrize("read", [norms, lambda training: training.optimizer.clip_grad_norm_(1.0)])
def test_norms_that_a_step_has_not_kept_are_refused(read):
    plain = Training()
    plain.step(), plain.step()
    for stage in (2, 3):
        ours = Training(stage=stage)
        ours.backward()
        ours.optimizer.step()
        with pytest.raises(ballast.UsageError, match="B1007 cannot compute (.|\n)*used(.|\n)*before step(.|\n)*grad_norm"):
            read(ours)
        ours.optimizer.zero_grad()
        ours.step()
        ours.require_values_of(plain)


def test_a_norm_that_was_kept_from_a_cleared_step_is_refused():
    ours = Training(stage=2)
    ours.backward()
    kept = ours.gradients
    ours.model.zero_grad()
    ours.optimizer.step()
    with pytest.raises(ballast.UsageError, match="B1007 cannot compute"):
        kept[0].norm()
    ours.step()


def test_the_norm_of_no_gradients_is_zero():
    def stepped(training):
        clip = getattr(training.optimizer, "clip_grad_norm_", lambda norm: torch.zeros((), device="cpu"))
        first = float(clip(1.0))
        training.step()
        last = float(clip(1.0))
        training.step()
        return [first, last]

    check_as_plain(stepped)


# --- Sums and other values ---


def add_in_place(gradient):
    gradient += torch.ones_like(gradient, device="cpu")


def assign_data(gradient):
    gradient.data = torch.ones(gradient.shape, device="cpu")


EDITS = {
    "add_": lambda gradient: gradient.add_(torch.full(gradient.shape, 0.3, device="cpu")),
    "add_ of a number": lambda gradient: gradient.add_(1.0),
    "+=": add_in_place,
    "data.add_": lambda gradient: gradient.data.add_(torch.full(gradient.shape, 0.3, device="cpu")),
    "data =": assign_data,
    "fill_": lambda gradient: gradient.fill_(1.0),
    "mul_ by a mask": lambda gradient: gradient.mul_(torch.ones(gradient.shape, device="cpu")),
}


@pytest.mark.parametrize("edit", EDITS)
def test_other_values_for_a_gradient_are_refused(edit):
    def after(training):
        for gradient in training.gradients:
            with pytest.raises(ballast.UsageError, match="B1005 cannot .*gradient(.|\n)*where: *parameter"):
                EDITS[edit](gradient)

    check_trains_on(after)


def test_a_hook_that_adds_to_a_taken_gradient_is_refused_at_the_step():
    def add(parameter):
        parameter.grad.add_(0.3)

    for stage in (2, 3):
        ours, plain = Training(stage=stage), Training()
        handle = ours.model[0].bias.register_post_accumulate_grad_hook(add)
        ours.backward()
        with pytest.raises(ballast.UsageError, match="B1005 cannot make a step: a hook added(.|\n)*parameter 0.bias"):
            ours.optimizer.step()
        handle.remove()
        ours.optimizer.zero_grad()
        ours.step(), plain.step()
        ours.require_values_of(plain)


def test_scaling_the_data_of_gradients_scales_them():
    def scaled(training):
        training.backward()
        for gradient in training.gradients:
            gradient.data.mul_(0.5)
        training.optimizer.step()

    check_as_plain(scaled, torch.optim.SGD)


# --- Factors ---

WRONG_FACTORS = {
    "mul_(-1)": lambda gradient: gradient.mul_(-1),
    "neg by a tensor": lambda gradient: gradient.mul_(torch.tensor(-0.5, device="cpu")),
    "mul_(inf)": lambda gradient: gradient.mul_(float("inf")),
    "div_(0)": lambda gradient: gradient.div_(0),
    "div_(-2)": lambda gradient: gradient.div_(-2.0),
}


@pytest.mark.parametrize("scale", WRONG_FACTORS)
def test_factors_that_are_not_possible_are_refused_at_once(scale):
    def after(training):
        for gradient in training.gradients:
            with pytest.raises(ballast.UsageError, match="B1005 cannot scale a gradient by(.|\n)*parameter"):
                WRONG_FACTORS[scale](gradient)
        with pytest.raises(ballast.UsageError, match="B1005 cannot scale a gradient by -(.|\n)*all parameters"):
            training.optimizer.clip_grad_norm_(-1.0)

    check_trains_on(after)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])  # one has a rule of the library, one its own step
def test_gradients_times_zero_are_zeros(kind):
    def scaled(training):
        training.step()
        training.backward()
        for gradient in training.gradients:
            gradient.mul_(0)
        norms_of_zeros = norms(training)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step()
        return norms_of_zeros

    check_as_plain(scaled, kind)


@pytest.mark.parametrize("factor", [0.5, 0.0, float("nan")])
@pytest.mark.parametrize("holds", [False, True])
def test_gradients_after_a_factor_are_refused(factor, holds):
    """Torch scales only the passes before the factor."""
    plain = Training()
    plain.step()
    for stage in (2, 3):
        ours = Training(stage=stage)
        ours.backward()
        for gradient in ours.gradients:
            gradient.mul_(factor)
        with pytest.raises(ballast.UsageError, match="B1007 cannot add .* scaled by(.|\n)*last backward(.|\n)*losses"):
            with ours.optimizer.no_sync() if holds else nullcontext():
                ours.backward()
        ours.optimizer.zero_grad()
        ours.step()
        ours.require_values_of(plain)


def test_a_factor_of_one_between_two_passes_changes_nothing():
    def accumulated(training):
        training.backward()
        for gradient in training.gradients:
            gradient.mul_(1.0)
        training.step()

    check_as_plain(accumulated)


def test_clipping_by_an_infinite_norm_skips_the_step():
    ours = Training(stage=2)
    before = ours.values()
    ours.backward(scale=float("inf"))
    norm = torch.nn.utils.clip_grad_norm_(ours.model.parameters(), 1.0)
    ours.optimizer.step()
    assert not norm.isfinite()
    assert ours.optimizer.metrics()["skipped"] == 1.0
    assert all(map(torch.equal, before, ours.values()))


# --- Passes that are partial, interrupted or cleared ---


def clear_through_the_optimizer(training):
    training.optimizer.zero_grad()


def clear_through_the_model(training):
    training.model.zero_grad()


def leave(training):
    pass


def partial_pass(training):
    first, activation, _ = training.model
    activation(first(BATCH)).square().mean().backward()


def partial_pass_of_the_last_layer(training):
    training.model[2](torch.ones(24)).square().mean().backward()


def interrupted_pass(training):
    def interrupt(gradient):
        raise KeyError

    first, activation, last = training.model
    inner = activation(first(BATCH))
    inner.register_hook(interrupt)
    with suppress(KeyError):
        last(inner).square().mean().backward()


def clipped_pass(training):
    training.backward()
    clip_by_torch(training)


@pytest.mark.parametrize("run", [partial_pass, partial_pass_of_the_last_layer, interrupted_pass, clipped_pass])
@pytest.mark.parametrize("clear", [clear_through_the_optimizer, clear_through_the_model, leave])
@pytest.mark.parametrize("begins", [True, False])
def test_a_full_pass_follows_one_that_has_not_come_to_its_end(run, clear, begins):
    if run is clipped_pass and clear is leave:
        pytest.skip("a pass after clipping is refused")

    def train(training):
        if not begins:
            training.step()
        run(training)
        clear(training)
        training.step(), training.step()

    check_as_plain(train, torch.optim.SGD)


# --- Gradients by hand, and accumulation ---


def clip_by_torch(training):
    return float(torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1))


def clip_by_itself(training):
    if not training.options:
        return clip_by_torch(training)
    return float(training.optimizer.clip_grad_norm_(0.1))


@pytest.mark.parametrize(("by_hand", "clip"), [(2, clip_by_itself), (2, clip_by_torch), (4, clip_by_itself)])
def test_gradients_by_hand_are_clipped_with_the_others(by_hand, clip):
    def clipped(training):
        seen = []
        for _ in range(2):
            first, activation, last = training.model
            if by_hand == 2:
                last(activation(first(BATCH)).detach()).square().mean().backward()
            for number, parameter in enumerate(list(training.model.parameters())[:by_hand]):
                values = torch.linspace(-1, number, parameter.numel(), device="cpu")
                parameter.grad = values.reshape(parameter.shape)
            seen.append(clip(training))
            training.optimizer.step()
            training.optimizer.zero_grad()
        return seen

    check_as_plain(clipped, torch.optim.SGD)


@pytest.mark.parametrize("clip", [clip_by_itself, clip_by_torch])
@pytest.mark.parametrize("holds", [False, True])
def test_gradients_after_clipping_are_refused(clip, holds):
    plain = Training()
    plain.step()
    for stage in (2, 3):
        ours = Training(stage=stage)
        ours.backward()
        clip(ours)
        said = "B1007 cannot add gradients(.|\n)*last backward pass(.|\n)*zero_grad"
        with pytest.raises(ballast.UsageError, match=said):
            with ours.optimizer.no_sync() if holds else nullcontext():
                ours.backward()
        ours.optimizer.zero_grad()
        ours.step()
        ours.require_values_of(plain)


def test_a_second_step_with_the_same_gradients_is_refused():
    plain = Training()
    plain.step(), plain.step()
    for stage in (2, 3):
        ours = Training(stage=stage)
        ours.backward()
        ours.optimizer.step()
        with pytest.raises(ballast.UsageError, match="B1007 cannot make a step: the last one has used(.|\n)*zero_grad"):
            ours.optimizer.step()
        ours.optimizer.zero_grad()
        ours.optimizer.step()  # it has no gradients
        ours.step()
        ours.require_values_of(plain)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_agree_on_gradients_by_hand_and_on_norms_after_a_step(stage):
    loop = Loop(ranks=2)
    plain = loop.make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = [0.0]
    for step, by_hand in enumerate((True, False, True)):
        for parameter in plain.parameters():
            parameter.grad = torch.full_like(parameter, 1.5) if by_hand else torch.zeros_like(parameter)
        if not by_hand:
            for rank in range(2):
                (loop.loss(plain, replace(loop, rank=rank).batch(step)) / 2).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)))
        optimizer.step()
        if not by_hand:
            expected.append(min(expected[-1], 0.1))
        optimizer.zero_grad()
    for norms_seen, values in run_ranks(2, clips_by_hand, stage):
        assert norms_seen == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(values, [each.detach() for each in plain.parameters()], rtol=1e-4, atol=1e-5)


def scales(parameter):
    parameter.grad.mul_(2)


def clamps(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def takes_roots(parameter):
    parameter.grad.sqrt_()


def train_with_hook(hook, wrap):
    model = mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model[0].weight.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        mean_square(model, torch.ones(20)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(model):
        return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("hook", [scales, clamps])
def test_a_hook_that_is_registered_after_wrap_changes_its_gradient(hook, stage):
    found = train_with_hook(hook, partial(ballast.wrap, stage=stage))
    assert all(map(torch.equal, found, train_with_hook(hook, lambda optimizer, model: optimizer)))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_hook_that_cannot_change_its_gradient_is_named(stage):
    with pytest.raises(ballast.UsageError, match="B1005.*hook takes_roots(.|\n)*0.weight(.|\n)*before ballast.wrap"):
        train_with_hook(takes_roots, partial(ballast.wrap, stage=stage))
