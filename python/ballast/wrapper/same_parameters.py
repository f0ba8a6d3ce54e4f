"""Refuse ranks that list other parameters, or the same ones in another order: each would train a mixture of models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

import torch

from ballast.checks import refuse
from ballast.connecting import Group
from ballast.wrapper.collectives import from_all_ranks, words_of_all_ranks
from ballast.wrapper.deferred_init import is_on_meta
from ballast.wrapper.managed_parameter import is_without_values
from ballast.wrapper.unwrap import named_buffers, named_parameters


def require_same_parameters(group: Group, mine: Sequence[str]) -> None:
    """Compare parameters in words, in the order in which ranks exchange them. All ranks call it together, and raise the same
    error if one has others. They exchange the words themselves only then."""
    if group.size == 1:
        return
    digest = hashlib.blake2b("\n".join(mine).encode(), digest_size=7).digest()
    [digests] = words_of_all_ranks(group, [int.from_bytes(digest, "little")])
    if len({*digests}) == 1:
        return
    first, *others = from_all_ranks(group, mine)
    for rank, theirs in enumerate(others, start=1):
        for here, there in zip_longest(first, theirs, fillvalue="nothing"):
            if here != there:
                refuse(
                    f"cannot train: rank {rank} has other parameters than rank 0, or another order of them",
                    where=f"{there} on rank {rank}, and {here} on rank 0",
                    needed="the same parameters and parameter groups in the same order on all ranks",
                    remedy="Make lists of parameters from model.parameters(), or sort them by name. A set of parameters has "
                    "another order in each process.",
                )


def in_words(parameters: Iterable[tuple[int, torch.Tensor]], names: Mapping[int, str]) -> Iterator[str]:
    """Describe parameters of an optimizer, each after the number of its group."""
    for number, each in parameters:
        yield f"{names[id(each)]}, {_kind_of(each)}, in parameter group {number}"


def in_words_of_model(model: torch.nn.Module) -> Iterator[str]:
    """Describe the parameters and buffers of a model."""
    for name, each in (*named_parameters(model), *named_buffers(model)):
        yield f"{name}, {_kind_of(each)}"


def _kind_of(tensor: torch.Tensor) -> str:
    values = ", without values" if is_on_meta(tensor) or is_without_values(tensor) else ""
    return f"{tensor.dtype} of shape {list(tensor.shape)}{values}"
