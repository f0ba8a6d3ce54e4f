"""The numbers of an optimizer's own step: the part of its state that is the same for all elements of a parameter."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ballast.checks import refuse
from ballast.wrapper.kept_state import IN_LIBRARY

Numbers = dict[str, Any]  # by the name in the optimizer's state; IN_LIBRARY for values of each element
MOST_BYTES = 65_000  # of a commit of a run
PLAIN = (bool, int, float, str, type(None))


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def encoded(numbers: Sequence[Numbers]) -> bytes:
    """Return the numbers of all parameters for a commit of a run. Neighbours with the same numbers take no more bytes than
    one of them: most optimizers count the same steps for all."""
    texts = [json.dumps({name: _to_json(name, value) for name, value in each.items()}) for each in numbers]
    note = json.dumps([[len([*same]), text] for text, same in groupby(texts)]).encode()
    if len(note) > MOST_BYTES:
        refuse(
            "cannot keep the optimizer in a run: its numbers differ from parameter to parameter, and need room",
            needed=f"{len(note):,} bytes",
            available=f"{MOST_BYTES:,} bytes",
            remedy="Leave out run=, and call ballast.save().",
        )
    return note


def decoded(note: bytes) -> Iterator[Numbers]:
    """Yield the numbers of each parameter.

    >>> [*decoded(encoded([{"step": 3}, {"step": 3}, {}]))]
    [{'step': 3}, {'step': 3}, {}]
    """
    for count, text in json.loads(note):
        for _ in range(count):
            yield {name: _from_json(value) for name, value in json.loads(text).items()}


def _to_json(name: str, value: Any) -> Any:
    if value is IN_LIBRARY:
        return {}
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    if type(value) not in PLAIN:
        refuse(
            f"cannot keep the optimizer in a run: its state {name} is a {type(value).__name__}",
            needed="tensors, numbers, text and None",
        )
    return value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]), device="cpu") if value else IN_LIBRARY
