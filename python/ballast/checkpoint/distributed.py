"""Read directories of torch.distributed.checkpoint that hold the state_dicts of its get_state_dict(), under any keys."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import torch

from ballast.checkpoint.dcp_metadata import Chunk, Entry, read_metadata
from ballast.checkpoint.unpickling import fail_file, fail_unreadable, load_without_code, number_in, require_plain
from ballast.checks import refuse

NUMBERED = re.compile(r"(^|\.)state\.\d+\.\w+$")
OF_OPTIMIZERS = {"state", "param_groups"}  # keys of an optimizer's state_dict()
ONE_OF_EACH = "one model and one optimizer, as in dcp.save({'model': ..., 'optim': ...})"

class Distributed:
    """A Source for one directory."""

    may_be_flat = False

    def __init__(self, directory: Path, trained: Sequence[str], known: Collection[str]):
        self._directory = directory
        self._entries = read_metadata(directory).entries
        self._holders = {key.rpartition(".")[0] for key in self._entries}  # prefixes of moments and of steps
        self._trained = trained
        self._model = self._only("parameters", _of_models(_prefixes(self._entries, trained), trained, known)) or ""

    @cached_property
    def _optimizer(self) -> str | None:
        """The prefix of the optimizer's state. A caller that only reads parameters does not need it."""
        prefixes = _prefixes(self._holders, [f"state.{name}" for name in self._trained])
        return self._only("optimizer's state", _of_most(prefixes))

    def entries_like(self, known: Collection[str]) -> dict[str, Entry]:
        """Return the tensors of the model by name: those that are known, and others that are next to them."""
        words = {name.partition(".")[0] for name in known}
        below = {key.removeprefix(self._model): each for key, each in self._entries.items() if key.startswith(self._model)}
        return {name: entry for name, entry in below.items() if name in known or name.partition(".")[0] in words}

    def shape(self, name: str, moment: str = "") -> tuple[int, ...] | None:
        entry = self._entries.get(self._key(name, moment))
        return None if entry is None else entry.shape

    def has_state(self, name: str) -> bool:
        return self._key(name, "any").rpartition(".")[0] in self._holders

    def parameter(self, name: str) -> torch.Tensor:
        return self._read(self._key(name))

    def moment(self, name: str, moment: str) -> torch.Tensor:
        return self._read(self._key(name, moment))

    def steps(self, name: str) -> int | None:
        key = self._key(name, "step")
        return number_in(self._read(key), self._directory) if key in self._entries else None

    def _key(self, name: str, moment: str = "") -> str:
        if not moment:
            return self._model + name
        if self._optimizer is None:
            self._refuse_numbers()
        return f"{self._optimizer or ''}state.{name}.{moment}"

    def _only(self, what: str, prefixes: list[str]) -> str | None:
        if len(prefixes) > 1:
            refuse(
                f"cannot choose {what} from a checkpoint: it holds these names {len(prefixes)} times",
                where=str(self._directory),
                needed=ONE_OF_EACH,
                available=", ".join(f"{prefix}*" for prefix in sorted(prefixes)[:6]),
                remedy="Read it with dcp.load(), and save only the model and the optimizer to train.",
            )
        return prefixes[0] if prefixes else None

    def _refuse_numbers(self) -> None:
        """Refuse the state of optimizer.state_dict(): its numbers do not identify the parameters."""
        numbered = next((key for key in self._entries if NUMBERED.search(key)), "")
        if numbered:
            refuse(
                "cannot load optimizer state by number: nothing says which parameter each number is",
                where=numbered,
                needed=ONE_OF_EACH,
                remedy="Save the result of torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer).",
            )

    def _read(self, key: str) -> torch.Tensor:
        return read_entry(self._entries[key])


def entries_of_only_model(directory: Path) -> dict[str, Entry]:
    """Return the tensors by name of the model that was saved, without its optimizer. Refuse several models."""
    metadata = read_metadata(directory)
    models: dict[tuple[str, ...], dict[str, Entry]] = {}
    for key, entry in metadata.entries.items():
        *around, name = metadata.paths.get(key) or (key,)
        if not around and OF_OPTIMIZERS.intersection(key.split(".")[:-1]):
            refuse(
                "cannot choose the weights in a checkpoint: it does not say which tensors are an optimizer's",
                where=f"{key} in {directory}",
                remedy="ballast.load(model, directory) chooses by the names of a model.",
            )
        if not OF_OPTIMIZERS.intersection(around):
            models.setdefault(tuple(around), {})[name] = entry
    if len(models) != 1:
        refuse(
            "cannot choose the weights in a checkpoint" if models else "the checkpoint holds no weights",
            where=str(directory),
            needed="one model",
            available=", ".join(sorted(".".join(around) or "tensors without a key" for around in models)),
            remedy="ballast.load(model, directory) chooses by the names of a model.",
        )
    return next(iter(models.values()))


def read_entry(entry: Entry) -> torch.Tensor:
    """Return a tensor, read chunk by chunk."""
    if len(entry.chunks) == 1:
        return _read_chunk(entry, entry.chunks[0])
    values = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    for chunk in entry.chunks:
        place = values[tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes))]
        place.copy_(_read_chunk(entry, chunk))
    return values


def _read_chunk(entry: Entry, chunk: Chunk) -> torch.Tensor:
    try:
        with open(chunk.path, "rb") as file:
            file.seek(chunk.begin)
            content = file.read(chunk.bytes)
    except OSError as error:
        fail_file(chunk.path, error)
    values = require_plain(load_without_code(io.BytesIO(content), chunk.path), chunk.path)
    if values.dtype != entry.dtype or tuple(values.shape) != chunk.sizes:
        fail_unreadable(chunk.path, f"it holds a tensor of {values.dtype} and {tuple(values.shape)} at {chunk.begin}")
    return values


def _prefixes(keys: Iterable[str], names: Sequence[str]) -> Counter[str]:
    """Count the prefixes that turn a name into a key.

    >>> _prefixes(["model.a.b", "ema.a.b", "model.c"], ["a.b", "c"])
    Counter({'model.': 2, 'ema.': 1})
    """
    wanted = set(names)
    found: Counter[str] = Counter()
    for key in keys:
        words = key.split(".")
        for first in range(len(words)):
            if ".".join(words[first:]) in wanted:
                found["".join(f"{word}." for word in words[:first])] += 1
    return found


def _of_most(counts: Counter[str]) -> list[str]:
    """Return the prefixes with the highest count."""
    most = max(counts.values(), default=0)
    return [prefix for prefix, count in counts.items() if count == most]


def _of_models(counts: Counter[str], trained: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the prefixes of complete models. A model may contain a copy of itself, whose names are below the model's
    prefix: that copy is not counted."""
    most = _of_most(counts)
    if not most or counts[most[0]] < len(trained):
        return most[:1]  # the caller reports the missing names

    def is_inside(inner: str, outer: str) -> bool:
        return inner != outer and inner.startswith(outer) and inner[len(outer) :] + trained[0] in known

    return [each for each in most if not any(is_inside(each, other) for other in most)]
