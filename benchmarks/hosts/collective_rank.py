"""Time collectives on one rank of an imitated host: collective_rank.py LIBRARY MEBIBYTES ROUNDS. Print seconds and bytes."""

import json
import os
import sys
import time
from collections.abc import Callable

import network
import torch
import torch.distributed as dist
from ours import Communicator, Library


def subjects(mebibytes: int, ours: Communicator) -> dict[str, Callable]:
    """Return the calls to time, on bf16 arrays of so many MiB in all."""
    size = dist.get_world_size()
    share = mebibytes * (1 << 20) // 2 // size
    full, part = torch.randn(share * size).bfloat16(), torch.randn(share).bfloat16()
    into = torch.zeros(share)
    return {
        "all_gather": lambda: ours.all_gather(part, full),
        "all_gather, torch gloo": lambda: dist.all_gather_single(full, part),
        "reduce_scatter": lambda: ours.reduce_scatter(full, into),
        "reduce_scatter, torch gloo": lambda: dist.reduce_scatter_single(part, full),
    }


def timed(call: Callable) -> tuple[float, int]:
    dist.barrier()
    sent, start = network.sent_bytes(), time.perf_counter()
    call()
    dist.barrier()  # all have received what was sent
    return time.perf_counter() - start, network.sent_bytes() - sent


def main() -> None:
    library, mebibytes, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = Communicator(Library(library), "fastest")
    calls = subjects(mebibytes, ours)
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            taken[name].append(timed(call))
    print(json.dumps({name: samples[1:] for name, samples in taken.items()}), flush=True)  # the first warms up
    ours.close()
    os._exit(0)  # torch's groups sometimes hang at exit


if __name__ == "__main__":
    main()
