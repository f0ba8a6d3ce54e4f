"""Read directories of torch.distributed.checkpoint that hold the state_dicts of its get_state_dict(), under any keys."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ballast.checkpoint.unpickling import Unpickler, fail_unreadable, load_without_code
from ballast.checks import refuse
from ballast.errors import Error

NUMBERED = re.compile(r"(^|\.)state\.\d+\.\w+$")
ONE_OF_EACH = "one model and one optimizer, as in dcp.save({'model': ..., 'optim': ...})"

# All names that a .metadata may have, by module: data classes, and functions that look a word up.
METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"MEM_FORMAT_ENCODING", "TensorProperties"},  # torch 2.2
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}


class Distributed:
    """A Source for one directory."""

    may_be_flat = False

    def __init__(self, directory: Path, trained: Sequence[str], known: Collection[str]):
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._directory = directory
        self._metadata = read_metadata(directory / ".metadata")
        entries = self._metadata.state_dict_metadata
        self._entries = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self._holders = {key.rpartition(".")[0] for key in self._entries}  # prefixes of moments and of steps
        optimizers = _of_most(_prefixes(self._holders, [f"state.{name}" for name in trained]))
        self._model = self._only("parameters", _of_models(_prefixes(self._entries, trained), trained, known)) or ""
        self._optimizer = self._only("optimizer's state", optimizers)

    def shape(self, name: str, moment: str = "") -> tuple[int, ...] | None:
        entry = self._entries.get(self._key(name, moment))
        return None if entry is None else tuple(entry.size)

    def has_state(self, name: str) -> bool:
        return self._key(name, "any").rpartition(".")[0] in self._holders

    def parameter(self, name: str) -> torch.Tensor:
        return self._read(self._key(name))

    def moment(self, name: str, moment: str) -> torch.Tensor:
        return self._read(self._key(name, moment))

    def steps(self, name: str) -> int | None:
        key = self._key(name, "step")
        return int(self._read(key)) if key in self._entries else None

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
        from torch.distributed.checkpoint import FileSystemReader, load
        from torch.distributed.checkpoint.api import CheckpointException

        reader = FileSystemReader(self._directory)
        reader.read_metadata = lambda *args, **options: self._metadata  # torch's method unpickles anything
        entry = self._entries[key]
        into = {key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")}
        try:
            load(into, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # a BaseException with the errors of each rank
            self._refuse_pieces(key)
            fail_unreadable(self._directory, f"{key}: {error.failures[0][0]}")
        return into[key]

    def _refuse_pieces(self, key: str) -> None:
        """Raise our error for names that torch has refused to unpickle. Return if torch had another reason."""
        for index, stored in self._metadata.storage_data.items():
            if index.fqn == key:
                path = self._directory / stored.relative_path
                with open(path, "rb") as file:
                    file.seek(stored.offset)
                    load_without_code(io.BytesIO(file.read(stored.length)), path)


def read_metadata(path: Path) -> Any:
    """Return the Metadata of this file."""
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    with open(path, "rb") as file:
        unpickler = Unpickler(file, path, METADATA_NAMES | {"torch": names_in_torch()})
        try:
            found = unpickler.load()
        except Error:
            raise
        except Exception as error:  # damaged bytes may raise anything
            fail_unreadable(path, str(error))
    if not isinstance(found, Metadata) or not isinstance(getattr(found, "storage_data", None), dict):
        fail_unreadable(path, "it does not say where each tensor is stored")
    found.storage_meta = StorageMeta()  # the reader sets its own
    return found


def names_in_torch() -> set[str]:
    return {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


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
