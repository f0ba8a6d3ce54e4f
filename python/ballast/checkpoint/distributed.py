"""Read directories of torch.distributed.checkpoint that hold the state_dicts of its get_state_dict(), under any keys. Its
.metadata says where each tensor is stored. It may be damaged or forged: all is checked before a tensor is allocated."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch

from ballast.checkpoint.kinds import parts_of_distributed
from ballast.checkpoint.manifest import fail_file
from ballast.checkpoint.sources import OF_OPTIMIZERS, Content
from ballast.checkpoint.torch_file import ANY, Unpickler, WholeTensor, fail_unreadable, load_without_code, require_plain
from ballast.errors import Error
from ballast.torch.parameters.stored_tensors import Latest, StoredTensor

METADATA = ".metadata"
EXTRA = "extra"  # the entry that load_checkpoint() returns
SMALL = {"param_groups", EXTRA}  # keys around objects that are not tensors, and are read
MOST_DIMENSIONS = 64

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
Place = tuple[Path, int, int]  # a file, the first byte and the bytes of what it holds


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    begin: int
    bytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Entry:
    """A tensor, whose chunks hold each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True)
class Metadata:
    """The tensors and other objects of a directory by key, and the path to each in the nested dictionaries that were saved, if
    it is known."""

    entries: dict[str, Entry]
    paths: dict[str, tuple[str, ...]]
    objects: dict[str, Place]  # below the keys SMALL


def read_metadata(directory: Path) -> Metadata:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

    path = directory / METADATA
    found = _unpickled(path)
    key: Any = "storage_data"
    try:
        places = _Places(directory, found.storage_data)
        entries, objects = {}, {}
        for key, stored in found.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                entries[_text(key)] = _entry(key, stored, places)
            elif isinstance(stored, BytesStorageMetadata) and not SMALL.isdisjoint(_text(key).split(".")):
                objects[key] = places.of(key, None, 0)
    except (_Malformed, TypeError, ValueError, AttributeError, OverflowError) as error:
        fail_unreadable(path, f"{key}: {error}")
    return Metadata(entries, {key: keys for key in (*entries, *objects) if (keys := _path_of(key, found))}, objects)


class _Malformed(Exception):
    """Says what is wrong with an entry."""


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise _Malformed(why)


def _unpickled(path: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata

    try:
        with open(path, "rb") as file:
            dtypes = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
            found = Unpickler(file, path, METADATA_NAMES | {"torch": {"Size", *dtypes}}).load()
    except OSError as error:
        fail_file(path, error)
    except Error:
        raise
    except Exception as error:  # damaged bytes may raise anything
        fail_unreadable(path, str(error))
    is_known = isinstance(found, TorchMetadata) and isinstance(getattr(found, "state_dict_metadata", None), dict)
    if not is_known or not isinstance(getattr(found, "storage_data", None), dict):
        fail_unreadable(path, "it does not say where each tensor is stored")
    return found


class _Places:
    """Finds where each chunk is stored: in a file of the directory."""

    def __init__(self, directory: Path, stored: Mapping[Any, Any]):
        self._directory = directory
        self._by_chunk = {}
        for index, info in stored.items():
            offset = getattr(index, "offset", None)
            self._by_chunk[_text(getattr(index, "fqn", None)), None if offset is None else tuple(offset)] = info
        self._bytes: dict[Path, int] = {}

    def of(self, key: str, offsets: tuple[int, ...] | None, least: int) -> Place:
        """Return the place of a chunk, which has at least this many bytes, or of an object."""
        info = self._by_chunk.get((key, offsets))
        _require(info is not None, f"it does not say where the chunk at {offsets} is stored")
        _require(not getattr(info, "transform_descriptors", None), "its chunks are compressed, which only torch reads")
        relative = PurePath(_text(getattr(info, "relative_path", None)))
        _require(not relative.is_absolute() and ".." not in relative.parts, f"{relative} is outside of the directory")
        begin, count = (_count(getattr(info, name, None)) for name in ("offset", "length"))
        path = self._directory / relative
        _require(least <= count, f"the chunk at {offsets} has {count} bytes, and needs {least}")
        _require(begin + count <= self._size(path), f"the chunk at {offsets} is not in {relative}, which is cut off")
        return path, begin, count

    def _size(self, path: Path) -> int:
        if path not in self._bytes:
            try:
                self._bytes[path] = path.stat().st_size
            except OSError as error:
                fail_file(path, error)
        return self._bytes[path]


def _entry(key: str, tensor: Any, places: _Places) -> Entry:
    dtype, shape = tensor.properties.dtype, _counts(tensor.size)
    _require(isinstance(dtype, torch.dtype), f"{dtype!r} is no dtype")
    chunks = []
    for each in tensor.chunks:
        offsets, sizes = _counts(each.offsets), _counts(each.sizes)
        inside = len(offsets) == len(sizes) == len(shape)
        inside = inside and all(first + count <= size for first, count, size in zip(offsets, sizes, shape))
        _require(inside, f"a chunk of {sizes} at {offsets} is outside of the tensor's shape {shape}")
        path, begin, count = places.of(key, offsets, math.prod(sizes) * dtype.itemsize)
        chunks.append(Chunk(offsets, sizes, path, begin, count))
    filled = [chunk for chunk in chunks if chunk.elements]
    _require(sum(chunk.elements for chunk in filled) == math.prod(shape), "its chunks do not hold each element once")
    _require_apart(filled)
    return Entry(dtype, shape, filled)


def _require_apart(chunks: Sequence[Chunk]) -> None:
    """Refuse chunks that overlap. Only those that share rows of the first dimension are compared."""
    open_chunks: list[Chunk] = []
    for chunk in sorted(chunks, key=lambda each: each.offsets):
        open_chunks = [each for each in open_chunks if not chunk.offsets or each.offsets[0] + each.sizes[0] > chunk.offsets[0]]
        for other in open_chunks:
            shared = all(
                mine < theirs + count and theirs < mine + size
                for mine, size, theirs, count in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes)
            )
            _require(not shared, f"its chunks at {other.offsets} and {chunk.offsets} overlap")
        open_chunks.append(chunk)


