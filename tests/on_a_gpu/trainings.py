"""Train a model for some steps by one system. Print its losses, the seconds of a step, its memory and the rates of its lanes,
and the planner's forecast: before the day, and with the rates of this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from on_a_gpu.cases import CASES, CHUNK, LENGTH, ON_DRIVE, Case
from on_a_gpu.findings import figures_line
from on_a_gpu.llama import CONFIGS

WARM_UP = 2  # steps that are not timed
TIMED_PASSES = 3
LEFT_TO_SYSTEM = 6 << 30  # what the system and torch take of a host besides the memory that was grown to
EXPECTED = {  # the machine of the day, by its description and data sheets; a file of `ballast bench --output`
    "device": "NVIDIA H200",
    "memory": 150_000_000_000,
    "flops": 989e12,
    "cores": 16,
    "rates": {"upload": 50e9, "download": 50e9, "host_memory": 120e9, "device_memory": 4.08e12, "read": 2e9, "write": 1e9},
}


@dataclass(frozen=True)
class Place:
    """Where a case trains, and what it uses. A small run tries the command."""

    device: str  # cuda, cpu, or emulated
    work: Path
    is_small: bool = False

    @property
    def of_torch(self) -> Any:
        """The module of the device's kind."""
        import torch

        return getattr(torch, self.device)

    def wait(self) -> None:
        if self.device != "cpu":
            self.of_torch.synchronize()

    def memory(self) -> dict[str, int]:
        """Return the peak of torch on the GPU, and the memory in use by all processes, including CUDA's own."""
        if self.device == "cpu":
            return {}
        free, total = self.of_torch.mem_get_info()
        most = self.of_torch.max_memory_allocated() if self.device == "cuda" else 0
        return {"torch_bytes": most, "used_bytes": total - free}


def small(case: Case) -> Case:
    return replace(case, model="small", steps=min(case.steps, 6), sequences=2)


# --- Systems: each returns the optimizer for a model ---


class WithMasters:
    """AdamW on copies in fp32 of parameters in bf16."""

    def __init__(self, model: Any, adamw: Callable[..., Any]):
        self.parameters = list(model.parameters())
        self.masters = [each.detach().float().requires_grad_() for each in self.parameters]
        self.adamw = adamw(self.masters)

    def step(self) -> None:
        import torch

        for each, master in zip(self.parameters, self.masters):
            master.grad = each.grad.float()
        self.adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)

    def zero_grad(self) -> None:
        for each in self.parameters:
            each.grad = None


def adamw_of(place: Place) -> Callable[..., Any]:
    import torch

    fused = {"fused": True} if place.device == "cuda" else {}
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, **fused)


