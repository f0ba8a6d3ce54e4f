"""The options of an outer optimizer."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from ballast.checks import all_known, is_number, one_of, read_count, refuse, refuse_value, require_directory, texts_by_name
from ballast.formats import FORMATS, WireFormat
from ballast.schema import options_text
from ballast.tiers import TIERS, directory_of, tier_of

WHERE = "outer=DiLoCo(...)"


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Let each host train on its own, and combine the hosts' parameters every N steps: `wrap(outer=DiLoCo(...))`.

    >>> import ballast
    >>> ballast.DiLoCo(every=64).lr
    0.7

    The outer optimizer keeps a copy of the parameters. In an exchange, the differences between that copy and each host's
    parameters are averaged over the hosts. SGD with Nesterov momentum takes the average as a gradient, and updates the copy.
    All hosts continue from the copy, with the same bits.

    every               steps of each host from one exchange of a parameter to the next
    lr                  learning rate of the outer optimizer; 1 without momentum averages the hosts' parameters
    momentum            momentum of the outer optimizer; 0 keeps none
    nesterov            uses Nesterov's momentum
    fragments           splits the parameters into this many parts, which are exchanged at different steps: each exchange moves
                        about that fraction of them
    wire                format in which hosts send differences and averages: "exact" (fp32), "int8" or "int4", whose values
                        share a scale in groups of 128 and are rounded stochastically. All hosts get the same bits
    offload             tier of the copy and of the momentum, fp32 both: "host", "nvme:/scratch", or "device"
    hosts               number of hosts, each with as many consecutive ranks. None: the machines of the ranks
    survive_lost_hosts  lets the other hosts continue when one is lost
    timeout             seconds in which all hosts reach an exchange after the first one, so longer than hosts differ in `every`
                        steps
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    fragments: int = 1
    wire: WireFormat = "exact"
    offload: str = "host"
    hosts: int | None = None
    survive_lost_hosts: bool = False
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        self._read_count("every", "steps between two exchanges, at least 1")
        self._read_count("fragments", "a number of fragments, at least 1")
        if self.fragments > self.every:
            refuse(
                f"cannot exchange {self.fragments} fragments within {self.every} steps: each is exchanged at a step of its own",
                where=WHERE,
                needed="at most as many fragments as steps between two exchanges",
            )
        if self.hosts is not None:
            self._read_count("hosts", "a number of hosts, at least 1; or None for the machines of the ranks")
        if not (is_number(self.lr) and 0 < self.lr < math.inf):
            refuse_value("lr", self.lr, "a number above 0", where=WHERE)
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            refuse_value("momentum", self.momentum, "a number from 0 on, below 1", where=WHERE)
        if not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            refuse_value("timeout", self.timeout, "seconds, more than 0", where=WHERE)
        one_of("wire format", self.wire, FORMATS)
        self._check_tier()

    def _read_count(self, name: str, needed: str) -> None:
        count = read_count(name, getattr(self, name), needed=needed, where=WHERE)
        object.__setattr__(self, name, count)  # the class is frozen

    def _check_tier(self) -> None:
        if not isinstance(self.offload, str):
            refuse_value("offload", self.offload, 'one tier: "device", "host" or "nvme:DIRECTORY"', where=WHERE)
        one_of("tier", self.tier, TIERS)
        if (self.tier == "nvme") != bool(self.directory):
            refuse_value("offload", self.offload, '"device", "host" or "nvme:DIRECTORY"', where=WHERE)
        if self.directory:
            require_directory(self.directory, where="outer=DiLoCo(offload=...)")

    @property
    def tier(self) -> str:
        return tier_of(self.offload)

    @property
    def directory(self) -> str:
        return directory_of(self.offload)

    def call(self) -> str:
        """Return the call that makes these options.

        >>> DiLoCo(every=64, wire="int8").call()
        'ballast.DiLoCo(every=64, wire="int8")'
        """
        given = [(each.name, value) for each in fields(self) if (value := getattr(self, each.name)) != each.default]
        return f"ballast.DiLoCo({options_text(given, as_flags=False)})"

    def shared(self) -> dict[str, str]:
        """Return the options that are the same on all ranks, by name. Each rank has its own directory on a drive."""
        names = ("every", "nesterov", "fragments", "wire", "tier", "hosts", "survive_lost_hosts")
        numbers = ("lr", "momentum", "timeout")  # 1 and 1.0 are the same
        named = {name: str(getattr(self, name)) for name in names}
        return named | {name: str(float(getattr(self, name))) for name in numbers}


def hosts_of(outer: DiLoCo | None, ranks: int, ranks_of_machine: int) -> int:
    """Return the number of hosts that train on their own, of ranks that share machines.

    >>> hosts_of(None, 16, 8), hosts_of(DiLoCo(every=64), 16, 8), hosts_of(DiLoCo(every=64, hosts=4), 16, 8)
    (1, 2, 4)
    """
    if outer is None:
        return 1
    hosts = -(-ranks // ranks_of_machine) if outer.hosts is None else outer.hosts
    if ranks % hosts != 0:
        refuse_division(ranks, hosts)
    return hosts


def refuse_division(ranks: int, hosts: int) -> NoReturn:
    refuse(
        f"cannot divide {ranks} ranks into {hosts} hosts",
        where="outer=DiLoCo(hosts=...)",
        needed="as many ranks on each host",
    )


def read_outer(outer: Any) -> DiLoCo | None:
    if outer is not None and not isinstance(outer, DiLoCo):
        refuse(f"cannot use outer={outer!r}", needed="ballast.DiLoCo(every=...), or None")
    return outer


def outer_from_text(text: str) -> DiLoCo:
    """Return the options that a command line has given.

    >>> outer_from_text("every=64,wire=int8").call()
    'ballast.DiLoCo(every=64, wire="int8")'
    """
    given = {name: _value_of(value) for name, value in texts_by_name("--outer", text).items()}
    all_known("option of DiLoCo", given, [option.name for option in fields(DiLoCo)])
    if "every" not in given:
        refuse(f"cannot use {text!r}: it has no every=", where="--outer", needed="steps between exchanges, such as every=64")
    return DiLoCo(**given)


def _value_of(text: str) -> Any:
    """Return a number or a truth value as such; other words are text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text
