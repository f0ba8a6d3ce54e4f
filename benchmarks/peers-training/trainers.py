"""Train one rank of one system: trainers.py SYSTEM WORKLOAD DIRECTORY TEXT. Write times and memory to standard output, in JSON.

There is a trainer for each system: a plain model, set up as the system's own documentation shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import suite
import torch
import torch.distributed as dist
from suite import status
from systems import ADAMW, MUON, SYSTEMS, WORKLOADS, System, Workload
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 5  # steps in which Ballast and DeepSpeed learn the order of units, and Ballast finds memory for parameters
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

    @staticmethod
    def building(workload: Workload, **options: Any) -> contextlib.AbstractContextManager:
        """Return a context in which a model that is larger than memory is constructed, where the system has one."""
        return contextlib.nullcontext()

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
    def __init__(self, model: torch.nn.Module, workload: Workload, partitions: bool = False):
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        super().__init__(model, [partitioned_adamw(model)] if partitions else optimizers_for(model, workload), workload)

    def alone(self, is_last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if is_last else self.model.no_sync()


def partitioned_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options = {"parameters_as_bucket_view": True, "lr": LEARNING_RATE, "fused": True}
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)


class Fsdp(Trainer):
    """The model, sharded over all ranks; if hybrid, a copy in each host, sharded over the ranks there."""

    def __init__(self, model: torch.nn.Module, workload: Workload, hybrid: bool = False, offload: bool = False):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        dist.init_process_group("gloo")
        ranks, local = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
        shape = {"hosts": ranks // local, "ranks": local} if hybrid else {"ranks": ranks}
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        super().__init__(model, optimizers_for(model, workload), workload)

    def alone(self, is_last: bool) -> contextlib.AbstractContextManager:
        self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()


class DeepSpeed(Trainer):
    def __init__(self, model: torch.nn.Module, workload: Workload, **options: Any):
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        if workload.rule == MUON:
            for is_matrix, parameters in zip((True, False), for_muon(model), strict=True):
                for parameter in parameters:
                    parameter.use_muon = is_matrix
        config = deepspeed_config(workload, **options)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        super().__init__(engine, [engine.optimizer], workload)

    @staticmethod
    def building(workload: Workload, **options: Any) -> contextlib.AbstractContextManager:
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
        config = deepspeed_config(workload, **options)
        return deepspeed.zero.Init(config_dict_or_path=config, remote_device="nvme" if "parameters" in options else None)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)
        if not self.model.is_gradient_accumulation_boundary():
            self.model.step()

    def step(self) -> None:
        self.model.step()


def deepspeed_config(
    workload: Workload, stage: int, offload: str = "", parameters: str = "", subgroup: int = 0
) -> dict[str, Any]:
    """Return its configuration. `offload` and `parameters` are the places of the state and of the parameters, and `subgroup`
    the number of values that are updated together."""
    width = workload.shape.width
    zero = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": workload.rule != MUON,  # its Muon refuses it
        "reduce_bucket_size": width * width,
        "stage3_prefetch_bucket_size": int(0.9 * width * width),
        "stage3_param_persistence_threshold": 10 * width,
    }
    if offload:
        zero["offload_optimizer"] = offloaded_optimizer(offload, is_pipelined=not subgroup)
    if parameters:
        largest = workload.shape.vocabulary * width
        place = {"device": "nvme", "nvme_path": parameters.removeprefix("nvme:"), "pin_memory": False}
        zero["offload_param"] = {**place, "buffer_count": 5, "buffer_size": largest, "max_in_cpu": 0}
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = 0  # each kept one would hold a buffer
    if subgroup:
        zero["sub_group_size"] = subgroup
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": workload.micro_steps,
        "gradient_clipping": workload.max_norm or 0.0,
        "bf16": {"enabled": workload.dtype == "bfloat16"},
        "optimizer": {"type": workload.rule, "params": {"lr": LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": zero,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True},
        "steps_per_print": 1_000_000,
    }


def offloaded_optimizer(place: str, is_pipelined: bool) -> dict[str, Any]:
    device, _, folder = place.partition(":")
    if device == "cpu":
        return {"device": "cpu", "pin_memory": False}
    pipeline = {"pipeline_read": is_pipelined, "pipeline_write": is_pipelined}
    return {"device": "nvme", "nvme_path": folder, "buffer_count": 4, **pipeline}


class Ballast(Trainer):
    def __init__(self, model: torch.nn.Module, workload: Workload, **options: Any):
        import ballast

        dist.init_process_group("gloo")
        plain = optimizers_for(model, workload)
        names = [each.name for each in fields(ballast.Tuning) if each.name in options]
        options["tuning"] = ballast.Tuning(**{name: options.pop(name) for name in names})
        if len(plain) == 1:
            super().__init__(model, [ballast.wrap(*plain, model, max_grad_norm=workload.max_norm, **options)], workload)
            self.max_norm = None  # the wrapped optimizer clips
        else:
            super().__init__(model, ballast.wrap(plain, model, **options), workload)

    @staticmethod
    def building(workload: Workload, **options: Any) -> contextlib.AbstractContextManager:
        import ballast

        return ballast.deferred()

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()
        super().close()


# --- The program ---


def main() -> None:
    name_of_system, name_of_workload, directory, kept = sys.argv[1:]
    system = next(each for each in SYSTEMS if each.name == name_of_system)
    workload = next(each for each in WORKLOADS if each.name == name_of_workload)
    train(system, workload, Path(directory), Path(kept), dict)


def train(system: System, workload: Workload, directory: Path, kept: Path, count: Callable[[], dict[str, float]]) -> None:
    """Train, print what it took, and end the process. The difference of `count()` over the timed steps is printed too."""
    imported = status("VmRSS")
    import gpt

    output = suite.own_output()
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    options = {key: with_directory(value, str(directory)) for key, value in system.options.items()}

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, workload.dtype))
    shape = workload.shape
    model = gpt.GPT(shape.layers, shape.width, shape.width // 64, shape.context)
    torch.set_default_dtype(torch.float32)  # as DeepSpeed expects it
    trainer = globals()[system.trainer](model, workload, **options)
    keep_text(kept)
    text = torch.frombuffer(bytearray(kept.read_bytes()), dtype=torch.uint8)

    losses, seconds, before = [], [], {}
    for step in range(WARM_UP + shape.steps):
        batches = [
            gpt.batch(text, step * workload.micro_steps + number, shape.sequences, shape.context)
            for number in range(workload.micro_steps)
        ]
        before = count() if step == WARM_UP else before
        begin = time.perf_counter()
        losses.append(trainer.train(batches))
        seconds.append(time.perf_counter() - begin)
    counted = {name: value - before[name] for name, value in count().items()}
    took = {"seconds": seconds[WARM_UP:], "losses": losses, "imported_bytes": imported, "peak_bytes": status("VmHWM")}
    print(json.dumps({**took, **counted}), file=output, flush=True)
    trainer.close()
    os._exit(0)  # torch's groups under DDP and DeepSpeed sometimes fail at exit, or hang


def keep_text(path: Path) -> None:
    """Write the text once: all runs train on the text of the first, even if the documents change meanwhile."""
    import gpt

    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as own:  # ranks on imitated hosts share process numbers
            own.write(bytes(gpt.text_of_this_project().tolist()))
        Path(own.name).replace(path)


def with_directory(value: object, directory: str) -> object:
    if isinstance(value, dict):
        return {name: with_directory(each, directory) for name, each in value.items()}
    return f"nvme:{directory}" if value in ("nvme", "nvme:") else value


if __name__ == "__main__":
    main()