def with_fsdp2(model: Any, case: Case, place: Place) -> Any:
    import torch
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    init_process_group("nccl" if place.device == "cuda" else "gloo", store=HashStore(), rank=0, world_size=1)
    shared = {
        "mesh": init_device_mesh(place.device, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.layers:
        fully_shard(block, **shared)
    fully_shard(model, **shared)
    return adamw_of(place)(model.parameters())


def with_torchao(model: Any, case: Case, place: Place) -> Any:
    import torch
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, lr=1e-4)


def with_ballast(model: Any, case: Case, place: Place) -> Any:
    import ballast

    tuning = {"update_in_backward": case.options["update_in_backward"]} if "update_in_backward" in case.options else {}
    options = {name: option for name, option in case.options.items() if name != "update_in_backward"}
    optimizer = adamw_of(place)(model.parameters())
    return ballast.wrap(optimizer, model, tuning=ballast.Tuning(timeline=True, **tuning), **options)


SYSTEMS: Mapping[str, Callable[[Any, Case, Place], Any]] = {
    "torch": lambda model, case, place: adamw_of(place)(model.parameters()),
    "masters": lambda model, case, place: WithMasters(model, adamw_of(place)),
    "fsdp2": with_fsdp2,
    "torchao": with_torchao,
    "ballast": with_ballast,
}


# --- Measurements ---


def made_model(case: Case, place: Place) -> Any:
    import ballast
    import torch
    from on_a_gpu.llama import made

    dtype = torch.float32 if case.system == "fsdp2" else torch.bfloat16
    with ballast.deferred() if case.is_deferred else nullcontext():
        return made(CONFIGS[case.model], place.device, dtype, CHUNK if case.is_checkpointed else None)


def measured(name: str, case: Case, place: Place) -> dict[str, Any]:
    """Train on one batch. A step is timed from the end of a forward pass to that of the next one, where the loop reads the loss
    as most loops do: updates may run behind the next forward pass."""
    import torch

    began = time.perf_counter()
    model = made_model(case, place)
    optimizer = SYSTEMS[case.system](model, case, place)
    length = 32 if place.is_small else LENGTH
    tokens = torch.randint(CONFIGS[case.model]["vocab_size"], (case.sequences, length + 1), device=place.device)
    place.wait()
    print(f"ready to train after {time.perf_counter() - began:.1f} s", flush=True)
    losses, read = [], []
    for number in range(case.steps):
        loss = model(tokens)
        losses.append(loss.item())
        read.append(time.perf_counter())
        print(f"step {number + 1}: loss {losses[-1]:.4f}, after {read[-1] - began:.1f} s", flush=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    place.wait()
    steps = [after - before for before, after in zip(read[WARM_UP:], read[WARM_UP + 1 :])]
    figures = {"losses": losses, "seconds": median(steps), "setup_seconds": read[0] - began, **place.memory()}
    if case.system == "ballast":
        figures |= of_ballast(optimizer, place.work / f"timeline-{name}.json")
        optimizer.close(gather=False)
    elif case.system == "torch":
        figures["passes_seconds"] = seconds_of_passes(model, tokens, place)
    return figures


def of_ballast(optimizer: Any, timeline: Path) -> dict[str, Any]:
    """Return what the last step did: the rate of each lane, and the time in which the loop waited for it."""
    print(optimizer.memory())
    optimizer.write_timeline(timeline)
    metrics = optimizer.metrics()
    print(json.dumps(metrics))
    chosen = ("gb_per_second/", "memory_bytes/")
    figures = {name: value for name, value in metrics.items() if name.startswith(chosen)}
    return figures | {"exposed_seconds": metrics.get("exposed_seconds", 0.0), "step_seconds": metrics["seconds"]}


def seconds_of_passes(model: Any, tokens: Any, place: Place) -> float:
    """Return the seconds of forward and backward alone."""
    times = []
    for _ in range(TIMED_PASSES):
        place.wait()
        began = time.perf_counter()
        model(tokens).backward()
        place.wait()
        times.append(time.perf_counter() - began)
        model.zero_grad()
    return median(times)


# --- The forecast ---


def as_measured(known: Mapping[str, Any], work: Path) -> Path:
    """Write the machine of a forecast, as `ballast bench --output` would: as expected, or as this run has measured it."""
    path = work / "machine.json"
    path.write_text(json.dumps({"ballast_bench": 1, "measured": dict(known)}))
    return path


def machine_of_run(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected machine with the rates that earlier steps have measured."""
    rates = dict(EXPECTED["rates"])
    found = {
        "host_memory": figures.get("host", {}).get("stream"),
        "upload": figures.get("gpu: upload at once", {}).get("value"),
        "download": figures.get("gpu: download at once", {}).get("value"),
        "device_memory": figures.get("gpu: copy", {}).get("value"),
        "read": figures.get("drive", {}).get("read"),
        "write": figures.get("drive", {}).get("write"),
    }
    rates |= {name: 1e9 * rate for name, rate in found.items() if rate}
    return {**EXPECTED, "rates": rates, "cores": figures.get("host", {}).get("cores", EXPECTED["cores"])}


def forecast(case: Case, machine: Mapping[str, Any], work: Path, **more: Any) -> Any:
    import ballast

    options = {**case.options, **({"offload": {"state": "nvme"}} if case.options.get("offload") == ON_DRIVE else {})}
    return ballast.plan(
        CONFIGS[case.model],
        measured=as_measured(machine, work),
        flops=int(machine["flops"]),
        host_memory="128GiB",
        drive_space="60GiB",
        tokens=case.tokens,
        sequence=LENGTH,
        activations="checkpointed" if case.is_checkpointed else "kept",
        loss_chunk=CHUNK if case.is_checkpointed else None,
        **{"stage": 2, "offload": "none", **options, **more},
    )


def efficiency_of(figures: Mapping[str, Any]) -> float | None:
    """Return the part of the peak that the passes of plain torch have reached, by the planner's count of operations."""
    from ballast.models import describe

    seconds = figures.get("1b-bf16", {}).get("passes_seconds")
    if seconds is None:
        return None
    case = CASES["1b-bf16"]
    flops = case.tokens * describe(CONFIGS[case.model]).flops_of_token(LENGTH)
    return min(1.0, flops / seconds / EXPECTED["flops"])


def forecasts(case: Case, figures: Mapping[str, Any], work: Path) -> dict[str, float]:
    """Return the seconds of a step as forecast, and the bytes of the GPU. The efficiency that is measured on the model of a
    billion parameters holds for the larger ones, too."""
    before = forecast(case, EXPECTED, work)
    print(before.text())
    found = {"forecast_seconds": before.seconds, "planned_bytes": before.bytes_in("device"), "parameters": before.parameters}
    found["planned_host_bytes"] = before.bytes_in("host")
    if (part := efficiency_of(figures)) is not None:
        found["forecast_here_seconds"] = forecast(case, machine_of_run(figures), work, efficiency=part).seconds
    return found


def read_figures(work: Path) -> dict[str, Any]:
    """Return what the steps before this one have measured."""
    path = work.parent / "figures.json"
    return json.loads(path.read_text()) if path.exists() else {}


def state_memory(figures: Mapping[str, Any]) -> None:
    """Tell Ballast the size of a host whose memory grows as it is used, if the kernel tells less than an earlier step used."""
    from on_a_gpu.host import memory_of_kernel

    grown = figures.get("host", {}).get("grown_bytes", 0)
    if grown > memory_of_kernel("MemTotal"):
        os.environ.setdefault("BALLAST_HOST_MEMORY", str(grown + LEFT_TO_SYSTEM))


def train(name: str, place: Place) -> None:
    figures = read_figures(place.work)
    case = CASES[name]
    planned = forecasts(case, figures, place.work) if case.system == "ballast" else {}
    print(figures_line(name, planned), flush=True)  # if the training is cut, the forecast is known
    drive = place.work / "drive"
    drive.mkdir(parents=True, exist_ok=True)
    if case.options.get("offload") == ON_DRIVE:
        case = replace(case, options={**case.options, "offload": {"state": f"nvme:{drive}"}})
    used = small(case) if place.is_small else case
    found = {**planned, **measured(name, used, place), "tokens": case.tokens, "device": place.device}
    print(figures_line(name, found))
    speed = case.tokens / found["seconds"]
    print(f"== {speed:,.0f} tokens/s, loss {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu", "emulated"], default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model, to try the command")
    given = parser.parse_args()
    sys.path.insert(0, str(given.build / "python"))
    given.work.mkdir(parents=True, exist_ok=True)
    device = given.device
    if device == "emulated":
        import torch

        from python import emulated_gpu

        torch.set_num_threads(1)
        emulated_gpu.install(given.build / "python")
        device = "cpu" if CASES[given.case].system == "fsdp2" else device
    state_memory(read_figures(given.work))
    train(given.case, Place(device, given.work, given.small))


if __name__ == "__main__":
    main()
