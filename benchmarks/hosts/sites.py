"""The hosts that the suite imitates."""

from typing import NamedTuple

from network import Link


class Site(NamedTuple):
    """The hosts of a job, each with the same number of ranks and the same link."""

    hosts: int
    ranks: int  # of a host
    link: Link

    @property
    def name(self) -> str:
        return f"{self.hosts} x {self.ranks}, {self.link.name}"


SITES = [
    *(Site(hosts, ranks, Link(gigabits)) for hosts, ranks in ((2, 1), (2, 2), (4, 1)) for gigabits in (0.1, 1, 10)),
    Site(2, 1, Link(1, delay_ms=5)),
]
