"""Time collectives on one rank of an imitated host: collective_rank.py MEBIBYTES ROUNDS. Print seconds and bytes."""

import json
import os
import sys
import time
from collections.abc import Callable

import ballast_bench
import network
import suite
import torch
import torch.distributed as dist
from collectives import PATHS, Case, subjects


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
    ours = ballast_bench.Rank(PATHS["fastest"])
    calls = {}
    for collective in ("all_gather", "reduce_scatter"):
        case = Case(collective, torch.bfloat16, mebibytes, dist.get_world_size(), "fastest")
        runs = subjects(case, ours)
        calls |= {collective: runs["ballast"], f"{collective}, torch gloo": runs["torch gloo"]}
    print(json.dumps(suite.in_turn(calls, lambda name: timed(calls[name]), rounds, warm_up=1)), flush=True)
    os._exit(0)  # torch's groups sometimes hang at exit


if __name__ == "__main__":
    main()
