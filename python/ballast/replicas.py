"""Copies of the parameters in stage 3, each shared by some neighbouring ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ballast.checks import refuse, refuse_value

Replicas = Literal["host"] | int

OF_HOSTS: Literal["host"] = "host"


def read_replicas(given: object) -> Replicas:
    """Return the number of copies, also from text, or "host" for one in each host. None is one copy.

    >>> read_replicas(None), read_replicas("host"), read_replicas("4")
    (1, 'host', 4)
    """
    copies: Replicas
    if given is None:
        copies = 1
    elif given == OF_HOSTS:
        copies = OF_HOSTS
    elif str(given).isdecimal() and not isinstance(given, bool) and int(str(given)) > 0:  # text on a command line
        copies = int(str(given))
    else:
        refuse_value("replicas", given, '"host", or a number of copies of the parameters; or None')
    return copies


def copies_on(machines: Sequence[Any], replicas: Replicas) -> int:
    """Return the number of copies for ranks on these machines, which are named by rank.

    >>> copies_on(["a", "a", "b", "b"], "host")
    2
    >>> copies_on(["a", "a"], "host"), copies_on(["a"] * 6, 3)
    (1, 3)
    """
    if replicas == OF_HOSTS:
        return _hosts(machines)
    if len(machines) % replicas != 0 or (replicas > 1 and replicas == len(machines)):
        refuse(
            f"cannot keep {replicas} copies of the parameters on {len(machines)} ranks",
            needed="several ranks for each copy, as many for all",
        )
    return replicas


def _hosts(machines: Sequence[Any]) -> int:
    hosts = list(dict.fromkeys(machines))
    ranks = len(machines) // len(hosts)
    if list(machines) != [host for host in hosts for _ in range(ranks)]:
        refuse(
            'cannot keep a copy of the parameters in each host (replicas="host"): the hosts have different numbers of ranks, '
            "or ranks that are no neighbours",
            where=", ".join(f"host {number}: {list(machines).count(host)} ranks" for number, host in enumerate(hosts)),
            needed="as many ranks on each host, numbered host by host",
        )
    if ranks == 1 and len(hosts) > 1:
        refuse(
            'cannot share a copy of the parameters in each host (replicas="host"): each host has one rank',
            needed="several ranks on each host",
            remedy="Use stage=2, in which each rank keeps all parameters.",
        )
    return len(hosts)
