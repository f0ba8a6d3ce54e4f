"""Write a model to safetensors files, one unit at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ballast.checkpoint.contents import slices
from ballast.checkpoint.folder import require_space
from ballast.checkpoint.full_model import begin_owners, group_of, tensors_of, visit_units
from ballast.checks import refuse
from ballast.new_files import create, flush_folder
from ballast.ranks import Agreement
from ballast.safetensors_format import DTYPES, SUFFIX, Item, are_files_for, files_for, index_name, index_of
from ballast.torch.memory import bytes_at
from ballast.torch.parameters.managed_parameter import slice_on_host

EXPORTING = "exporting a model"
COPIED = 4 << 20  # elements that are copied to the host at once


def export_model(model: torch.nn.Module, path: Path, most_bytes: int | None) -> None:
    """Write a model. All ranks that train it call this together, and the first of them writes."""
    if path.suffix != SUFFIX:
        refuse(f"cannot export a model to {path.name}: it is another format", needed=f"a name that ends with {SUFFIX}")
    tensors = tensors_of(model)
    begin_owners(tensors.values())
    items = [item_of(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    writer = SafetensorsWriter(path.parent, path.name.removesuffix(SUFFIX), items, most_bytes)
    group = group_of(tensors.values())
    if group is None:
        return

    def write(name: str, tensor: torch.Tensor) -> None:
        for first, count in slices(tensor.numel(), COPIED):
            writer.write(name, first, slice_on_host(tensor, first, count))

    agreement = Agreement(group, EXPORTING)
    with ExitStack() as at_the_end:
        with agreement.settled():
            if group.rank == 0:
                writer.begin(at_the_end)
        visit_units(tensors, write, EXPORTING, on_all=False)
        with agreement.settled():
            if group.rank == 0:
                writer.finish()


class SafetensorsWriter:
    """The files of one model, in a folder. They get their names when all are complete."""

    def __init__(self, folder: Path, stem: str, items: Sequence[Item], most_bytes: int | None):
        self._folder, self._stem = folder, stem
        self._tensor_bytes = sum(item.bytes for item in items)
        self._files = files_for(items, stem, most_bytes)
        self._created: dict[str, int] = {}  # handles, by the name that a file gets when it is complete
        self._places: dict[str, tuple[int, int]] = {}  # of each tensor: the handle of its file, and its first byte there

    @property
    def names(self) -> list[str]:
        """The names of the files that have been begun."""
        return [*self._created]

    def begin(self, at_the_end: ExitStack) -> None:
        """Create the files, which `at_the_end` closes, and removes if they are not complete."""
        require_space(self._folder, sum(file.bytes for file in self._files))
        for file in self._files:
            handle = self._create(file.name, at_the_end)
            write_at(handle, 0, memoryview(file.header))
            self._places.update((name, (handle, begin)) for name, begin in file.begins.items())
        if len(self._files) > 1:
            handle = self._create(index_name(self._stem), at_the_end)
            write_at(handle, 0, memoryview(index_of(self._files, self._tensor_bytes)))

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Write elements of a tensor, which are on the host."""
        handle, begin = self._places[name]
        write_at(handle, begin + first * values.element_size(), bytes_at(values.data_ptr(), values.nbytes))

    def finish(self) -> None:
        """Flush the files, and give them their names. The files of an earlier export are removed."""
        for handle in self._created.values():
            os.fsync(handle)
        self._remove_previous()
        for name in self._created:  # the index comes last
            os.replace(self._unfinished(name), self._folder / name)
        now = self._created.keys()
        self._remove(each for each in os.listdir(self._folder) if are_files_for(each, self._stem) and each not in now)

    def _create(self, name: str, at_the_end: ExitStack) -> int:
        path = self._unfinished(name)
        at_the_end.callback(path.unlink, missing_ok=True)
        handle = create(path, 0o666)
        at_the_end.callback(os.close, handle)
        self._created[name] = handle
        return handle

    def _unfinished(self, name: str) -> Path:
        return self._folder / f"{name}.unfinished"

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


def item_of(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Item:
    known = {ours: theirs for theirs, ours in DTYPES.items()}
    word = str(dtype).removeprefix("torch.")
    if word not in known:
        refuse(f"safetensors files cannot hold {dtype}", where=name, needed=f"one of {', '.join(known)}")
    return Item(name, known[word], tuple(shape), torch.Size(shape).numel() * dtype.itemsize)


def write_at(handle: int, begin: int, content: memoryview) -> None:
    while content:
        count = os.pwrite(handle, content, begin)
        content, begin = content[count:], begin + count