def _path_of(key: str, found: Any) -> tuple[str, ...]:
    """Return the keys that lead to a tensor, as torch's planner has recorded them; nothing if it has not."""
    planned = getattr(found, "planner_data", None)
    path = planned.get(key) if isinstance(planned, dict) else None
    if isinstance(path, tuple) and path and all(isinstance(each, (str, int)) for each in path):
        return tuple(str(each) for each in path)
    return ()


def _text(value: Any) -> str:
    _require(isinstance(value, str), f"{value!r} is no text")
    return str(value)


def _count(value: Any) -> int:
    _require(type(value) is int and 0 <= value < 1 << 62, f"{value!r} is no count")
    return int(value)


def _counts(values: Any) -> tuple[int, ...]:
    found = tuple(_count(each) for each in values)
    _require(len(found) <= MOST_DIMENSIONS, f"it has {len(found)} dimensions")
    return found


def content_of(directory: Path) -> Content:
    """Return the tensors of a directory, or of those in it that together are a checkpoint of Accelerate."""
    tensors: dict[str, StoredTensor] = {}
    paths: dict[str, tuple[str, ...]] = {}
    objects: dict[str, Place] = {}
    latest: dict[str, Latest] = defaultdict(Latest)  # one for the model, and one for each moment
    for part in parts_of_distributed(directory):
        metadata = read_metadata(part)
        around = () if part == directory else (part.name,)
        for key, entry in metadata.entries.items():
            whole = ".".join((*around, key))
            kept = latest[key.rpartition(".")[2] if OF_OPTIMIZERS.intersection(key.split(".")) else ""]
            tensors[whole] = WholeTensor(partial(read_entry, entry), entry.dtype, entry.shape, part, kept)
            if key in metadata.paths or around:
                paths[whole] = (*around, *metadata.paths.get(key, (key,)))
        objects |= {".".join((*around, key)): place for key, place in metadata.objects.items()}
        paths |= {".".join((*around, key)): (*around, *metadata.paths.get(key, (key,))) for key in metadata.objects}
    readers: dict[str, Callable[[], Any]] = {key: partial(_read_object, *place) for key, place in objects.items()}
    readers.update((key, each.read_all) for key, each in tensors.items() if not SMALL.isdisjoint(key.split(".")))
    groups = {key.partition("param_groups.")[0] for key in objects if "param_groups." in key}
    named_groups = {prefix: partial(_groups_of, readers, f"{prefix}param_groups.") for prefix in groups}
    return Content(directory, tensors, paths, named_groups=named_groups, extra=partial(_extra_of, readers, paths))


def _groups_of(readers: Mapping[str, Callable[[], Any]], around: str) -> list[dict[str, Any]]:
    """Return the parameter groups of get_state_dict(): each has a number, or each option has the name of a parameter."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, read in readers.items():
        if key.startswith(around):
            holder, _, option = key.removeprefix(around).rpartition(".")
            found[holder][option] = read()
    return [{"params": [holder], **options} for holder, options in found.items()]


def _extra_of(readers: Mapping[str, Callable[[], Any]], paths: Mapping[str, tuple[str, ...]]) -> Any:
    """Return the entry `extra`, whose dictionaries torch has taken apart."""
    if EXTRA in readers:
        return readers[EXTRA]()
    found: dict[str, Any] = {}
    for key, read in readers.items():
        first, *words = paths.get(key, (key,))
        holder: Any = found
        for word in words[:-1] if first == EXTRA else ():
            holder = holder.setdefault(word, {}) if isinstance(holder, dict) else None
        if first == EXTRA and words and isinstance(holder, dict):
            holder[words[-1]] = read()
    return found or None


def _read_object(path: Path, begin: int, count: int) -> Any:
    return load_without_code(io.BytesIO(_read_bytes(path, begin, count)), path, ANY)


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
    content = _read_bytes(chunk.path, chunk.begin, chunk.bytes)
    values = require_plain(load_without_code(io.BytesIO(content), chunk.path), chunk.path)
    if values.dtype != entry.dtype or tuple(values.shape) != chunk.sizes:
        fail_unreadable(chunk.path, f"it holds a tensor of {values.dtype} and {tuple(values.shape)} at {chunk.begin}")
    return values


def _read_bytes(path: Path, begin: int, count: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(count)
    except OSError as error:
        fail_file(path, error)
