"""Read pickled files without running any code that they name."""

from __future__ import annotations

import errno
import logging
import pickle
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from ballast import _core
from ballast.checks import fail, is_number, refuse

log = logging.getLogger("ballast")

# Finds the reason in an error of torch.load(weights_only=True), and leaves out its advice to run the code of the file.
REASON = re.compile(r"WeightsUnpickler error:\s*(.+)|(Trying to load unsupported .+)")
NO_ZIP = "it is no zip file, as torch.save() writes since 1.6: it is damaged, or much older"


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


def fail_file(path: Path, error: OSError) -> NoReturn:
    fail("file_call", _core.Problem(what=f"cannot read a file of a checkpoint: {error.strerror}", where=str(path)))


def fail_unreadable(path: Path, why: str) -> NoReturn:
    found = REASON.search(why)
    reason = (found[1] or found[2]) if found else why.strip().partition("\n")[0]
    reason = NO_ZIP if "mmap can only be used" in reason else reason
    fail("bad_record", _core.Problem(what=f"cannot unpickle a file of a checkpoint: {reason}", where=str(path)))
