"""What a commit of a run says about the optimizer. A rule counts the steps that did not update each parameter. An optimizer's
own step has the scalar state of each parameter, which its elements share."""

from __future__ import annotations

import copy
import json
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch

from ballast import _core
from ballast.checks import fail, refuse
from ballast.errors import Error
from ballast.json_reader import Json, fail_malformed, parse
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.updates.sharded_state import IN_LIBRARY

MISSED_STEPS = "the note of missed steps in a run"


def encode_missed_steps(members: Sequence[UnitParameter], unused: Collection[UnitParameter] = (), step: int = 0) -> bytes:
    """Return the metadata for the commit of a step, which does not update the parameters in `unused`. A commit of joint runs
    may hold it though the step was skipped, so it says which step it means. It is empty if no parameter has missed a step.
    """
    counts = [2 * member.missed + (member in unused) for member in members]
    return _packed([step, *counts]) if any(counts) else b""


def decode_missed_steps(metadata: bytes, steps: int) -> list[int]:
    """Return the missed steps of each parameter after this number of steps; nothing if none has missed any."""
    step, *counts = _words(metadata) or [0]
    return [count // 2 + (count % 2 if steps >= step else 0) for count in counts]


def join_missed_steps(all_metadata: Sequence[bytes], places: Sequence[int]) -> bytes:
    """Return the metadata of a run that other ranks continue. `places` has the place of each parameter there."""
    metadata = next(filter(None, all_metadata), b"")  # the same on all ranks
    if not metadata:
        return b""
    step, *counts = _words(metadata)
    return _packed([step, *(counts[place] for place in places)])


def _packed(words: Sequence[int]) -> bytes:
    metadata = zlib.compress(struct.pack(f"<{len(words)}Q", *words))
    return _require_room(metadata, "its parameters have missed different steps, and the counts need room")


def _require_room(metadata: bytes, why: str) -> bytes:
    """Return the metadata, unless commits have no room for it."""
    if len(metadata) > _core.MAX_NOTE_BYTES:
        refuse(
            f"cannot keep the optimizer in a run: {why}",
            needed=f"{len(metadata):,} bytes",
            available=f"{_core.MAX_NOTE_BYTES:,} bytes",
            remedy="Leave out run=, and call ballast.save().",
        )
    return metadata


def _words(metadata: bytes) -> list[int]:
    try:
        packed = zlib.decompress(metadata) if metadata else b""
        return [*struct.unpack(f"<{len(packed) // 8}Q", packed)]
    except (zlib.error, struct.error) as error:
        fail_malformed(MISSED_STEPS, str(error))


# State that is not per element, such as a count of steps, by its name in the optimizer's state. IN_LIBRARY stands for values of
# each element.
ScalarState = dict[str, Any]
SCALARS = "the note of the optimizer in a run"
PLAIN = (bool, int, float, str, type(None))


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def encode_scalars(kept: str, scalars: Sequence[ScalarState]) -> bytes:
    """Return the metadata. `kept` says what the library keeps. Equal scalars take little room: most optimizers count the same
    steps for all parameters."""
    texts = [json.dumps({name: _to_json(name, value) for name, value in each.items()}) for each in scalars]
    known = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    runs = [[len([*same]), known[text]] for text, same in groupby(texts)]
    metadata = json.dumps({"kept": kept, "texts": [*known], "runs": runs}, separators=(",", ":")).encode()
    return _require_room(metadata, "its scalar state differs from parameter to parameter, and needs room")


def _content(metadata: bytes) -> Json:
    try:
        return Json(parse(metadata), SCALARS)
    except ValueError as error:
        fail_malformed(SCALARS, str(error))


def decode_scalars(metadata: bytes) -> Iterator[ScalarState]:
    """Yield the scalar state of each parameter.

    >>> [*decode_scalars(encode_scalars("Adam", [{"step": 3}, {"step": 3}, {}]))]
    [{'step': 3}, {'step': 3}, {}]
    """
    content = _content(metadata)
    texts = content["texts"].elements()
    for run in content["runs"].elements():
        count, number = run.elements(2)
        text = texts[number.count(len(texts) - 1)].text()
        for _ in range(count.count()):
            yield _scalars_in(text)


def join_scalars(kept: str, all_metadata: Sequence[bytes], places: Sequence[int]) -> bytes:
    """Return the metadata with which an optimizer that keeps `kept` continues the run of other ranks. That of a rank has the
    scalars of the parameters of which it had elements. `places` has the place of each parameter there.

    >>> all_metadata = [encode_scalars("Adam", [{"step": 3}, {}]), encode_scalars("Adam", [{}, {"step": 5}])]
    >>> [*decode_scalars(join_scalars("Adam", all_metadata, [1, 0]))]
    [{'step': 5}, {'step': 3}]
    """
    all_metadata = [metadata for metadata in all_metadata if metadata]  # a rank without any has begun no step
    if not all_metadata:
        return b""
    for metadata in all_metadata:
        require_kept(kept, metadata)
    all_scalars: list[ScalarState] = [
        next(filter(None, rank_scalars), {}) for rank_scalars in zip(*map(decode_scalars, all_metadata))
    ]
    return encode_scalars(kept, [all_scalars[place] for place in places])


def require_kept(kept: str, metadata: bytes) -> None:
    """Refuse the metadata of an optimizer that keeps something else."""
    kept_before = _content(metadata)["kept"].text()
    if kept_before != kept:
        fail(
            "run_mismatch",
            f"cannot resume the run: it keeps {kept_before}, but this training keeps {kept}",
            remedy="Resume with the optimizer that began the run; or give the run another name. Nothing was changed.",
        )


def _scalars_in(text: str) -> ScalarState:
    try:
        return {name: _from_json(each.value) for name, each in Json(parse(text.encode()), SCALARS).items()}
    except Error:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        fail_malformed(SCALARS, str(error))


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
