"""Compare the planner's forecast with a training step of a model on one GPU, with one or with seven billion parameters.

The case "plain" trains the smaller one in plain torch. It tells which part of the GPU's peak the model's own work reaches: the
other cases forecast with the planner's default, and with that efficiency. Plain torch takes 16 bytes a parameter with an fp32
master, 108 GB for the larger model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

WARM_UP, STEPS = 3, 10


@dataclass(frozen=True)
class Case:
    options: dict  # the options of ballast.wrap(); none: plain torch
    is_large: bool = False


BF16 = {"stage": 3, "gradient_format": "bf16"}
CASES = {
    "plain": Case({}),
    "stage-3": Case({"stage": 3}),
    "stage-3-host": Case({"stage": 3, "offload": {"state": "host"}}),
    "7b-compact": Case({**BF16, "state_format": "compact"}, is_large=True),
    "7b-host": Case({**BF16, "offload": {"state": "host"}}, is_large=True),
}


@dataclass(frozen=True)
class Setting:
    """The model, its batch, and where it trains."""

    config: dict
    sequences: int
    length: int
    device: str
    gpu: str  # the planner's name of the GPU

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclass(frozen=True)
class Measured:
    """Medians of the steps, and the first and the last loss."""

    step: float
    forward_and_backward: float
    most_bytes: int  # the most memory of the GPU, as torch counts it
    used_bytes: int  # memory of the GPU at the end, of all processes and with CUDA's own
    losses: tuple[float, float]


def setting(case: Case, small: bool, device: str) -> Setting:
    import torch
    from on_a_gpu.llama import CONFIG, LARGE, SMALL

    if device == "cpu":
        return Setting(SMALL, 2, 32, device, "h100")
    memory = torch.cuda.get_device_properties(0).total_memory
    gpu = "h200" if memory > 100 << 30 else "h100"
    if small:
        return Setting(SMALL, 2, 32, device, gpu)
    return Setting(LARGE, 2, 2048, device, gpu) if case.is_large else Setting(CONFIG, 4, 2048, device, gpu)


def measure(of: Setting, options: dict) -> Measured:
    """Train some steps on one batch."""
    import ballast
    import torch
    from on_a_gpu.llama import made

    model = made(of.config, of.device)
    on_gpu = of.device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if options:
        optimizer = ballast.wrap(optimizer, model, **options)
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    tokens = torch.randint(of.config["vocab_size"], (of.sequences, of.length + 1), device=of.device)
    times, losses = [], []
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        wait()
        began = time.perf_counter()
        loss = model(tokens)
        loss.backward()
        wait()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        wait()
        times.append((time.perf_counter() - began, middle - began))
        losses.append(loss.item())
    memory = memory_of_gpu() if on_gpu else (0, 0)
    if options:
        print(optimizer.memory())
        print(json.dumps(optimizer.metrics()))
        optimizer.close()
    steps, passes = zip(*times[WARM_UP:])
    return Measured(median(steps), median(passes), *memory, (losses[0], losses[-1]))


def memory_of_gpu() -> tuple[int, int]:
    import torch

    free, total = torch.cuda.mem_get_info()
    return torch.cuda.max_memory_allocated(), total - free


def efficiency(of: Setting, seconds: float) -> float:
    """Return the part of the GPU's peak that forward and backward pass reach, by the planner's own count of operations."""
    from ballast.models import describe
    from ballast.planning.hardware import GPUS

    counted = describe(of.config)
    return min(1.0, of.tokens * counted.flops_of_token(of.length) / seconds / GPUS[of.gpu].flops)


def forecast(of: Setting, options: dict, part_of_peak: float):
    import ballast

    return ballast.plan(
        of.config,
        gpu=of.gpu,
        tokens=of.tokens,
        sequence=of.length,
        activations="kept",
        host_memory="110GiB",
        efficiency=part_of_peak,
        **options,
    )


def in_words(measured: Measured) -> str:
    return f"torch's peak {measured.most_bytes / 2**30:.2f} GiB, in use by all {measured.used_bytes / 2**30:.2f} GiB"


def report(case: Case, of: Setting, work: Path) -> None:
    measured = measure(of, case.options)
    first, last = measured.losses
    rate = of.tokens / measured.step
    print(f"== measured: step {1e3 * measured.step:.1f} ms, {rate:,.0f} tokens/s, loss {first:.3f} to {last:.3f}")
    print(f"== forward and backward: {1e3 * measured.forward_and_backward:.1f} ms")
    reached = work / f"efficiency-{of.device}.json"
    if not case.options:
        part = efficiency(of, measured.forward_and_backward)
        reached.write_text(json.dumps(part))
        print(f"== memory of the GPU: {in_words(measured)}")
        print(f"== efficiency: {part:.3f} of the peak of {of.gpu} in forward and backward")
        return
    parts = [0.5, *([json.loads(reached.read_text())] if reached.exists() else [])]
    for part in parts:
        plan = forecast(of, case.options, part)
        compared = f"measured / forecast {measured.step / plan.seconds:.2f}"
        print(f"== forecast: step {1e3 * plan.seconds:.1f} ms at efficiency {part:.3f}; {compared}")
    print(plan.text())
    planned = f"planned {plan.bytes_in('device') / 2**30:.2f} GiB, reserve and activations included"
    print(f"== memory of the GPU: {in_words(measured)}; {planned}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the command with a small model")
    parser.add_argument("--small", action="store_true", help="a small model")
    given = parser.parse_args()
    sys.path.insert(0, str(given.build / "python"))
    given.work.mkdir(parents=True, exist_ok=True)
    case = CASES[given.case]
    report(case, setting(case, given.small, given.device), given.work)


if __name__ == "__main__":
    main()
