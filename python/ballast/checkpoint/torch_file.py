"""Read files of torch.save() without running any code that they name, and each tensor in them piece by piece, when it is used.

torch.load(mmap=True) would do the same, but pages of a mapped file stay in memory. So the file is mapped only to find the place
of each tensor in it."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from ballast._torch_compat import tree_map
from ballast.checkpoint.manifest import fail_file
from ballast.checks import fail, is_number, refuse
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.stored_tensors import FileTensor, Latest, StoredTensor

log = logging.getLogger("ballast")

# Finds the reason in an error of torch.load(weights_only=True), and leaves out its advice to run the code of the file.
REASON = re.compile(r"WeightsUnpickler error:\s*(.+)|(Trying to load unsupported .+)")
NO_ZIP = "it is no zip file, as torch.save() writes since 1.6: it is damaged, or much older"
ANY = ("",)  # the script's own objects are in these files too, and are passed over
MOST_LEVELS = 16  # dictionaries in each other
MOST_ENTRIES = 1 << 24  # a dictionary that is in several others counts in each of them
MAPS = Path("/proc/self/maps")


class StandIn:
    """Replaces a class that is not needed: its content is passed over, and none of its code runs."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class Unpickler(pickle.Unpickler):
    """Finds only the given names, by module, and refuses a file with any other name."""

    def __init__(self, file: IO[bytes], path: Path, names: Mapping[str, Collection[str]]):
        super().__init__(file)
        self._path = path
        self._names = names

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._names.get(module, ()):
            refuse_names(self._path, [f"{module}.{name}"])
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> NoReturn:
        fail_unreadable(self._path, "it refers to objects outside of it")


def load_without_code(
    file: Path | IO[bytes], path: Path, passed_over: tuple[str, ...] = (), kept: Mapping[str, type] | None = None
) -> Any:
    """Read a file of torch.save() with tensors, numbers, text and containers. Tensors of a Path are read when they are
    used.

    Objects of classes whose names begin with one of `passed_over` become StandIns, or objects of the classes that `kept` has
    for these names. Others are refused. Errors name `path`."""
    names = _foreign_names(file)
    classes = {name: (kept or {}).get(name, StandIn) for name in names}
    if refused := [name for name in names if not name.startswith(passed_over)]:
        refuse_names(path, refused)
    if over := [name for name, kind in classes.items() if kind is StandIn]:
        log.info("%s: passed over %s", path, ", ".join(over))
    try:
        with torch.serialization.safe_globals([(kind, name) for name, kind in classes.items()]):
            return torch.load(file, map_location="cpu", mmap=isinstance(file, Path), weights_only=True)
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch's reader has looked for the directory of the zip file before its first byte
            fail_unreadable(path, "it is cut off")
        fail_file(path, error)
    except Exception as error:
        fail_unreadable(path, str(error))


def require_plain(found: Any, path: Path) -> torch.Tensor:
    """Return what was found if it is a tensor with a value in memory for each element. Strides of a file may repeat a few
    bytes as often as they like."""
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided or found.device.type != "cpu":
        fail_unreadable(path, "it holds no tensor")
    if found.is_quantized or found.numel() * found.element_size() > found.untyped_storage().nbytes():
        fail_unreadable(path, f"it holds a tensor of {tuple(found.shape)} in {found.untyped_storage().nbytes()} bytes")
    return found.detach()


def number_in(found: Any, path: Path) -> int:
    """Return what was found as a count of steps."""
    found = found.read_all() if isinstance(found, StoredTensor) and found.elements == 1 else found
    number = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
    if not is_number(number) or not 0 <= number < 1 << 53:
        fail_unreadable(path, "it holds no number of steps")
    return int(number)


def _foreign_names(file: Path | IO[bytes]) -> list[str]:
    """Return the names that can be found without reading the file. torch.load() refuses any that are found later."""
    names: list[str] = []
    with suppress(Exception):
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if not isinstance(file, Path):
        file.seek(0)
    return names


