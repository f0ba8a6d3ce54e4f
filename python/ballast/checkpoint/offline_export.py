"""Write a checkpoint in a format of other programs, without a model: piece by piece, on one processor."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from ballast.checkpoint.dcp_export import write_distributed
from ballast.checkpoint.dcp_metadata import METADATA
from ballast.checkpoint.folder import require_space
from ballast.checkpoint.pieces import slices
from ballast.checkpoint.safetensors_writer import SLICE, SafetensorsWriter, item_of
from ballast.checkpoint.weights import weights_in
from ballast.checks import fail_of_system, refuse
from ballast.json_reader import read_json
from ballast.new_files import write_new
from ballast.safetensors_format import are_files_for
from ballast.torch.memory import bytes_at
from ballast.torch.parameters.stored_tensors import StoredTensor

STEM = "model"  # transformers looks for files of this name
CONFIG = "config.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    files: list[str]
    tensors: int
    bytes: int


@dataclass(frozen=True)
class OfflineExport:
    """One export to a folder, which is made if it is missing. `dtype` is one of DTYPES, and `config` a file or its folder."""

    checkpoint: Path
    folder: Path
    dtype: str | None = None
    most_bytes: int | None = None
    config: Path | None = None
    to: str = "safetensors"  # or "distributed"

    def run(self) -> Exported:
        if not self.checkpoint.exists():
            refuse(f"cannot export {self.checkpoint}: it does not exist", needed="a directory of ballast.save(), or of a run")
        self._require_folder()
        config = None if self.config is None else self._require_config(self.config)
        stored = weights_in(self.checkpoint).tensors
        tensors = {name: self._in_format(stored[name]) for name in stored}
        try:
            files = self._write_distributed(tensors) if self.to == "distributed" else self._write_safetensors(tensors)
            if config is not None:
                write_new(self.folder / CONFIG, config.read_bytes())
                files.append(CONFIG)
        except OSError as error:
            fail_of_system(error)
        return Exported(files, len(tensors), sum(each.bytes for each in tensors.values()))

    def _write_distributed(self, tensors: dict[str, StoredTensor]) -> list[str]:
        if self.most_bytes is not None:
            refuse("cannot limit the size of files for torch.distributed.checkpoint", needed="safetensors files")
        self.folder.mkdir(parents=True, exist_ok=True)
        require_space(self.folder, sum(each.bytes for each in tensors.values()))
        write_distributed(self.checkpoint, self.folder, tensors)
        return sorted(path.name for path in (self.folder / METADATA, *self.folder.glob("*.distcp")))

    def _in_format(self, stored: StoredTensor) -> StoredTensor:
        """Return the tensor in the requested format. Integers stay as they are."""
        wanted = stored.dtype if self.dtype is None or not stored.dtype.is_floating_point else DTYPES[self.dtype]
        return stored if wanted == stored.dtype else stored.in_format(wanted)

    def _write_safetensors(self, tensors: dict[str, StoredTensor]) -> list[str]:
        items = [item_of(name, each.dtype, each.shape) for name, each in tensors.items()]
        writer = SafetensorsWriter(self.folder, STEM, items, self.most_bytes)
        self.folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as at_the_end:
            writer.begin(at_the_end)
            for name, stored in tensors.items():
                for first, count in slices(stored.elements, SLICE):
                    values = torch.empty(count, dtype=stored.dtype, device="cpu")
                    stored.read(first, count, values.data_ptr())
                    writer.write(name, first * values.element_size(), bytes_at(values.data_ptr(), values.nbytes))
            writer.finish()
        return writer.names

    def _require_folder(self) -> None:
        """Refuse a folder in which the files of two formats would be mixed, or a checkpoint of torch would be replaced."""
        found = ""
        if (self.folder / METADATA).exists():
            found = "a checkpoint of torch.distributed.checkpoint"
        elif self.to == "distributed" and any(are_files_for(path.name, STEM) for path in self.folder.glob("*")):
            found = "an export to safetensors"
        if found:
            refuse(f"cannot export to {self.folder}: there is {found} already", needed="another folder, or none")

    def _require_config(self, config: Path) -> Path:
        path = config / CONFIG if config.is_dir() else config
        if not path.is_file():
            refuse(f"cannot copy {path}: there is no such file", needed=f"the {CONFIG} of the model, or its folder")
        if not isinstance(read_json(path), dict):
            refuse(f"cannot copy {path}: it is no configuration", needed="a JSON object")
        return path
