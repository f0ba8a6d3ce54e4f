"""The trainers of each system, as its own documentation sets them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ballast.bench.cases import DRIVE, Workload
from ballast.models.modules import parts_of
from ballast.torch.gpu import is_gpu

LEARNING_RATE = 1e-4


class Trainer:
    """A step in plain torch. Other systems replace the model or the optimizer."""

    def __init__(self, model: nn.Module, optimizer: Any):
        self.model, self.optimizer = model, optimizer

    def train(self, tokens: torch.Tensor) -> float:
        """Make a step, and return the loss before it."""
        loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def figures(self) -> Mapping[str, float]:
        """Return what the system itself measured in the last step."""
        return {}

    def close(self) -> None:
        """Release what the system holds."""


class Alone(Trainer):
    """Forward and backward passes alone: no system can be faster."""

    def train(self, tokens: torch.Tensor) -> float:
        loss = self.model(tokens)
        loss.backward()
        self.model.zero_grad()
        return float(loss.item())


class DeepSpeed(Trainer):
    """DeepSpeed's engine, which steps at the end of a backward pass."""

    def train(self, tokens: torch.Tensor) -> float:
        loss = self.model(tokens)
        self.model.backward(loss)
        self.model.step()
        return float(loss.item())


class Ballast(Trainer):
    """The optimizer of `ballast.wrap()`."""

    def figures(self) -> Mapping[str, float]:
        found: Mapping[str, float] = self.optimizer.metrics()
        return found

    def close(self) -> None:
        self.optimizer.close()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _alone(model: nn.Module, of: Workload, directory: str) -> Trainer:
    return Alone(model, None)


def _ddp(model: nn.Module, of: Workload, directory: str) -> Trainer:
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Trainer(parallel, adamw(parallel))


def _fsdp2(model: nn.Module, of: Workload, directory: str) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in parts_of(model):
        if part.recurse and part.name.rpartition(".")[2].isdigit():
            fully_shard(part.module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainer(model, adamw(model))


def _deepspeed(model: nn.Module, of: Workload, directory: str, *, stage: int) -> Trainer:
    import deepspeed

    backend = "nccl" if is_gpu(next(model.parameters()).device) else "gloo"
    deepspeed.init_distributed(backend, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": of.sequences,
        "bf16": {"enabled": of.dtype == "bf16"},
        "zero_optimization": {"stage": stage, "contiguous_gradients": True, "overlap_comm": True},
        "steps_per_print": 1_000_000,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)  # torch's: its own has to be compiled
    return DeepSpeed(engine, engine.optimizer)


def _ballast(model: nn.Module, of: Workload, directory: str, **options: Any) -> Trainer:
    from ballast import wrap

    offload = options.get("offload")
    if isinstance(offload, str):
        options["offload"] = offload.replace(DRIVE, directory)
    return Ballast(model, wrap(adamw(model), model, **options))


SYSTEMS: Mapping[str, Callable[..., Trainer]] = {
    "alone": _alone,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "ballast": _ballast,
}
