"""The note of a run whose rule counts steps: the steps that did not update each parameter, because it had no gradient."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Sequence

from ballast import _core
from ballast.checks import refuse
from ballast.json_reader import fail_malformed
from ballast.wrapper.units import Member

NOTE = "the note of missed steps in a run"


def encoded(members: Sequence[Member], unused: Collection[Member] = (), step: int = 0) -> bytes:
    """Return the note for the commit of a step, which does not update the parameters in `unused`. A commit of joint runs may
    hold it though the step was skipped, so it says which step it means. It is empty if no parameter has missed a step.

    >>> import torch
    >>> weight, bias = (Member(torch.nn.Parameter(torch.ones(2)), name, group=0) for name in ("weight", "bias"))
    >>> encoded([weight, bias])
    b''
    >>> weight.missed = 5
    >>> note = encoded([weight, bias], [bias], step=9)
    >>> decoded(note, steps=9), decoded(note, steps=8)
    ([5, 1], [5, 0])
    >>> decoded(joined([b"", note], [1, 0]), steps=9)
    [1, 5]
    """
    counts = [2 * member.missed + (member in unused) for member in members]
    return _note([step, *counts]) if any(counts) else b""


def decoded(note: bytes, steps: int) -> list[int]:
    """Return the missed steps of each parameter after this number of steps; nothing if none has missed any."""
    step, *counts = _words(note) or [0]
    return [count // 2 + (count % 2 if steps >= step else 0) for count in counts]


def joined(notes: Sequence[bytes], places: Sequence[int]) -> bytes:
    """Return the note of a run that other ranks continue. `places` has the place of each parameter there."""
    note = next(filter(None, notes), b"")  # the same on all ranks
    if not note:
        return b""
    step, *counts = _words(note)
    return _note([step, *(counts[place] for place in places)])


def _note(words: Sequence[int]) -> bytes:
    note = zlib.compress(struct.pack(f"<{len(words)}Q", *words))
    if len(note) > _core.MAX_NOTE_BYTES:
        refuse(
            "cannot keep the optimizer in a run: its parameters have missed different steps, and the counts need room",
            needed=f"{len(note):,} bytes",
            available=f"{_core.MAX_NOTE_BYTES:,} bytes",
            remedy="Leave out run=, and call ballast.save().",
        )
    return note


def _words(note: bytes) -> list[int]:
    try:
        packed = zlib.decompress(note) if note else b""
        return [*struct.unpack(f"<{len(packed) // 8}Q", packed)]
    except (zlib.error, struct.error) as error:
        fail_malformed(NOTE, str(error))
