"""Compare AdamW with its peers in one process, on the same number of elements with the same threads."""

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


class Ballast:
    """One step of AdamW over a parameter and its gradient."""

    def __init__(self, format: str, parameter: torch.Tensor, gradient: torch.Tensor):
        self.parameter = parameter
        kind = FORMATS[format], DTYPES[parameter.dtype]
        self._optimizer = ballast_bench.AdamW(torch.get_num_threads(), *kind, parameter.numel())
        state = torch.zeros(self._optimizer.state_bytes(), dtype=torch.uint8)
        self._tensors = (parameter, gradient, state)

    def step(self) -> None:
        self._optimizer.step(*(tensor.data_ptr() for tensor in self._tensors))


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


def make(case: Case, elements: int) -> tuple:
    """Return the two sides, each with its own parameters and gradients of equal value."""
    torch.manual_seed(0)
    parameter = torch.randn(elements, dtype=case.dtype)
    gradient = torch.randn(elements, dtype=case.dtype)
    peer = case.peer(parameter.clone(), gradient.clone())
    return Ballast(case.format, parameter, gradient), peer


def check(case: Case) -> None:
    """Check that both sides compute the same: otherwise their speeds cannot be compared."""
    ours, theirs = make(case, 1003)
    for _ in range(3):
        ours.step()
        theirs.step()
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if case.dtype == FP32 else {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(ours.parameter, theirs.parameter.detach(), **tolerance)


def seconds_of(step: Callable) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(case: Case, elements: int, rounds: int) -> dict:
    seconds = suite.in_turn(make(case, elements), lambda side: seconds_of(side.step), rounds, warm_up=2)
    in_unit = lambda seconds: seconds / (elements / 1e9)
    return suite.versus(case.name, case.against, "s/1e9", *seconds.values(), value_of=in_unit)


def main() -> None:
    parser = suite.parser_of("peers", __doc__, rounds=15)
    parser.add_argument("--elements", type=int, default=64_000_000)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = suite.choose(parser, CASES, lambda case: f"{case.name}, vs. {case.against}")
    output = suite.own_output()
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read by DeepSpeed's operator when it is loaded
    for case in options.cases:
        try:
            case.peer(torch.zeros(1, dtype=case.dtype), torch.zeros(1, dtype=case.dtype))
        except Exception as reason:  # whatever a peer's installation can fail with
            print(f"peers: skipped {case.name} vs. {case.against}: {reason}", file=sys.stderr)
            continue
        if case.same_values:
            check(case)
        suite.emit("peers", [measure(case, options.elements, options.rounds)], output)


if __name__ == "__main__":
    main()
