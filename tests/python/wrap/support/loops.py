"""Plain torch training loops, with and without ballast.wrap()."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ballast
import torch
import torch.utils.checkpoint
from ballast.schema import options_of

torch.set_num_threads(1)

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def mlp(width: int = 24) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, width), torch.nn.Tanh(), torch.nn.Linear(width, 5))


def mean_square(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def mlp_in_bfloat16() -> torch.nn.Module:
    return mlp(64).to(torch.bfloat16)


def mean_square_in_bfloat16(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return mean_square(model, batch.to(torch.bfloat16))


@dataclass
class Loop:
    """A training that runs with a plain or a wrapped optimizer, and is otherwise the same."""

    make_model: Callable[[], torch.nn.Module] = mlp
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2})
    loss: Loss = mean_square
    steps: int = 6
    micro_steps: int = 1
    clip: float | None = None
    autocast: bool = False  # autocast to bfloat16
    after_step: Callable[[torch.nn.Module, Any], None] = lambda model, optimizer: None
    rank: int = 0
    ranks: int = 1
    device: str = "cpu"

    def batch(self, number: int) -> torch.Tensor:
        """Return this rank's part of the global batch."""
        everything = torch.randn(8 * self.ranks, 20, generator=torch.Generator().manual_seed(number))
        return everything[self.rank * 8 : (self.rank + 1) * 8].to(self.device)

    def run(self, **options: Any) -> Run:
        """Train. With options, the optimizer is wrapped."""
        model = self.make_model()
        if not any(each.is_meta for each in model.parameters()):  # a deferred model is moved where it is made
            model.to(self.device)
        optimizer = self.make_optimizer(model.parameters(), **self.optimizer_options)
        if options:
            optimizer = ballast.wrap(optimizer, model, **keywords(**options))
        return self.train(model, optimizer)

    def train(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> Run:
        losses = []
        for step in range(first, self.steps):
            for micro in range(self.micro_steps):
                with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
                    loss = self.loss(model, self.batch(step * self.micro_steps + micro))
                (loss / self.micro_steps).backward()
                losses.append(loss.item())
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad()
            self.after_step(model, optimizer)
        return Run(model, optimizer, losses)


@dataclass
class Run:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


class Adapted(torch.nn.Module):
    """A frozen layer in bfloat16 with a trained adapter of rank 3."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(20, 20, dtype=torch.bfloat16).requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(3, 20) * 0.1)
        self.up = torch.nn.Parameter(torch.zeros(20, 3))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(batch.to(torch.bfloat16)).float() + batch @ self.down.T @ self.up.T)


def adapted() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(Adapted(), Adapted(), Adapted())


def only_trained(parameters: Iterable[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad], **options)


def check_close(one: Run, other: Run, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(other.losses), atol=tolerance, rtol=tolerance)
    for mine, theirs in zip(one.parameters, other.parameters):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def check_equal(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    for mine, theirs in zip(one.parameters, other.parameters):
        assert torch.equal(mine, theirs)


class Block(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(batch)))
        result: torch.Tensor = batch + self.down(inner)
        return result


class Tower(torch.nn.Module):
    """A model with a block that is used twice, a parameter of its own, and tied, frozen and unused parameters."""

    def __init__(self, checkpointing: str = "none", width: int = 16, depth: int = 4):
        super().__init__()
        torch.manual_seed(0)
        self.checkpointing = checkpointing
        self.first = torch.nn.Linear(20, width)
        self.position = torch.nn.Parameter(torch.randn(width) * 0.1)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(depth)])
        self.blocks[1].requires_grad_(False)
        self.blocks[2].up.bias.requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(width, 20, bias=False)
        self.head = torch.nn.Linear(20, width)
        self.head.weight = self.first.weight

    def _apply(self, *args: Any, **options: Any) -> Tower:
        super()._apply(*args, **options)
        self.head.weight = self.first.weight  # torch unties them on the way to an emulated GPU
        return self

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.first(batch) + self.position
        for block in [*self.blocks, self.blocks[0]]:
            if self.checkpointing == "none":
                batch = block(batch)
            else:
                reentrant = self.checkpointing == "reentrant"
                batch = torch.utils.checkpoint.checkpoint(block, batch, use_reentrant=reentrant)
        result: torch.Tensor = self.head(self.last(batch))
        return result


def in_bfloat16(**changes: Any) -> Loop:
    """Return a loop over a model of bfloat16 parameters."""

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch.to(torch.bfloat16)).float().square().mean()

    return Loop(make_model=lambda: mlp(64).to(torch.bfloat16), loss=loss, **changes)


def keywords(**options: Any) -> dict[str, Any]:
    tuning = {name: options.pop(name) for name in options_of(ballast.Tuning) if name in options}
    run = {name: options.pop(name) for name in options_of(ballast.Run) if name in options}
    if tuning:
        options["tuning"] = ballast.Tuning(**tuning)
    if run:
        options["run"] = ballast.Run(options.get("run", ""), **run)
    return options
