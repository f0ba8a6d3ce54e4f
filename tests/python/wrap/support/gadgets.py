"""Pickles that run code when pickle.load() reads them: each creates a file."""

from __future__ import annotations

import functools
import io
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Calls:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._what = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._what


class Wakes:
    """An object that creates a file when its state is set."""

    def __init__(self, file: str):
        self.file = file

    def __setstate__(self, state: dict[str, str]) -> None:
        Path(state["file"]).touch()


class Child(Wakes):
    """An object that protocol 0 rebuilds through copyreg."""


def of_object(make: Callable[[str], Any], protocol: int = 2) -> Callable[[str], bytes]:
    return lambda file: pickle.dumps(make(file), protocol, fix_imports=False)


def of_system(file: str) -> Calls:
    return Calls(os.system, f"touch {file}")


def of_hub(file: str) -> Calls:
    folder = Path(file).parent / "hub"
    folder.mkdir(exist_ok=True)
    (folder / "hubconf.py").write_text(f"import pathlib\npathlib.Path({file!r}).touch()\ndef model(): pass\n")
    return Calls(torch.hub._load_local, str(folder), "model")


def of_bytes(file: str) -> Calls:
    inside = io.BytesIO()
    torch.save(of_system(file), inside)
    return Calls(torch.storage._load_from_bytes, inside.getvalue())


def of_chain(file: str) -> bytes:
    """Pickle getattr(__import__("os"), "system")(...), which names no function that is dangerous by itself."""
    system = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR"
    return b"\x80\x02" + system + f"(Vtouch {file}\ntR.".encode()


def of_dots(module: str) -> Callable[[str], bytes]:
    """Pickle a STACK_GLOBAL whose dotted name reaches a module that a trusted module has imported."""

    def text(word: str) -> bytes:
        return b"\x8c" + bytes([len(word.encode())]) + word.encode()

    return lambda file: b"\x80\x04" + text(module) + text("os.system") + b"\x93" + text(f"touch {file}") + b"\x85R."


def of_storage(file: str) -> bytes:
    """Pickle a persistent id as torch has for storages, with a call in the place of its class."""
    call = f"cposix\nsystem\n(Vtouch {file}\ntR".encode()
    return b"\x80\x02(Vstorage\n" + call + b"V0\nVcpu\nK\x01tQ."


def of_array(file: str) -> bytes:
    import numpy

    values = numpy.empty(1, dtype=object)
    values[0] = of_system(file)
    return pickle.dumps(values, 2, fix_imports=False)


# Maps what a pickle does to the pickle and to its name that is refused first.
GADGETS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "os.system": (of_object(of_system), "posix.system"),
    "eval": (of_object(lambda file: Calls(eval, f"open({file!r}, 'w')")), "eval"),
    "exec": (of_object(lambda file: Calls(exec, f"open({file!r}, 'w')")), "exec"),
    "open": (of_object(lambda file: Calls(open, file, "w")), "open"),
    "Popen": (of_object(lambda file: Calls(subprocess.Popen, ["touch", file])), "subprocess.Popen"),
    "partial": (of_object(lambda file: Calls(functools.partial(os.system, f"touch {file}"))), "functools.partial"),
    "state": (of_object(Wakes), "Wakes"),
    "copyreg": (of_object(Child, protocol=0), "copyreg._reconstructor"),
    "torch.hub": (of_object(of_hub), "torch.hub._load_local"),
    "torch.storage": (of_object(of_bytes), "torch.storage._load_from_bytes"),
    "getattr": (of_chain, "getattr"),
    "dots in torch.serialization": (of_dots("torch.serialization"), "torch.serialization.os.system"),
    "dots in metadata": (
        of_dots("torch.distributed.checkpoint.metadata"),
        "torch.distributed.checkpoint.metadata.os.system",
    ),
    "storage": (of_storage, "posix.system"),
    "array": (of_array, "_reconstruct"),
}


def as_torch_saves(pickled: bytes) -> bytes:
    """Return a file of torch.save() in which this pickle replaces its own."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save({}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(changed, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, pickled if entry.filename.endswith("data.pkl") else old.read(entry))
    return changed.getvalue()
