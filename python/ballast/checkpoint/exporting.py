"""Write a model to safetensors files, one unit at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from ballast.agreement import Agreement
from ballast.checkpoint.pieces import slices
from ballast.checkpoint.safetensors_writer import SLICE, SafetensorsWriter, item_of
from ballast.checkpoint.unit_by_unit import begin_owners, by_unit, gathered_unit, group_of, tensors_of
from ballast.checks import refuse
from ballast.safetensors_format import SUFFIX
from ballast.torch.memory import bytes_at
from ballast.torch.parameters.placeholder import slice_on_host


class Export:
    """One export of a model. All ranks that train the model run it together, and the first of them writes."""

    def __init__(self, model: torch.nn.Module, path: Path, most_bytes: int | None):
        if path.suffix != SUFFIX:
            refuse(f"cannot export a model to {path.name}: it is another format", needed=f"a name that ends with {SUFFIX}")
        self._tensors = tensors_of(model)
        begin_owners(self._tensors.values())
        self._group = group_of(self._tensors.values())
        items = [item_of(name, tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()]
        self._writer = SafetensorsWriter(path.parent, path.name.removesuffix(SUFFIX), items, most_bytes)

    def run(self) -> None:
        if self._group is None:
            return
        agreement = Agreement(self._group, "exporting a model")
        writes = self._group.rank == 0
        with ExitStack() as at_the_end:
            with agreement.attempt():
                if writes:
                    self._writer.begin(at_the_end)
            agreement.settle()
            for unit in by_unit(self._tensors):
                with gathered_unit(unit):
                    with agreement.attempt():
                        if writes:
                            self._write(unit)
                agreement.settle()  # after each unit, because writing a model may take longer than a wait
            with agreement.attempt():
                if writes:
                    self._writer.finish()
            agreement.settle()


    def _write(self, unit: dict[str, torch.Tensor]) -> None:
        for name, tensor in unit.items():
            for first, count in slices(tensor.numel(), SLICE):
                values = slice_on_host(tensor, first, count)
                self._writer.write(name, first * values.element_size(), bytes_at(values.data_ptr(), values.nbytes))
