"""The cross entropy of a language model whose logits are never there at once. Forward and backward of a chunk of tokens are one
step, so that only the gradients stay until backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional


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
        head: Callable[[torch.Tensor], torch.Tensor],
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
