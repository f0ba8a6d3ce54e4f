"""Less activation memory by computing some tokens at a time: a cross entropy that makes forward and backward of each chunk
together, and modules that are recomputed in backward, tile by tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from ballast.checks import refuse
from ballast.torch.parts import part_of

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


class Gradients:
    """The gradients of parameters, summed in fp32 over parts of the tokens. One that no part uses has none, as in torch."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], needed: Sequence[bool]):
        self._parameters = parameters
        self._trained = [each for each, needs in zip(parameters, needed) if needs]
        self._sums: dict[int, torch.Tensor] = {}

    def add(self, result: torch.Tensor, inputs: torch.Tensor, of_result: torch.Tensor | None = None) -> torch.Tensor | None:
        """Add those of a part, and return the gradient of its inputs, if they need one."""
        wanted = [inputs, *self._trained] if inputs.requires_grad else self._trained
        found = list(torch.autograd.grad(result, wanted, of_result, allow_unused=True)) if wanted else []
        of_inputs = found.pop(0) if inputs.requires_grad else None
        for parameter, gradient in zip(self._trained, found):
            if gradient is not None and id(parameter) in self._sums:
                self._sums[id(parameter)] += gradient
            elif gradient is not None:  # a copy: two parameters may have one tensor as their gradient
                self._sums[id(parameter)] = gradient.to(torch.float32, copy=True)
        return torch.zeros_like(inputs) if inputs.requires_grad and of_inputs is None else of_inputs

    def scaled(self, scale: torch.Tensor | float = 1.0) -> list[torch.Tensor | None]:
        sums = [self._sums.get(id(each)) for each in self._parameters]
        return [None if total is None else total.mul_(scale).to(each.dtype) for total, each in zip(sums, self._parameters)]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class OfChunks(torch.autograd.Function):
    """The sum over all tokens, and its gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, has_backward: bool, head: Forward, loss: Loss, labels: torch.Tensor, hidden: torch.Tensor, *parameters: Any
    ) -> torch.Tensor:
        of_hidden, *needed = (has_backward and needs for needs in ctx.needs_input_grad[4:])
        gradients = Gradients(parameters, needed)
        parts: list[torch.Tensor] = []
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Hooks of the caller, such as those of an offload, would see the logits. Nothing of a chunk is saved beyond it.
        with saved_tensors_hooks(as_it_is, as_it_is), torch.set_grad_enabled(of_hidden or any(needed)):
            for tokens, of_tokens in zip(hidden.split(loss.chunk), labels.split(loss.chunk)):
                tokens = tokens.detach().requires_grad_(of_hidden)
                value = loss.of(head(tokens), of_tokens)
                total += value.detach()
                if torch.is_grad_enabled() and (part := gradients.add(value, tokens)) is not None:
                    parts.append(part)
        ctx.gradients = torch.cat(parts) if parts else None, gradients
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, scale: torch.Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("chunked_loss() has one backward: its gradients are made in forward, and given away once")
        of_hidden, gradients = ctx.gradients
        ctx.gradients = None
        return None, None, None, None, None if of_hidden is None else of_hidden.mul_(scale), *gradients.scaled(scale)


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
    if any(part_of(each) is not None for each in head.parameters()):
        refuse(
            "cannot compute the loss of a head whose parameters are DTensors in chunks",
            needed="a head of plain parameters, or torch.distributed.tensor.parallel.loss_parallel()",
        )
    forward, has_backward = head.forward, torch.is_grad_enabled()

    def run(tokens: torch.Tensor) -> torch.Tensor:
        parameters = [each for each in head.parameters() if each.requires_grad]
        total: torch.Tensor = OfChunks.apply(has_backward, forward, loss, labels.reshape(-1), tokens, *parameters)
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
        devices = [] if of_gpu is None else [self.device]
        autocast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)
        with torch.random.fork_rng(devices, device_type=self.device.type), autocast:
            torch.set_rng_state(of_cpu)
            if of_gpu is not None:
                torch.get_device_module(self.device).set_rng_state(of_gpu, self.device)
            yield


class OfTiles(torch.autograd.Function):
    """A module's result, tile by tile. Backward computes each tile again."""

    @staticmethod
    def forward(ctx: Any, forward: Forward, tiles: int, tokens: torch.Tensor, *parameters: Any) -> torch.Tensor:
        ctx.forward, ctx.tiles, ctx.parameters, ctx.state = forward, tiles, parameters, State.now(tokens.device)
        ctx.save_for_backward(tokens)
        before = tokens._version
        result = torch.cat([forward(each) for each in tokens.tensor_split(tiles)])
        if tokens._version != before:
            refuse(
                "cannot compute a module in tiles: it changes its input, which backward needs as it was",
                needed="a module without an operation in place on its input, such as ReLU(inplace=True) as its first",
            )
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        [tokens] = ctx.saved_tensors
        of_tokens, *needed = ctx.needs_input_grad[2:]
        gradients = Gradients(ctx.parameters, needed)
        parts: list[torch.Tensor] = []
        with ctx.state.again(), torch.enable_grad():
            for tile, of_tile in zip(tokens.tensor_split(ctx.tiles), gradient.tensor_split(ctx.tiles)):
                inputs = tile.detach().requires_grad_(of_tokens)
                if (part := gradients.add(ctx.forward(inputs), inputs, of_tile)) is not None:
                    parts.append(part)
        return None, None, torch.cat(parts) if parts else None, *gradients.scaled()


@dataclass
class Tiled:
    """The forward of a module that treats each token alone, in tiles of tokens."""

    forward: Forward  # the module's own, a method: in a copy of the module it is that of the copy
    module: torch.nn.Module
    tiles: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.reshape(-1, hidden.shape[-1])
        tiles = min(self.tiles, max(1, len(tokens)))
        result: torch.Tensor = OfTiles.apply(self._of_tile, tiles, tokens, *self.module.parameters())
        return result.reshape(*hidden.shape[:-1], result.shape[-1])

    def _of_tile(self, tokens: torch.Tensor) -> torch.Tensor:
        result = self.forward(tokens)
        if not isinstance(result, torch.Tensor) or len(result) != len(tokens):
            what = "cannot compute a module in tiles: it does not return one tensor with a row for each token"
            refuse(what, where=type(self.module).__name__, needed="a module that treats each token alone, such as an MLP")
        return result
