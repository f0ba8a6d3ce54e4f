"""The note of an optimizer's own step in the commits of a run: the scalar state of each parameter, which its elements share."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ballast import _core
from ballast.checks import fail, refuse
from ballast.errors import Error
from ballast.json_reader import Json, fail_malformed, parse
from ballast.wrapper.moments import IN_LIBRARY

# State that is not per element, such as a count of steps, by its name in the optimizer's state. IN_LIBRARY stands for values of
# each element.
ScalarState = dict[str, Any]
NOTE = "the note of the optimizer in a run"
PLAIN = (bool, int, float, str, type(None))


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def encoded(kept: str, scalars: Sequence[ScalarState]) -> bytes:
    """Return the note. `kept` says what the library keeps. Equal scalars take little room: most optimizers count the same steps
    for all parameters."""
    texts = [json.dumps({name: _to_json(name, value) for name, value in each.items()}) for each in scalars]
    known = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    runs = [[len([*same]), known[text]] for text, same in groupby(texts)]
    note = json.dumps({"kept": kept, "texts": [*known], "runs": runs}, separators=(",", ":")).encode()
    if len(note) > _core.MAX_NOTE_BYTES:
        refuse(
            "cannot keep the optimizer in a run: its scalar state differs from parameter to parameter, and needs room",
            needed=f"{len(note):,} bytes",
            available=f"{_core.MAX_NOTE_BYTES:,} bytes",
            remedy="Leave out run=, and call ballast.save().",
        )
    return note


def kept_by(note: bytes) -> str:
    """Return what the library keeps for the optimizer that wrote the note."""
    return _content(note)["kept"].text()


def _content(note: bytes) -> Json:
    try:
        return Json(parse(note), NOTE)
    except ValueError as error:
        fail_malformed(NOTE, str(error))


def decoded(note: bytes) -> Iterator[ScalarState]:
    """Yield the scalar state of each parameter.

    >>> [*decoded(encoded("Adam", [{"step": 3}, {"step": 3}, {}]))]
    [{'step': 3}, {'step': 3}, {}]
    """
    content = _content(note)
    texts = content["texts"].elements()
    for run in content["runs"].elements():
        count, number = run.elements(2)
        text = texts[number.count(len(texts) - 1)].text()
        for _ in range(count.count()):
            yield _scalars_in(text)


def joined(kept: str, notes: Sequence[bytes], places: Sequence[int]) -> bytes:
    """Return the note with which an optimizer that keeps `kept` continues the run of other ranks. A rank's note has the scalars
    of the parameters of which it had elements. `places` has the place of each parameter there.

    >>> notes = [encoded("Adam", [{"step": 3}, {}]), encoded("Adam", [{}, {"step": 5}])]
    >>> [*decoded(joined("Adam", notes, [1, 0]))]
    [{'step': 5}, {'step': 3}]
    """
    notes = [note for note in notes if note]  # a rank without any has begun no step
    if not notes:
        return b""
    for note in notes:
        require_kept(kept, note)
    of_all: list[ScalarState] = [next(filter(None, of_ranks), {}) for of_ranks in zip(*map(decoded, notes))]
    return encoded(kept, [of_all[place] for place in places])


def require_kept(kept: str, note: bytes) -> None:
    """Refuse the note of an optimizer that keeps something else."""
    if kept_by(note) != kept:
        fail(
            "run_mismatch",
            _core.Problem(
                what=f"cannot resume the run: it keeps {kept_by(note)}, but this training keeps {kept}",
                remedy="Resume with the optimizer that began the run; or give the run another name. Nothing was changed.",
            ),
        )


def _scalars_in(text: str) -> ScalarState:
    try:
        return {name: _from_json(each.value) for name, each in Json(parse(text.encode()), NOTE).items()}
    except Error:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        fail_malformed(NOTE, str(error))


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
