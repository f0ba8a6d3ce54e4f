"""The collectives of Ballast and of torch's Gloo between imitated hosts, relative to the rate of their links.

collectives_between.py ROUNDS times them on one rank of an imitated host, and prints seconds and bytes."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import suite
from network import SITES, Network, Site, megabytes, run_ranks, sent_bytes

COLLECTIVES = ("all_gather", "reduce_scatter")
MEBIBYTES = 32
TORCH = "torch gloo"


class Case(NamedTuple):
    site: Site
    collective: str

    @property
    def name(self) -> str:
        return f"{self.site.name}: {self.collective} of {MEBIBYTES} MiB"

    @property
    def needed_bytes(self) -> float:
        """The bytes that a host's link must send, at least: a shard crosses once, and so does the sum of a host's ranks."""
        return MEBIBYTES * 2**20 * (self.site.hosts - 1) / self.site.hosts


CASES = [Case(site, collective) for site in SITES for collective in COLLECTIVES]


def records(case: Case, ranks: list[dict]) -> list[dict]:
    """Return the lines of a case: the rate of the needed bytes vs. the link's and vs. torch's, and the bytes sent."""
    most = lambda name, field: [max(sample) for sample in zip(*([taken[field] for taken in rank[name]] for rank in ranks))]
    ours, theirs, sent = most(case.collective, 0), most(f"{case.collective}, {TORCH}", 0), most(case.collective, 1)
    needed, link = case.needed_bytes, case.site.link.bytes_per_second
    rate = lambda seconds: needed / seconds / 1e6
    return [
        suite.versus(case.name, "link", "MB/s", ours, [needed / link] * len(ours), value_of=rate),
        suite.versus(case.name, TORCH, "MB/s", ours, theirs, value_of=rate),
        suite.versus(f"{case.name}, sent", "needed", "MB", sent, [needed] * len(sent), value_of=megabytes),
    ]


def compare(cases: list[Case], rounds: int) -> None:
    for site in dict.fromkeys(case.site for case in cases):
        with tempfile.TemporaryDirectory(prefix="ballast-hosts-") as folder, Network(site.hosts, site.link) as network:
            ranks = run_ranks(site, network, [__file__, str(rounds)], Path(folder))
        for case in (case for case in cases if case.site == site):
            suite.emit("hosts", records(case, ranks))


def main() -> None:
    import ballast_bench
    import collectives  # needs torch, which --list does without
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ours = ballast_bench.Rank(collectives.PATHS["fastest"])
    calls = {}
    for collective in COLLECTIVES:
        case = collectives.Case(collective, torch.bfloat16, MEBIBYTES, dist.get_world_size(), "fastest")
        runs = collectives.subjects(case, ours)
        calls |= {collective: runs["ballast"], f"{collective}, {TORCH}": runs[TORCH]}

    def timed(call: Callable) -> tuple[float, int]:
        dist.barrier()
        sent, start = sent_bytes(), time.perf_counter()
        call()
        dist.barrier()  # all have received what was sent
        return time.perf_counter() - start, sent_bytes() - sent

    taken = suite.in_turn(calls, lambda name: timed(calls[name]), int(sys.argv[1]), warm_up=1)
    print(json.dumps(taken), flush=True)
    os._exit(0)  # torch's groups sometimes hang at exit


if __name__ == "__main__":
    main()
