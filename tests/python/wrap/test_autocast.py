"""Tests of torch.autocast() in stage 3: casts of parameters are not kept for backward, and bits are those of plain torch."""

from functools import partial

import ballast
import pytest
import torch
from python.wrap.support import bodies
from python.wrap.support.loops import Loop, Tower, check_equal
from python.wrap.support.ranks import run_ranks
from torch.nn.functional import conv1d, linear
from torch.profiler import ProfilerActivity, profile

WIDTH, LAYERS = 128, 6


class Layer(torch.nn.Module):
    def __init__(self, use):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.use = use

    def forward(self, batch):
        return torch.tanh(self.use(batch, self.weight))


def written_cast(batch, weight):
    cast = weight.bfloat16()
    with torch.no_grad():
        cast.mul_(1.5)
    return linear(batch.bfloat16(), cast)


FOUND = {
    "linear": linear,
    "matmul with a transposed weight": lambda batch, weight: batch @ weight.T,
    "matmul": lambda batch, weight: batch @ weight,
    "einsum": lambda batch, weight: torch.einsum("bi,oi->bo", batch, weight),
    "twice": lambda batch, weight: linear(linear(batch, weight), weight),
    "a convolution": lambda batch, weight: conv1d(batch[:, :, None], weight[:, :, None])[:, :, 0],
    "an explicit cast": lambda batch, weight: linear(batch.bfloat16(), weight.bfloat16()),
    "an explicit cast of a reshaped weight": lambda batch, weight: linear(batch, weight.view(-1).bfloat16().view(weight.shape)),
}
NOT_FOUND = {
    "a slice": lambda batch, weight: torch.nn.functional.pad(linear(batch, weight[:-1]), (0, 1)),
    "a cast that is written to": written_cast,
    "a cast of a cast": lambda batch, weight: linear(batch, weight.half()),
    "a cast of a product": lambda batch, weight: linear(batch, weight * 2),
    "a cast of every second row": lambda batch, weight: linear(batch, weight[::2].repeat(2, 1)),
}


def model_of(use) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Layer(use) for _ in range(LAYERS)])


def gradients_and_kept_bytes(use, stage: int | None) -> tuple[list[torch.Tensor], int]:
    """Train a step. Return the gradients of the next one, and the bytes that its forward pass leaves behind."""
    model, seen = model_of(use), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage)
    batch = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().sum()

    forward().backward()
    optimizer.step()
    optimizer.zero_grad()
    batch.grad = None
    hooks = [parameter.register_hook(lambda gradient: seen.append(gradient.clone())) for parameter in model.parameters()]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = forward()
    loss.backward()
    optimizer.step()
    for hook in hooks:
        hook.remove()
    return [*seen, batch.grad], sum(event.self_cpu_memory_usage for event in profiled.key_averages())


@pytest.mark.parametrize("use", FOUND)
def test_a_forward_pass_keeps_no_casts_of_parameters(use):
    expected, all_casts = gradients_and_kept_bytes(FOUND[use], None)
    gradients, kept = gradients_and_kept_bytes(FOUND[use], 3)
    assert all(map(torch.equal, gradients, expected)) and len(gradients) == len(expected)
    assert all_casts > 2 * LAYERS * WIDTH**2
    assert kept < all_casts // 8 + 2 * WIDTH**2  # activations, and the cast of the open unit


@pytest.mark.parametrize("use", NOT_FOUND)
def test_other_casts_are_kept_as_they_are(use):
    (gradients, _), (expected, _) = (gradients_and_kept_bytes(NOT_FOUND[use], stage) for stage in (3, None))
    assert all(map(torch.equal, gradients, expected)) and len(gradients) == len(expected)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_a_tower_trains_as_below_stage_3(checkpointing, micro_steps):
    loop = Loop(make_model=partial(Tower, checkpointing), micro_steps=micro_steps, clip=0.5, autocast=True)
    full, ours = loop.run(stage=2), loop.run(stage=3)
    with ballast.gather(ours.model):
        check_equal(full, ours)


def test_backward_inside_gather_casts_the_gathered_values():
    gradients = []
    for gathers in (False, True):
        model = model_of(linear)
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, stage=3)
        batch = torch.linspace(-1, 1, WIDTH).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().sum()
        with ballast.gather(model if gathers else []):
            loss.backward()
        optimizer.step()
        gradients.append(batch.grad)
    assert torch.equal(*gradients)


def test_ranks_train_to_the_same_bits_as_below_stage_3():
    for full, sharded in run_ranks(2, bodies.towers, "none", [{"stage": 2}, {"stage": 3}], 2, 0.5, True):
        assert full[0] == sharded[0]
        assert all(map(torch.equal, full[1], sharded[1]))
