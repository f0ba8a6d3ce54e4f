"""Train one rank of one case: `python -m ballast.tools.bench.rank FILE`. It writes what it measured to a file."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ballast.models.modules import parts_of
from ballast.tools.bench.cases import DRIVE, Workload
from ballast.tools.bench.models import flops_of_token, model_of, vocabulary_of
from ballast.torch.gpu import current_device, gpu_module, is_gpu

WARM_UP = 5  # steps in which systems learn the order of parameters and allocate
COMPARED = 5  # the step whose loss is compared with that of other systems
FEWEST, MOST = 4, 100  # timed steps
PR_SET_PDEATHSIG = 1

LEARNING_RATE = 1e-4


# --- The systems, as their own documentation sets them up ---


@dataclass
class Trainer:
    """A system's calls in a step, and what it measured itself in the last one."""

    model: nn.Module
    step: Callable[[], object]
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward
    figures: Callable[[], Mapping[str, float]] = dict
    close: Callable[[], object] = lambda: None  # releases what the system holds

    def train(self, tokens: torch.Tensor) -> float:
        """Make a step, and return the loss before it."""
        loss = self.model(tokens)
        self.backward(loss)
        self.step()
        return float(loss.item())


def _trained_by(optimizer: Any, model: nn.Module, **more: Any) -> Trainer:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(model, step, **more)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _ddp(model: nn.Module, of: Workload, directory: str) -> Trainer:
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _trained_by(adamw(parallel), parallel)


def _fsdp2(model: nn.Module, of: Workload, directory: str) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in parts_of(model):
        if part.recurse and part.name.rpartition(".")[2].isdigit():
            fully_shard(part.module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained_by(adamw(model), model)


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
    return Trainer(engine, engine.step, engine.backward)


def _ballast(model: nn.Module, of: Workload, directory: str, **options: Any) -> Trainer:
    from ballast import wrap

    offload = options.get("offload")
    if isinstance(offload, str):
        options["offload"] = offload.replace(DRIVE, directory)
    optimizer = wrap(adamw(model), model, **options)
    return _trained_by(optimizer, model, figures=optimizer.metrics, close=optimizer.close)


SYSTEMS: Mapping[str, Callable[..., Trainer]] = {
    "alone": lambda model, of, directory: Trainer(model, model.zero_grad),  # no system can be faster
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
    "ballast": _ballast,
}


# --- The rank ---


def main(file: str) -> None:
    """Read the task of this rank, train, and write the result next to it."""
    task = json.loads(Path(file).read_text())
    rank = int(os.environ["RANK"])
    _end_with(task["parent"])
    if task["cores"]:
        os.sched_setaffinity(0, task["cores"][rank])
        torch.set_num_threads(len(task["cores"][rank]))
    if task["on_gpu"]:
        gpu_module().set_device(int(os.environ["LOCAL_RANK"]))
    of, device = Workload(**task["workload"]), current_device()
    imported = _reset_peak()
    dist.init_process_group("nccl" if task["on_gpu"] else "gloo")
    model = model_of(of, device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    counted = {"parameters": parameters, "flops_of_token": flops_of_token(of, model)}
    trainer = SYSTEMS[task["system"]](model, of, task["directory"], **task["options"])
    took = _measure(trainer, of, device)
    if is_gpu(device):  # Ballast's memory of a GPU is its own, and not torch's
        peak = gpu_module().max_memory_allocated() + int(took["figures"].get("memory_bytes/device", 0))
    else:
        peak = _status("VmHWM") - imported
    memory = {"peak_bytes": peak, "host_bytes": max(0, _status("VmHWM") - imported)}
    Path(f"{file}.{rank}").write_text(json.dumps({**took, **memory, **counted}))
    dist.barrier()  # no rank leaves while another one works
    trainer.close()
    os._exit(0)  # process groups of torch sometimes hang at exit


def _measure(trainer: Trainer, of: Workload, device: torch.device) -> dict[str, Any]:
    """Train on random tokens, warm up first, and return the times and losses of the steps."""
    chance = torch.Generator().manual_seed(dist.get_rank())
    words = vocabulary_of(of)
    batches = [torch.randint(words, (of.sequences, of.context), generator=chance).to(device) for _ in range(COMPARED)]
    losses: list[float] = []
    seconds: list[float] = []
    figures: list[Mapping[str, float]] = []
    steps = WARM_UP
    while len(seconds) < steps:
        dist.barrier()
        begin = time.perf_counter()
        losses.append(trainer.train(batches[len(losses) % COMPARED]))
        if is_gpu(device):
            gpu_module().synchronize()
        seconds.append(time.perf_counter() - begin)
        figures.append(trainer.figures())
        if len(seconds) == WARM_UP:
            steps += _steps_to_time(of.seconds, seconds[-1], device)
    return {
        "seconds": seconds[WARM_UP:],
        "loss": losses[COMPARED - 1],
        "figures": {name: statistics.median(each[name] for each in figures[WARM_UP:]) for name in figures[-1]},
    }


def _steps_to_time(wanted: float, step: float, device: torch.device) -> int:
    """Return the same number of steps on all ranks."""
    count = torch.tensor([max(FEWEST, min(MOST, round(wanted / step)))], device=device)
    dist.broadcast(count, 0)
    return int(count.item())


def _end_with(parent: int) -> None:
    """End this process when `ballast bench` ends, however that happens. An interrupt at the terminal ends `ballast bench`,
    which ends its ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _reset_peak() -> int:
    """Let the kernel count the peak from now on, and return the bytes that are resident already."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
    return _status("VmRSS")


def _status(field: str) -> int:
    """Return the bytes in the line of this name in the kernel's status of this process; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), 0)


if __name__ == "__main__":
    main(sys.argv[1])
