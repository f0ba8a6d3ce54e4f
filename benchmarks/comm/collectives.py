"""Compare all_gather and reduce_scatter with a copy of the same number of bytes, and with torch's Gloo process group."""

import ctypes
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import ballast_bench
import suite
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from ballast.tools.bench.cases import free_port

MIB = 1 << 20
BYTES_A_SAMPLE = 64 * MIB  # small collectives run several times in a sample
IN_PLACE = "in place"  # the whole array is in memory that the ranks share
PATHS = {"fastest": 0, "shared memory": 1, IN_PLACE: 1, "gloo": 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def shared_copy(tensor: torch.Tensor, ours: ballast_bench.Rank) -> torch.Tensor:
    """Return a copy in memory that all ranks read in place. It lasts until the next call."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(ours.shared_memory(tensor.nbytes))
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).copy_(tensor)


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


def subjects(case: Case, ours: ballast_bench.Rank) -> dict[str, Callable]:
    """Return the functions to time, all on the same memory, after a check that both sides compute the same up to rounding."""
    elements = case.mebibytes * MIB // case.dtype.itemsize // case.ranks * case.ranks
    full, copied = torch.randn(elements).to(case.dtype), torch.empty(elements, dtype=case.dtype)
    part = torch.randn(elements // case.ranks).to(case.dtype)
    into = torch.zeros(elements // case.ranks)
    if case.path == IN_PLACE:
        full = shared_copy(full, ours)
    shape = part.numel(), DTYPES[case.dtype]
    if case.collective == "all_gather":
        run_ours = lambda: ours.all_gather(part.data_ptr(), full.data_ptr(), *shape)
        run_theirs = lambda: dist.all_gather_single(full, part)
        received, tolerance = full, 0.0
    else:
        run_ours = lambda: ours.reduce_scatter(full.data_ptr(), into.data_ptr(), *shape)
        run_theirs = lambda: dist.reduce_scatter_single(part, full)
        received, tolerance = into, 2.0**-5
    run_ours()
    by_ours = received.to(case.dtype, copy=True)
    run_theirs()
    torch.testing.assert_close(by_ours, full if received is full else part, rtol=tolerance, atol=tolerance)
    memcpy = lambda: ballast_bench.copy(copied.data_ptr(), full.data_ptr(), full.nbytes)
    return {"ballast": run_ours, "memcpy": memcpy, "torch gloo": run_theirs}


def seconds_of(run: Callable, repeats: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    slowest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item() / repeats


def measure(case: Case, ours: ballast_bench.Rank, rounds: int) -> list[dict]:
    repeats = max(1, BYTES_A_SAMPLE // (case.mebibytes * MIB))
    runs = subjects(case, ours)
    seconds = suite.in_turn(runs, lambda name: seconds_of(runs[name], repeats), rounds, warm_up=1)
    rate = lambda seconds: case.mebibytes * MIB / 1e9 / seconds
    return [
        suite.versus(case.name, against, "GB/s", seconds["ballast"], seconds[against], value_of=rate)
        for against in ("memcpy", "torch gloo")
    ]


def run_rank(rank: int, ranks: int, port: int, cases: list[Case], rounds: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for path in dict.fromkeys(case.path for case in cases):
        ours = ballast_bench.Rank(PATHS[path])
        for case in cases:
            if case.path != path:
                continue
            rows = measure(case, ours, rounds)
            suite.emit("comm", rows if rank == 0 else ())
        del ours  # all ranks leave together
    dist.destroy_process_group()


def main() -> None:
    options = suite.choose(suite.parser_of("comm", __doc__, rounds=9), CASES, lambda case: case.name)
    for ranks in dict.fromkeys(case.ranks for case in options.cases):
        cases = [case for case in options.cases if case.ranks == ranks]
        multiprocessing.spawn(run_rank, (ranks, free_port(), cases, options.rounds), nprocs=ranks)


if __name__ == "__main__":
    main()
