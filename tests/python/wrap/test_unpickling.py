"""Tests that files that would run code are refused by each reader, and that none of the code runs."""

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

import ballast
import pytest
import torch
from python.wrap.support import saved
from python.wrap.support.saved import save
from python.wrap.test_foreign import as_distributed, as_universal, as_universal_of_stage_3, fresh, trained_by_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata


@pytest.fixture(autouse=True)
def _no_safe_globals():
    """Let torch.load() trust nothing that other tests' libraries have registered, as megatron.core does."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(before)


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


def in_metadata(folder, pickled):
    (folder / ".metadata").write_bytes(pickled)
    return ".metadata"


def inside_of_metadata(folder, pickled):
    """Plant the pickle in the data of torch's planner, which may be any object."""
    metadata = pickle.dumps(Metadata({}, planner_data="HERE"), 2)
    place = b"X\x04\x00\x00\x00HERE"
    assert place in metadata
    body = pickled[2:-1] if pickled.startswith(b"\x80") else pickled[:-1]
    return in_metadata(folder, metadata.replace(place, body))


def in_a_piece(folder, pickled):
    """Plant the pickle in a file in which .metadata locates a tensor."""
    content = as_torch_saves(pickled)
    (folder / "piece.distcp").write_bytes(content)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for index in metadata.storage_data:
        if index.fqn == "model.position":
            metadata.storage_data[index] = _StorageInfo("piece.distcp", 0, len(content))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return "piece.distcp"


def in_file(path):
    def plant(folder, pickled):
        (folder / path).write_bytes(as_torch_saves(pickled))
        return path

    return plant


READERS = {
    "metadata": (as_distributed, in_metadata),
    "inside of metadata": (as_distributed, inside_of_metadata),
    "a piece of a tensor": (as_distributed, in_a_piece),
    "a parameter": (as_universal, in_file("zero/position/fp32.pt")),
    "a moment": (as_universal, in_file("zero/position/exp_avg.pt")),
    "steps": (as_universal, in_file("zero/position/step.pt")),
}


@pytest.fixture(scope="module")
def run():
    return trained_by_torch()[0]


@pytest.fixture
def sentinel(tmp_path):
    return tmp_path / "it-ran"


def require_refused(folder, file, gadget, sentinel, training):
    with pytest.raises(ballast.Error, match="B1001|B3202") as raised:
        ballast.load_checkpoint(folder, *training)
    said = str(raised.value)
    assert not sentinel.exists(), gadget
    assert file in said
    assert GADGETS[gadget][1] in said or "Unsupported operand" in said, gadget  # torch.load() stops before the name


@pytest.mark.parametrize("reader", READERS)
def test_a_foreign_file_that_would_run_code_is_refused(reader, run, tmp_path, sentinel):
    writes, plant = READERS[reader]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    writes(folder, run)
    training = fresh()
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for gadget, (make, _) in GADGETS.items():
        require_refused(folder, plant(folder, make(str(sentinel))), gadget, sentinel, training)
        for file, content in before.items():
            file.write_bytes(content)
    ballast.load_checkpoint(folder, *training)


def test_an_extra_that_would_run_code_is_refused(tmp_path, sentinel, monkeypatch):
    mine = saved.training(1)
    for number, (gadget, (make, _)) in enumerate(GADGETS.items()):
        monkeypatch.setattr("ballast.checkpoint.saving.packed", lambda extra: as_torch_saves(make(str(sentinel))))
        save(folder := tmp_path / str(number), mine)
        require_refused(folder, "rank-00000.extra", gadget, sentinel, (mine.model, mine.optimizer))
    assert mine.train(1, 1)


def test_objects_of_deepspeed_run_nothing(run, tmp_path, sentinel):
    """Unknown objects in DeepSpeed's files are skipped and run no code. Missing values are reported."""
    state = "zero/optimizer_state.pt"
    as_universal_of_stage_3(tmp_path, run)
    genuine = (tmp_path / state).read_bytes()
    training = fresh()
    for gadget, (make, _) in GADGETS.items():
        in_file("zero_pp_rank_0_mp_rank_00_model_states.pt")(tmp_path, make(str(sentinel)))
        ballast.load_checkpoint(tmp_path, *training)
        in_file(state)(tmp_path, make(str(sentinel)))
        with pytest.raises(ballast.FailureError, match=f"B3202(.|\n)*{state}"):
            ballast.load_checkpoint(tmp_path, *training)
        (tmp_path / state).write_bytes(genuine)
        assert not sentinel.exists(), gadget


@pytest.mark.parametrize("gadget", GADGETS)
def test_the_gadgets_run_in_a_trusting_reader(gadget, sentinel):
    """Each pickle runs its code under a trusting reader, so that the tests above are valid."""

    class Trusting(pickle.Unpickler):
        def persistent_load(self, pid):
            return pid

    opened = Trusting(io.BytesIO(GADGETS[gadget][0](str(sentinel)))).load()
    if gadget == "Popen":
        opened.wait()
    assert sentinel.exists()


def test_a_damaged_foreign_file_is_named(run, tmp_path):
    as_distributed(tmp_path, run)
    training = fresh()
    [pieces] = tmp_path.glob("*.distcp")
    content, metadata = pieces.read_bytes(), (tmp_path / ".metadata").read_bytes()
    for file, damaged, said in [
        (".metadata", metadata[: len(metadata) // 2], "B3202(.|\n)*.metadata"),
        (".metadata", pickle.dumps(Metadata({})), "B3202(.|\n)*.metadata"),
        (pieces.name, b"", "B3202(.|\n)*distcp"),
    ]:
        (tmp_path / file).write_bytes(damaged)
        with pytest.raises(ballast.FailureError, match=said):
            ballast.load_checkpoint(tmp_path, *training)
        pieces.write_bytes(content)
        (tmp_path / ".metadata").write_bytes(metadata)
    pieces.unlink()
    with pytest.raises(ballast.FailureError, match="B3201(.|\n)*distcp"):
        ballast.load_checkpoint(tmp_path, *training)
