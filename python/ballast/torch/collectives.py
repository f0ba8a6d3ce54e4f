"""Collective operations on values of Python and torch."""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import torch

from ballast import _core
from ballast.agreement import Agreement, failed_ranks
from ballast.checks import fail
from ballast.connecting import Group
from ballast.errors import Error

T = TypeVar("T")


def from_all_ranks(group: Group, value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. All ranks call it together."""
    return [pickle.loads(theirs) for theirs in group._core.from_all(pickle.dumps(value))]


def words_of_all_ranks(group: Group, mine: Sequence[int]) -> list[list[int]]:
    """Return each word of all ranks, by rank, in one exchange. All ranks call it together, with as many words."""
    sent = [word if rank == group.rank else 0 for word in mine for rank in range(group.size)]
    words = group.all_reduce(sent)
    return [words[first : first + group.size] for first in range(0, len(words), group.size)]


def numbers_of_all_ranks(group: Group, mine: Sequence[float]) -> list[list[float]]:
    """Return each number of all ranks, by rank, in one exchange. All ranks call it together, with as many numbers."""
    words = words_of_all_ranks(group, struct.unpack(f"{len(mine)}q", struct.pack(f"{len(mine)}d", *mine)))
    return [[*struct.unpack(f"{group.size}d", struct.pack(f"{group.size}q", *each))] for each in words]


def by_first_rank(group: Group, what: str, do: Callable[[], T]) -> T:
    """Call `do` on rank 0, and return its result on all ranks, or raise its error on all. All ranks call this together."""
    together = Agreement(group, what)
    mine: list[T] = []
    with together.attempt():
        if group.rank == 0:
            mine.append(do())
    answer = pickle.dumps((mine, together.error if isinstance(together.error, Error) else None))
    [length] = group.all_reduce([len(answer) if group.rank == 0 else 0])
    result: tuple[list[T], Error | None] = pickle.loads(_broadcast(group, answer, length, 0))
    if result[1] is None:
        together.settle()  # an error of another type is raised on rank 0, and other ranks name it
        return result[0][0]
    together.error = None
    try:
        raise result[1]
    finally:
        del result  # as in Agreement: the raised error keeps this frame alive


def _broadcast(group: Group, mine: bytes, length: int, root: int) -> bytearray:
    memory = bytearray(mine if group.rank == root else length)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    group._core.broadcast(address=address, bytes=length, root=root)
    return memory


def least_and_most(group: Group, mine: Collection[float]) -> list[float]:
    """Return the least and the greatest number of all ranks. Return one number if they are equal, none if no rank has
    one, and NaN if one is not finite. All ranks call it together."""
    words = [0] * (3 * group.size)  # of each rank: whether it has numbers, and the bits of its least and its greatest
    if mine:
        ends = (min(mine), max(mine)) if all(map(math.isfinite, mine)) else (math.nan, math.nan)
        words[group.rank :: group.size] = [1, *struct.unpack("qq", struct.pack("dd", *ends))]
    words = group.all_reduce(words)
    there = [words[rank :: group.size][1:] for rank in range(group.size) if words[rank]]
    numbers = {number for bits in there for number in struct.unpack("dd", struct.pack("qq", *bits))}
    if any(map(math.isnan, numbers)):
        return [math.nan]
    return sorted({min(numbers), max(numbers)}) if numbers else []


def sum_in_fp32(group: Group | None, mine: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks of the group, which call it together. Without a group, return the tensor itself."""
    if group is None:
        return mine
    total = torch.empty_like(mine)
    group._core.sum(mine.data_ptr(), into=total.data_ptr(), count=mine.numel())
    return total


def agree_on_memory(group: Group, what: str) -> Callable[[bool], None]:
    """Return a function that each rank calls after it has allocated the memory for an operation, or has failed to. If
    one rank has failed, the function raises on the others, so that no rank does the operation."""

    def agree(failed: bool) -> None:
        ranks = failed_ranks(group, failed)
        if ranks and not failed:
            problem = _core.Problem(
                what=f"cannot complete {what}: other ranks have no memory for it, so it is not done here either",
                where=f"rank {', '.join(map(str, ranks))}",
                remedy="Free memory there, and call it again on all ranks.",
            )
            fail("peer_failed", problem)

    return agree


def broadcast(group: Group, values: torch.Tensor, root: int) -> None:
    """Copy the values of one rank to all, in the host's memory."""
    if values.numel() > 0:
        group._core.broadcast(address=values.data_ptr(), bytes=values.nbytes, root=root)


def broadcast_initial_values(group: Group, parameters: Iterable[torch.Tensor]) -> None:
    """Copy the values of rank 0 to all ranks, which call this together."""
    if group.size == 1:
        return
    with torch.no_grad():
        for parameter in parameters:
            values = parameter.detach().to("cpu", copy=True).contiguous()
            broadcast(group, values, root=0)
            parameter.copy_(values)