def refuse_names(path: Path, names: Collection[str]) -> NoReturn:
    refuse(
        f"cannot read a file without running code that it names: {', '.join(names)}",
        where=str(path),
        needed="tensors, numbers, text, None, and lists, tuples and dictionaries of them",
        remedy="If you trust the file, read it with the program that wrote it, and save it without these.",
    )


def fail_unreadable(path: Path, why: str) -> NoReturn:
    found = REASON.search(why)
    reason = (found[1] or found[2]) if found else why.strip().partition("\n")[0]
    reason = NO_ZIP if "mmap can only be used" in reason else reason
    fail("bad_record", f"cannot unpickle a file of a checkpoint: {reason}", where=str(path))


class WholeTensor(StoredTensor):
    """A tensor that its file gives only as a whole. `latest` is shared by the tensors of which one is read at a time."""

    def __init__(
        self, read: Callable[[], torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...], where: Path, latest: Latest
    ):
        super().__init__(dtype, shape, str(where))
        self._read, self._latest = read, latest

    def read(self, first: int, count: int, into: int) -> None:
        values = self._latest.get(self, self._flat)
        if count > 0:
            tensor_at(into, count, self.dtype).copy_(values[first : first + count])

    def _flat(self) -> torch.Tensor:
        values = self._read().reshape(-1)
        if values.numel() != self.elements or values.dtype != self.dtype:
            fail_unreadable(Path(self.where), f"it has {values.numel()} elements of {values.dtype}, and not {self.shape}")
        return values


def contents_of(path: Path, kept: Mapping[str, type] | None = None, passed_over: tuple[str, ...] = ANY) -> Any:
    """Return the content of a file, with a StoredTensor in place of each tensor. Objects of other classes than `kept`, by
    name, become StandIns, as far as they may be passed over."""
    found = load_without_code(path, path, passed_over, kept)
    return _Mapped(path).replaced(found, MOST_LEVELS)


def read_tensors(found: Any) -> Any:
    """Return the content of a file with its tensors read."""
    return tree_map(lambda each: each.read_all() if isinstance(each, StoredTensor) else each, found)


class _Mapped:
    """Finds where in a file a tensor is that torch has mapped."""

    def __init__(self, path: Path):
        self._path = path
        self._parts = _mapped_parts(os.path.realpath(path))
        self._entries = 0

    def replaced(self, found: Any, levels: int) -> Any:
        """Return containers with a StoredTensor in place of each tensor."""
        self._entries += 1
        if isinstance(found, torch.Tensor):
            return self._stored(found)
        if isinstance(found, torch.Size) or not isinstance(found, (dict, list, tuple)):
            return found
        if levels == 0 or self._entries + len(found) > MOST_ENTRIES:
            fail_unreadable(self._path, f"it has more than {MOST_LEVELS} levels, or {MOST_ENTRIES:,} entries")
        if isinstance(found, dict):
            return {key: self.replaced(each, levels - 1) for key, each in found.items()}
        return [self.replaced(each, levels - 1) for each in found]

    def _stored(self, found: torch.Tensor) -> StoredTensor | None:
        """Return the tensor in the file; None for one of another layout, which no checkpoint of a training needs."""
        if found.layout is not torch.strided or found.is_quantized or found.device.type != "cpu":
            return None
        values = require_plain(found, self._path)
        begin, end = values.data_ptr(), values.data_ptr() + values.nbytes
        for first, last, offset in self._parts:
            if first <= begin and end <= last and values.is_contiguous():
                return FileTensor(self._path, offset + begin - first, values.dtype, tuple(values.shape))
        held = values.clone()
        return WholeTensor(lambda: held, held.dtype, tuple(held.shape), self._path, Latest())


def _mapped_parts(path: str) -> list[tuple[int, int, int]]:
    """Return where this process has mapped a file: the first address, the end, and the offset in the file."""
    found = []
    for line in MAPS.read_text(errors="surrogateescape").splitlines():
        addresses, _, offset, _, _, *where = line.split(maxsplit=5)
        if where == [path]:
            first, _, last = addresses.partition("-")
            found.append((int(first, 16), int(last, 16), int(offset, 16)))
    return found
