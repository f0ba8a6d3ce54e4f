"""Time collectives on one rank of an imitated host: collective_rank.py MEBIBYTES ROUNDS. Print seconds and bytes."""

import json
import os
import sys
import time
from collections.abc import Callable

import network
import torch
import torch.distributed as dist
from collectives import Case, subjects
from ours import Communicator


def timed(call: Callable) -> tuple[float, int]:
    dist.barrier()
    sent, start = network.sent_bytes(), time.perf_counter()
    call()
    dist.barrier()  # all have received what was sent
    return time.perf_counter() - start, network.sent_bytes() - sent


def main() -> None:
    mebibytes, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = Communicator("fastest")
    calls = {}
    for collective in ("all_gather", "reduce_scatter"):
        case = Case(collective, torch.bfloat16, mebibytes, dist.get_world_size(), "fastest")
        runs = subjects(case, ours)
        calls |= {collective: runs["ballast"], f"{collective}, torch gloo": runs["torch gloo"]}
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            taken[name].append(timed(call))
    print(json.dumps({name: samples[1:] for name, samples in taken.items()}), flush=True)  # the first warms up
    ours.close()
    os._exit(0)  # torch's groups sometimes hang at exit


if __name__ == "__main__":
    main()
