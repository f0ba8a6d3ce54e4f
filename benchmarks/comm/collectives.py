"""Compare all_gather and reduce_scatter with a copy of the same number of bytes, and with torch's Gloo process group.

The same processes run each in turn: Ballast, a memcpy in every process at once, torch. The size is that of the full array,
which an all_gather writes and a reduce_scatter reads on each rank. "In place" means that it is in memory that the ranks share.
The time is that of the slowest rank.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import suite
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from ours import IN_PLACE, Communicator, copy

MIB = 1 << 20
BYTES_A_SAMPLE = 64 * MIB  # small collectives run several times in a sample


class Case(NamedTuple):
    collective: str
    dtype: torch.dtype
    mebibytes: int
    ranks: int
    path: str

    @property
    def name(self) -> str:
        dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        path = "" if self.path == "shared memory" else f", {self.path}"
        return f"{self.collective} {dtype}, {self.mebibytes} MiB, {self.ranks} ranks{path}"


CASES = [
    Case(collective, dtype, mebibytes, ranks, "shared memory")
    for ranks in (2, 4)
    for collective in ("all_gather", "reduce_scatter")
    for dtype in (torch.bfloat16, torch.float32)
    for mebibytes in (1, 4, 16, 64, 256)
] + [
    Case(collective, torch.bfloat16, 64, ranks, path)
    for path in (IN_PLACE, "gloo")
    for ranks in (2, 4)
    for collective in ("all_gather", "reduce_scatter")
]


def subjects(case: Case, ours: Communicator) -> dict[str, Callable]:
    """Return the functions to time, all on the same memory, after a check that both sides compute the same up to rounding."""
    elements = case.mebibytes * MIB // case.dtype.itemsize // case.ranks * case.ranks
    full, copied = torch.randn(elements).to(case.dtype), torch.empty(elements, dtype=case.dtype)
    part = torch.randn(elements // case.ranks).to(case.dtype)
    into = torch.zeros(elements // case.ranks)
    if case.path == IN_PLACE:
        full = ours.shared(full)
    if case.collective == "all_gather":
        run_ours = lambda: ours.all_gather(part, full)
        run_theirs = lambda: dist.all_gather_single(full, part)
    else:
        run_ours = lambda: ours.reduce_scatter(full, into)
        run_theirs = lambda: dist.reduce_scatter_single(part, full)
    check(case, run_ours, run_theirs, full, part, into)
    return {"ballast": run_ours, "memcpy": lambda: copy(copied, full), "torch gloo": run_theirs}


def check(case: Case, run_ours: Callable, run_theirs: Callable, full, part, into) -> None:
    run_ours()
    if case.collective == "all_gather":
        mine = full.clone()
        run_theirs()
        torch.testing.assert_close(mine, full, rtol=0, atol=0)
    else:
        run_theirs()
        torch.testing.assert_close(into.to(case.dtype), part, rtol=2**-5, atol=2**-5)


def seconds_of(run: Callable, repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item() / repeats


def measure(case: Case, ours: Communicator, rounds: int) -> list[dict]:
    repeats = max(1, BYTES_A_SAMPLE // (case.mebibytes * MIB))
    runs = subjects(case, ours)
    seconds = suite.in_turn(runs, lambda name: seconds_of(runs[name], repeats), rounds, warm_up=1)
    return [record(case, seconds["ballast"], name, seconds[name]) for name in ("memcpy", "torch gloo")]


def record(case: Case, ours: list[float], against: str, theirs: list[float]) -> dict:
    gigabytes = case.mebibytes * MIB / 1e9
    fields = suite.comparison(ours, theirs, lambda seconds: gigabytes / seconds)
    return {"suite": "comm", "case": case.name, "unit": "GB/s", "against": against, **fields}


def run_rank(rank: int, ranks: int, cases: list[Case], options: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for path in dict.fromkeys(case.path for case in cases):
        ours = Communicator(path)
        for case in cases:
            if case.path != path:
                continue
            rows = measure(case, ours, options.rounds)
            suite.emit(rows if rank == 0 else ())
        ours.close()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="comm", description=__doc__.split("\n")[0])
    parser.add_argument("--port", type=int, default=29400, help="the rendezvous of torch's ranks; Ballast uses the next one")
    parser.add_argument("--rounds", type=int, default=9)
    return suite.choose(parser, CASES, lambda case: case.name)


def main() -> None:
    options = arguments()
    for ranks in dict.fromkeys(case.ranks for case in options.cases):
        cases = [case for case in options.cases if case.ranks == ranks]
        multiprocessing.spawn(run_rank, (ranks, cases, options), nprocs=ranks)


if __name__ == "__main__":
    sys.exit(main())
