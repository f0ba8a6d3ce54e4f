"""What is computed for some tokens at a time, so that the rest has no activations meanwhile: the cross entropy of a language
model, whose forward and backward of a chunk are one step, and modules that are computed again in backward, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Loss:
    """The loss of tokens, as torch.nn.functional.cross_entropy() has it."""

    chunk: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens, in fp32."""
        logits = logits.float()
        smoothing, ignored = self.label_smoothing, self.ignore_index
        total = functional.cross_entropy(logits, labels, ignore_index=ignored, label_smoothing=smoothing, reduction="sum")
        if self.z_loss:
            total = total + self.z_loss * (logits.logsumexp(-1).square() * (labels != ignored)).sum()
        return total


class OfChunks(torch.autograd.Function):
    """The sum over all tokens, and its gradients, chunk by chunk. Gradients of the head's parameters are summed in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        head: Forward,
        loss: Loss,
        labels: torch.Tensor,
        hidden: torch.Tensor,
        *parameters: torch.nn.Parameter,
    ) -> torch.Tensor:
        needs = [each for each, needed in zip((hidden, *parameters), ctx.needs_input_grad[3:]) if needed]
        trained = [each for each in needs if each is not hidden]
        sums = [torch.zeros_like(each, dtype=torch.float32) for each in trained]
        of_hidden = torch.empty_like(hidden) if any(each is hidden for each in needs) else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for first in range(0, len(hidden), loss.chunk):
            part = slice(first, first + loss.chunk)
            with torch.set_grad_enabled(bool(needs)):
                tokens = hidden[part].detach().requires_grad_(of_hidden is not None)
                value = loss.of(head(tokens), labels[part])
                inputs = [tokens, *trained] if of_hidden is not None else trained
                gradients = list(torch.autograd.grad(value, inputs)) if inputs else []
            total += value.detach()
            if of_hidden is not None:
                of_hidden[part] = gradients.pop(0)
            for into, gradient in zip(sums, gradients):
                into += gradient
        ctx.gradients = of_hidden, dict(zip(map(id, trained), sums))
        ctx.parameters = [(id(each), each.dtype) for each in parameters]
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        of_hidden, sums = ctx.gradients
        del ctx.gradients
        for_hidden = None if of_hidden is None else of_hidden.mul_(scale)
        of_parameters = [sums[key].mul_(scale).to(dtype) if key in sums else None for key, dtype in ctx.parameters]
        return None, None, None, for_hidden, *of_parameters


@contextmanager
def calling(module: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let a call of the module run `forward`, with the hooks of the module around it."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def chunked_loss(head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor, loss: Loss) -> torch.Tensor:
    """Return the sum of the loss of all tokens. It is one call of the head: a sharded head is gathered once."""
    forward = head.forward

    def run(tokens: torch.Tensor) -> torch.Tensor:
        parameters = [each for each in head.parameters() if each.requires_grad]
        total: torch.Tensor = OfChunks.apply(forward, loss, labels.reshape(-1), tokens, *parameters)
        return total

    with calling(head, run):
        result: torch.Tensor = head(hidden.reshape(-1, hidden.shape[-1]))
    return result


class State(NamedTuple):
    """What a computation depends on besides its inputs: random generators and autocast."""

    device: torch.device
    generators: tuple[torch.Tensor, torch.Tensor | None]
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device: torch.device) -> State:
        of_gpu = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        is_on = torch.is_autocast_enabled(device.type)
        return cls(device, (torch.get_rng_state(), of_gpu), torch.get_autocast_dtype(device.type) if is_on else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Have this state in the block, and the one before it afterwards."""
        of_cpu, of_gpu = self.generators
        before, gpu = State.now(self.device), torch.get_device_module(self.device)
        torch.set_rng_state(of_cpu)
        if of_gpu is not None:
            gpu.set_rng_state(of_gpu, self.device)
        try:
            with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            torch.set_rng_state(before.generators[0])
            if of_gpu is not None:
                gpu.set_rng_state(before.generators[1], self.device)


class OfTiles(torch.autograd.Function):
    """A module's result, tile by tile. Backward computes each tile again, and sums gradients of parameters in fp32."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, tiles: int, tokens: torch.Tensor, *parameters: Any) -> torch.Tensor:
        ctx.forward, ctx.tiles, ctx.parameters, ctx.state = forward, tiles, parameters, State.now(tokens.device)
        ctx.save_for_backward(tokens)
        return torch.cat([forward(each) for each in tokens.tensor_split(tiles)])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        [tokens] = ctx.saved_tensors
        needs_tokens, *needed = ctx.needs_input_grad[2:]
        trained = [each for each, needs in zip(ctx.parameters, needed) if needs]
        of_tokens: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        with ctx.state.again():
            for tile, of_tile in zip(tokens.tensor_split(ctx.tiles), gradient.tensor_split(ctx.tiles)):
                with torch.enable_grad():
                    inputs = tile.detach().requires_grad_(needs_tokens)
                    result = ctx.forward(inputs)
                gradients = list(torch.autograd.grad(result, [inputs, *trained] if needs_tokens else trained, of_tile))
                if needs_tokens:
                    of_tokens.append(gradients.pop(0))
                sums = [into.add_(each) for into, each in zip(sums, gradients)] or [each.float() for each in gradients]
        found = iter(sums)
        of_parameters = [next(found).to(each.dtype) if needs else None for each, needs in zip(ctx.parameters, needed)]
        return None, None, torch.cat(of_tokens) if needs_tokens else None, *of_parameters


@dataclass
class Tiled:
    """The forward of a module that treats each token alone, in tiles of tokens."""

    forward: Forward  # the module's own, a method: in a copy of the module it is that of the copy
    module: torch.nn.Module
    tiles: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        tiles = min(self.tiles, max(1, len(tokens)))
        result: torch.Tensor = OfTiles.apply(self.forward, tiles, tokens, *self.module.parameters())
        return result.reshape(*hidden.shape[:-1], -1)
