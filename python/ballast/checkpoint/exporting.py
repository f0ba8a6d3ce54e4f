"""Write a model to safetensors files, one unit at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch

from ballast.agreement import Agreement
from ballast.checkpoint.folder import flush_folder, require_space
from ballast.checkpoint.inventory import buffers_by_name
from ballast.checkpoint.pieces import slices
from ballast.checkpoint.unit_by_unit import by_unit, group_of
from ballast.checks import refuse
from ballast.gathering import gather_to_read
from ballast.safetensors_format import DTYPES, SUFFIX, Item, are_files_for, files_for, index_name, index_of
from ballast.wrapper.managed_parameter import by_owner
from ballast.wrapper.memory import bytes_at
from ballast.wrapper.ungathered import plain
from ballast.wrapper.unwrap import named_parameters

SLICE = 4 << 20  # elements that are copied to the host at once


class Export:
    """One export of a model. All ranks that train the model run it together, and the first of them writes."""

    def __init__(self, model: torch.nn.Module, path: Path, most_bytes: int | None):
        if path.suffix != SUFFIX:
            refuse(f"cannot export a model to {path.name}: it is another format", needed=f"a name that ends with {SUFFIX}")
        self._folder, self._stem = path.parent, path.name.removesuffix(SUFFIX)
        self._tensors: dict[str, torch.Tensor] = {**dict(named_parameters(model)), **buffers_by_name(model)}
        for owner, _ in by_owner(model.parameters()):
            owner.begin()
        self._group = group_of(self._tensors.values())
        items = [item_of(name, tensor) for name, tensor in self._tensors.items()]
        self._tensor_bytes = sum(item.bytes for item in items)
        self._files = files_for(items, self._stem, most_bytes)
        self._created: dict[str, int] = {}  # handles, by the name that a file gets when it is complete
        self._places: dict[str, tuple[int, int]] = {}  # of each tensor: the handle of its file, and its first byte there

    def run(self) -> None:
        if self._group is None:
            return
        agreement = Agreement(self._group, "exporting a model")
        writes = self._group.rank == 0
        with ExitStack() as at_the_end:
            with agreement.attempt():
                if writes:
                    self._begin(at_the_end)
            agreement.settle()
            for unit in by_unit(self._tensors):
                with gather_to_read([each for each in unit.values() if isinstance(each, torch.nn.Parameter)]):
                    with agreement.attempt():
                        if writes:
                            self._write(unit)
                agreement.settle()  # after each unit, because writing a model may take longer than a wait
            with agreement.attempt():
                if writes:
                    self._finish()
            agreement.settle()

    def _begin(self, at_the_end: ExitStack) -> None:
        require_space(self._folder, sum(file.bytes for file in self._files))
        for file in self._files:
            handle = self._create(file.name, at_the_end)
            write_at(handle, 0, memoryview(file.header))
            self._places.update((name, (handle, begin)) for name, begin in file.begins.items())
        if len(self._files) > 1:
            handle = self._create(index_name(self._stem), at_the_end)
            write_at(handle, 0, memoryview(index_of(self._files, self._tensor_bytes)))

    def _create(self, name: str, at_the_end: ExitStack) -> int:
        path = self._unfinished(name)
        at_the_end.callback(path.unlink, missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        at_the_end.callback(os.close, handle)
        self._created[name] = handle
        return handle

    def _unfinished(self, name: str) -> Path:
        return self._folder / f"{name}.unfinished"

    def _write(self, unit: dict[str, torch.Tensor]) -> None:
        for name, tensor in unit.items():
            handle, begin = self._places[name]
            flat = plain(tensor).reshape(-1)
            for first, count in slices(flat.numel(), SLICE):
                values = flat[first : first + count].to("cpu")
                at = begin + first * values.element_size()
                write_at(handle, at, bytes_at(values.data_ptr(), values.nbytes))

    def _finish(self) -> None:
        for handle in self._created.values():
            os.fsync(handle)
        self._remove_previous()
        for name in self._created:  # the index comes last
            os.replace(self._unfinished(name), self._folder / name)
        now = self._created.keys()
        self._remove(each for each in os.listdir(self._folder) if are_files_for(each, self._stem) and each not in now)

    def _remove_previous(self) -> None:
        """Remove files of an earlier export, so that a process that ends after this leaves no mixture that looks like
        one model. Remove the index first, then each file that has a name of the new export. A single file is replaced
        atomically."""
        self._remove([index_name(self._stem)])
        if len(self._files) > 1:
            self._remove(self._created)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
        flush_folder(self._folder)


def item_of(name: str, tensor: torch.Tensor) -> Item:
    known = {ours: theirs for theirs, ours in DTYPES.items()}
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in known:
        refuse(f"safetensors files cannot hold {tensor.dtype}", where=name, needed=f"one of {', '.join(known)}")
    return Item(name, known[dtype], tuple(tensor.shape), tensor.numel() * tensor.element_size())


def write_at(handle: int, begin: int, content: memoryview) -> None:
    while content:
        count = os.pwrite(handle, content, begin)
        content, begin = content[count:], begin + count
