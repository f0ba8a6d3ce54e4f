"""Tests of torch's cache of casts in stage 3: its casts have no memory while their unit is released, and all bits are kept."""

import ballast
import pytest
import torch
from ballast.torch.parameters.unit_gather import CachedCasts
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

WIDTH, LAYERS = 128, 6


def layer() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Tanh())


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


class Training:
    def __init__(self, stage: int | None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[layer() for _ in range(LAYERS)])
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.optimizer = optimizer if stage is None else ballast.wrap(optimizer, self.model, stage=stage)
        self.batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()
        self.gradients: list[torch.Tensor] = []
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: self.gradients.append(gradient.clone()))

    def finish(self, loss: torch.Tensor) -> list[torch.Tensor]:
        loss.backward()
        self.optimizer.step()
        return [loss.detach(), *self.gradients, self.batch.grad]


def kept_in_the_block(stage: int | None, with_gradients: bool) -> int:
    training = Training(stage)
    training.finish(training.model(training.batch).sum())
    with torch.set_grad_enabled(with_gradients), autocast():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            kept = training.model(training.batch)
        assert kept.dtype == torch.bfloat16
    return sum(event.self_cpu_memory_usage for event in profiled.key_averages())


@pytest.mark.parametrize("with_gradients", [True, False], ids=["training", "evaluation"])
def test_only_the_open_unit_has_casts_in_the_block(with_gradients):
    one = 2 * WIDTH**2
    assert kept_in_the_block(None, with_gradients) > LAYERS * one
    assert kept_in_the_block(3, with_gradients) < one + one // 2


def forward_twice(training):
    return training.model(training.model(training.batch))


def units_again_in_another_order(training):
    values = training.batch
    for number in (0, 3, 1, 3, 5, 0, 0):
        values = training.model[number](values)
    return values


def evaluate_between(training):
    values = training.model(training.batch)
    with torch.no_grad():
        factor = training.model(training.batch).mean()
    return values * factor


def use_several_units_at_once(training):
    weights = [each[0].weight for each in training.model]

    def use(_, args):
        return linear(args[0], weights[0] @ weights[3]) + linear(args[0], weights[3])

    values = training.model(training.batch)
    handle = training.model[5].register_forward_pre_hook(use)
    values = training.model(values)
    handle.remove()
    return values


def gather_between(training):
    values = training.model(training.batch)
    with ballast.gather(training.model):
        values = linear(values, training.model[2][0].weight)
    return training.model(values)


USES = [forward_twice, units_again_in_another_order, use_several_units_at_once, gather_between]


@pytest.mark.parametrize("use", [*USES, evaluate_between])
def test_casts_have_their_values_wherever_they_are_used(use):
    results = []
    for stage in (None, 2, 3):
        training = Training(stage)
        with autocast():
            loss = use(training).float().square().sum()
        results.append(training.finish(loss))
    for other in results[1:]:
        assert len(other) == len(results[0])
        if use in (use_several_units_at_once, gather_between):  # the cache is emptied there, and gradients are summed in fp32
            torch.testing.assert_close(other, results[0], rtol=2**-5, atol=2**-7)
        else:
            assert all(map(torch.equal, other, results[0]))


def test_a_model_is_used_in_the_block_after_its_training():
    results = []
    for stage in (None, 3):
        training = Training(stage)
        with autocast():
            training.finish(training.model(training.batch).float().sum())
            if stage is not None:
                training.optimizer.close()
            results.append(training.model(training.batch).detach())
    assert torch.equal(*results)


class Cached:
    """A cast in torch's cache."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.linspace(1, 2, 12).view(3, 4))
        self.casts = CachedCasts()
        self.seen: list[torch.Tensor] = []

    def use(self) -> torch.Tensor:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape == (4, 3):
                self.casts.add(0, tensor._base)
            return tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            return linear(torch.ones(4, requires_grad=True), self.parameter)


def test_a_cast_that_something_refers_to_keeps_its_memory():
    cached = Cached()
    with autocast():
        expected = cached.use()
        [(_, cast)] = cached.casts._seen
        cached.casts.empty(0)
        assert cast.untyped_storage().nbytes() > 0
        view = cast[1:]
        cached.casts.add(0, cast)
        del cast
        cached.casts.empty(0)
        assert view.untyped_storage().nbytes() > 0
        assert torch.equal(cached.use(), expected)


def test_a_cast_that_only_the_cache_has_is_emptied_and_filled():
    cached = Cached()
    with autocast():
        expected = cached.use()
        cached.casts.empty(0)
        [(_, cast)] = cached.casts._emptied[0]
        assert cast.untyped_storage().nbytes() == 0
        cached.casts.fill(0, [cached.parameter.detach()])
        assert torch.equal(cast, cached.parameter.bfloat16())
        assert torch.equal(cached.use(), expected)
        assert not cached.casts._emptied
