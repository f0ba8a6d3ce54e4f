"""Compare AdamW with its peers in one process, on the same number of elements with the same threads.

Write one line of JSON for each case, as every suite does. The value is seconds for 1e9 elements; the ratio is how many
times faster Ballast is. Ballast's AdamW works on torch tensors, through the extension of harness/python_interface.cpp.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import ballast_bench
import suite
import torch

FORMATS = {"fp32": 0, "split": 1, "bf16": 2, "compact": 3, "4bit": 4}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MASTER = {"fp32": torch.float32, "split": torch.int16, "bf16": torch.int16, "compact": torch.int8, "4bit": torch.int8}
MOMENTS = {"fp32": torch.float32, "split": torch.float32, "bf16": torch.bfloat16, "compact": torch.int8, "4bit": torch.int8}
WITH_SCALES = ("compact", "4bit")


class Ballast:
    """One step of AdamW over a parameter and its gradient."""

    def __init__(self, optimizer: ballast_bench.AdamW, format: str, parameter: torch.Tensor, gradient: torch.Tensor):
        count = parameter.numel()
        groups = -(-count // ballast_bench.group_size)
        self.parameter = parameter
        self._optimizer = optimizer
        self._steps = itertools.count(1)
        moments = -(-count // 2) if format == "4bit" else count
        state = {"momentum": torch.zeros(moments, dtype=MOMENTS[format])}
        state["variance"] = torch.zeros(moments, dtype=MOMENTS[format])
        if parameter.dtype != torch.float32:  # an fp32 parameter is its own master
            master = parameter.float() if format == "fp32" else torch.zeros(count, dtype=MASTER[format])
            state["master"] = master
        if format in WITH_SCALES:
            state["momentum_scales"] = torch.zeros(groups)
            state["variance_scales"] = torch.zeros(groups)
        self._tensors = {"parameter": parameter, "gradient": gradient, **state}  # kept alive while the tile points there
        self._tile = {
            "format": FORMATS[format],
            "parameter_dtype": DTYPES[parameter.dtype],
            "gradient_dtype": DTYPES[gradient.dtype],
            "count": count,
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
        }

    def step(self) -> None:
        self._optimizer.step(next(self._steps), self._tile)


class Peer:
    """An optimizer of torch or DeepSpeed."""

    def __init__(self, optimizer: Callable, parameter: torch.Tensor, gradient: torch.Tensor):
        self.parameter = torch.nn.Parameter(parameter)
        self.parameter.grad = gradient
        self._optimizer = optimizer([self.parameter])

    def step(self) -> None:
        self._optimizer.step()


def fused_adamw(parameter: torch.Tensor, gradient: torch.Tensor) -> Peer:
    """Return torch's AdamW that makes one pass over memory."""
    return Peer(lambda parameters: torch.optim.AdamW(parameters, fused=True), parameter, gradient)


def deepspeed_adam(parameter: torch.Tensor, gradient: torch.Tensor) -> Peer:
    """Return DeepSpeed's Adam with torch's default options. Its operator is compiled when the first one is made."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return Peer(lambda parameters: DeepSpeedCPUAdam(parameters, weight_decay=0.01, adamw_mode=True), parameter, gradient)


class WithCasts:
    """bf16 training around an fp32 optimizer: the gradient is widened and the parameter narrowed, both into buffers that
    exist already."""

    def __init__(self, optimizer: Callable, parameter: torch.Tensor, gradient: torch.Tensor):
        self.parameter = parameter
        self._gradient = gradient
        self._fp32_gradient = gradient.float()
        self._optimizer = optimizer(parameter.float(), self._fp32_gradient)

    def step(self) -> None:
        self._fp32_gradient.copy_(self._gradient)
        self._optimizer.step()
        self.parameter.copy_(self._optimizer.parameter.detach())


class Case(NamedTuple):
    name: str
    format: str
    dtype: torch.dtype  # the dtype of parameters and gradients
    against: str
    peer: Callable  # its arguments are a parameter and a gradient
    same_values: bool = True  # the peer computes what we compute, to rounding


BF16, FP32 = torch.bfloat16, torch.float32


def with_casts(optimizer: Callable) -> Callable:
    return lambda parameter, gradient: WithCasts(optimizer, parameter, gradient)


# The table: a new comparison is a line here.
CASES = [
    Case("adamw fp32, all in fp32", "fp32", FP32, "torch fused", fused_adamw),
    Case("adamw fp32, bf16 in and out", "fp32", BF16, "torch fused + casts", with_casts(fused_adamw)),
    Case("adamw split, bf16 in and out", "split", BF16, "torch fused + casts", with_casts(fused_adamw)),
    Case("adamw bf16, bf16 in and out", "bf16", BF16, "torch fused + casts", with_casts(fused_adamw), False),
    Case("adamw compact, bf16 in and out", "compact", BF16, "torch fused + casts", with_casts(fused_adamw), False),
    Case("adamw fp32, all in fp32", "fp32", FP32, "DeepSpeed", deepspeed_adam),
    Case("adamw fp32, bf16 in and out", "fp32", BF16, "DeepSpeed + casts", with_casts(deepspeed_adam)),
    Case("adamw split, bf16 in and out", "split", BF16, "DeepSpeed + casts", with_casts(deepspeed_adam)),
    Case("adamw split, bf16 in and out", "split", BF16, "DeepSpeed bf16, no master", deepspeed_adam, False),
]


def make(case: Case, optimizer: ballast_bench.AdamW, elements: int) -> tuple:
    """Return the two sides, each with its own parameters and gradients of equal value."""
    torch.manual_seed(0)
    parameter = torch.randn(elements, dtype=case.dtype)
    gradient = torch.randn(elements, dtype=case.dtype)
    peer = case.peer(parameter.clone(), gradient.clone())
    return Ballast(optimizer, case.format, parameter, gradient), peer


def check(case: Case, optimizer: ballast_bench.AdamW) -> None:
    """Check that both sides compute the same: otherwise their speeds cannot be compared."""
    ours, theirs = make(case, optimizer, 1003)
    for _ in range(3):
        ours.step()
        theirs.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if case.dtype == FP32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(ours.parameter, theirs.parameter.detach(), **tolerance)


def seconds_of(step: Callable) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(case: Case, optimizer: ballast_bench.AdamW, options: argparse.Namespace) -> dict:
    sides = make(case, optimizer, options.elements)
    seconds = suite.in_turn(sides, lambda side: seconds_of(side.step), options.rounds, options.warm_up)
    billions = options.elements / 1e9
    fields = suite.comparison(*seconds.values(), lambda seconds: seconds / billions)
    return {"suite": "peers", "case": case.name, "unit": "s/1e9", "against": case.against, **fields}


def line(case: Case) -> str:
    return f"{case.name}, vs. {case.against}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="peers", description=__doc__.split("\n")[0])
    parser.add_argument("--elements", type=int, default=64_000_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2)
    return suite.choose(parser, CASES, line)


def main() -> None:
    options = arguments()
    records = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed and the compiler it starts write to stdout
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read by DeepSpeed's operator when it is loaded
    optimizer = ballast_bench.AdamW(options.threads)
    for case in options.cases:
        try:
            case.peer(torch.zeros(1, dtype=case.dtype), torch.zeros(1, dtype=case.dtype))
        except Exception as reason:  # whatever a peer's installation can fail with
            print(f"peers: skipped {case.name} vs. {case.against}: {reason}", file=sys.stderr)
            continue
        if case.same_values:
            check(case, optimizer)
        print(json.dumps(measure(case, optimizer, options)), file=records, flush=True)


if __name__ == "__main__":
    main()
