"""Trainers for each system: a plain model, set up as the system's own documentation shows."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from comparisons import ADAMW, MUON, Workload
from torch.nn.parallel import DistributedDataParallel

LEARNING_RATE = 3e-4

Parameters = list[torch.nn.Parameter]
Optimizers = list[torch.optim.Optimizer]


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def for_muon(model: torch.nn.Module) -> tuple[Parameters, Parameters]:
    """Return the matrices of the blocks, and all others: vectors, embeddings and the head."""
    named = [(".blocks." in f".{name}" and each.dim() == 2, each) for name, each in model.named_parameters()]
    return [each for is_matrix, each in named if is_matrix], [each for is_matrix, each in named if not is_matrix]


def optimizers_for(model: torch.nn.Module, workload: Workload) -> Optimizers:
    if workload.rule == ADAMW:
        return [adamw(model.parameters())]
    matrices, others = for_muon(model)
    return [torch.optim.Muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw"), adamw(others)]


class Trainer:
    """A training step in plain torch, with one backward pass or several."""

    def __init__(self, model: torch.nn.Module, optimizers: Optimizers, workload: Workload):
        self.model, self.optimizers = model, optimizers
        self.passes, self.max_norm = workload.micro_steps, workload.max_norm

    def train(self, batches: list[Any]) -> float:
        """Make a step; return the mean loss of this rank."""
        losses = []
        for number, batch in enumerate(batches):
            with self.alone(is_last=number == self.passes - 1):
                loss = self.model(*batch)
                self.backward(loss)
                losses.append(loss.item())
        self.step()
        return sum(losses) / len(losses)

    def alone(self, is_last: bool) -> contextlib.AbstractContextManager:
        """Return a context that keeps ranks from communicating before the last pass, where that is possible."""
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.passes).backward()

    def step(self) -> None:
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def close(self) -> None:
        dist.barrier()  # no rank leaves while another one works


class Alone(Trainer):
    """A limit: no communication, and no update of the model. It may update a share of separate fp32 values. As with
    Ballast, freed gradients stay with the process."""

    def __init__(self, model: torch.nn.Module, workload: Workload, updates: bool = False):
        from ballast.torch.memory import keep_freed_memory

        keep_freed_memory()
        super().__init__(model, [adamw(model.parameters())], workload)
        ranks = int(os.environ["WORLD_SIZE"])
        share = sum(parameter.numel() for parameter in model.parameters()) // ranks if updates else 0
        values = torch.nn.Parameter(torch.zeros(share))
        values.grad = torch.full((share,), 1e-3)
        self.updated = torch.optim.AdamW([values], lr=LEARNING_RATE, fused=True)

    def step(self) -> None:
        self.updated.step()
        self.zero_gradients()

    def close(self) -> None:
        pass


class Ddp(Trainer):
    def __init__(self, model: torch.nn.Module, workload: Workload):
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        super().__init__(model, self.optimizers_of(model, workload), workload)

    @staticmethod
    def optimizers_of(model: torch.nn.Module, workload: Workload) -> Optimizers:
        return optimizers_for(model, workload)

    def alone(self, is_last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if is_last else self.model.no_sync()


class Zero(Ddp):
    @staticmethod
    def optimizers_of(model: torch.nn.Module, workload: Workload) -> Optimizers:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        options = {"parameters_as_bucket_view": True, "lr": LEARNING_RATE, "fused": True}
        return [ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)]


class Fsdp(Trainer):
    def __init__(self, model: torch.nn.Module, workload: Workload):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", self.mesh_shape(), mesh_dim_names=("hosts", "ranks")[-len(self.mesh_shape()) :])
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model, optimizers_for(model, workload), workload)

    @staticmethod
    def mesh_shape() -> tuple[int, ...]:
        return (dist.get_world_size(),)

    def alone(self, is_last: bool) -> contextlib.AbstractContextManager:
        self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()


class HybridFsdp(Fsdp):
    """A copy of the model in each host, sharded over the ranks there."""

    @staticmethod
    def mesh_shape() -> tuple[int, ...]:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        return dist.get_world_size() // local, local


class DeepSpeed(Trainer):
    def __init__(self, model: torch.nn.Module, workload: Workload, stage: int, offload: str = ""):
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        config = deepspeed_config(model, workload, stage)
        if workload.rule == MUON:
            for is_matrix, parameters in zip((True, False), for_muon(model), strict=True):
                for parameter in parameters:
                    parameter.use_muon = is_matrix
        if offload:
            config["zero_optimization"]["offload_optimizer"] = offloaded_optimizer(offload)
            config["aio"] = {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        super().__init__(engine, [engine.optimizer], workload)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)
        self.model.step()

    def step(self) -> None:
        """Do nothing: backward() of the last pass has made the step."""


def deepspeed_config(model: torch.nn.Module, workload: Workload, stage: int) -> dict[str, Any]:
    width = model.positions.weight.shape[1]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": workload.micro_steps,
        "gradient_clipping": workload.max_norm or 0.0,
        "bf16": {"enabled": model.positions.weight.dtype == torch.bfloat16},
        "optimizer": {"type": workload.rule, "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": workload.rule != MUON,  # its Muon refuses it
            "reduce_bucket_size": width * width,
            "stage3_prefetch_bucket_size": int(0.9 * width * width),
            "stage3_param_persistence_threshold": 10 * width,
        },
        "steps_per_print": 1_000_000,
    }


def offloaded_optimizer(place: str) -> dict[str, Any]:
    device, _, folder = place.partition(":")
    if device == "cpu":
        return {"device": "cpu", "pin_memory": False}
    return {"device": "nvme", "nvme_path": folder, "pipeline_read": True, "pipeline_write": True, "buffer_count": 4}


class Ballast(Trainer):
    def __init__(self, model: torch.nn.Module, workload: Workload, **options: Any):
        import ballast

        dist.init_process_group("gloo")
        plain = optimizers_for(model, workload)
        if len(plain) == 1:
            super().__init__(model, [ballast.wrap(*plain, model, max_grad_norm=workload.max_norm, **options)], workload)
            self.max_norm = None  # the wrapped optimizer clips
        else:
            super().__init__(model, ballast.wrap(plain, model, **options), workload)

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()
        super().close()
