"""The collectives of Ballast and of torch's Gloo between imitated hosts, relative to the rate of their links."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import suite
from network import SITES, Network, Site, megabytes, run_ranks

RANK = Path(__file__).with_name("collective_rank.py")
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


CASES = [Case(site, collective) for site in SITES for collective in ("all_gather", "reduce_scatter")]


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
            program = [str(RANK), str(MEBIBYTES), str(rounds)]
            ranks = run_ranks(site, network, program, Path(folder))
        for case in (case for case in cases if case.site == site):
            suite.emit("hosts", records(case, ranks))
