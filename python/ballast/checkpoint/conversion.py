"""Convert checkpoints of other programs to Ballast's and back, without a model and without ranks: piece by piece, on one
processor. Loading a converted checkpoint gives the bits that load_checkpoint() of the other one gives."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from ballast import _core
from ballast.checkpoint import manifest
from ballast.checkpoint.distributed import METADATA
from ballast.checkpoint.folder import Commit, folder_name, lock
from ballast.checkpoint.foreign import as_checkpoint, source_of, trained_in_fp32
from ballast.checkpoint.full_model import COPIED, item_of, safetensors_files, write_values
from ballast.checkpoint.kinds import kind_of, refuse_without_checkpoint
from ballast.checkpoint.manifest import Checkpoint, parameters_of, slices
from ballast.checkpoint.runs import recorded
from ballast.checkpoint.saving import INDEX_BYTES, packed
from ballast.checkpoint.sources import STEP, Source
from ballast.checkpoint.tensors import SLICE, state_part
from ballast.checkpoint.weights import state_in, weights_in
from ballast.checks import fail_of_system, refuse
from ballast.errors import Error
from ballast.json_reader import read_json
from ballast.new_files import require_no_link, write_new
from ballast.safetensors_format import INDEX, SINGLE
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.updates.rules import moments_by_name

log = logging.getLogger("ballast")
MODEL_KEY, OPTIMIZER_KEY = "model", "optim"  # the keys in an export to torch.distributed.checkpoint
STEM = "model"  # transformers looks for files of this name
CONFIG = "config.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Converted:
    """What a conversion has written."""

    step: int
    tensors: int
    trained: int  # parameters with the optimizer's state
    moments: list[str]  # torch's names
    bytes: int


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    files: list[str]
    tensors: int
    bytes: int


class Conversion:
    """One conversion to a directory, which is made if it is missing."""

    def __init__(self, path: Path, directory: Path):
        self._path, self._directory = path, directory
        self._kind = _foreign_kind(path)
        _require_no_checkpoint(directory)
        self._trained_only = self._kind == "run"
        self._checkpoint: Checkpoint = recorded(path) if self._trained_only else self._converted(source_of(path))
        self._moments = self._checkpoint.optimizers[0].moments
        if not self._moments:
            refuse(
                "cannot convert a checkpoint without optimizer state to one that a training resumes",
                where=str(path),
                needed="moments, such as exp_avg",
                remedy="ballast.load(model, checkpoint) reads its weights, and `ballast export` writes them.",
            )
        self._entries = {
            name: each if each.kind is None else trained_in_fp32(each.shape, self._moments, each.steps)
            for name, each in self._checkpoint.tensors.items()
        }

    def run(self) -> Converted:
        if self._trained_only:
            log.warning("%s holds no frozen parameters and no buffers: those of the model will stay", self._path)
        try:
            written = self._write()
        except OSError as error:
            fail_of_system(error)
        trained = [each for each in self._entries.values() if each.role == "trained"]
        return Converted(self._checkpoint.step, len(self._entries), len(trained), [*self._moments.values()], written)

    # --- What there is ---

    def _converted(self, source: Source) -> Checkpoint:
        self._trained_only, names = source.trained_only, source.names()
        trained = [name for name in names if source.state(name)]
        return as_checkpoint(source, self._kind, self._moments_kept(source, names), dict.fromkeys(names), trained)

    def _moments_kept(self, source: Source, names: Iterable[str]) -> dict[str, str]:
        """Return torch's names of the moments, by the library's."""
        known = moments_by_name()
        found: dict[str, str] = {}
        for name in names:
            for key in sorted(set(source.state(name)) - {STEP}):
                kind = known.get(key, "")
                if not kind or found.setdefault(kind, key) != key:
                    refuse(
                        f"cannot convert the state of this optimizer: no update rule of Ballast keeps its {key}",
                        where=f"{name} in {self._path}",
                        needed=f"moments of one optimizer: {', '.join(known)}",
                        remedy="ballast.load() reads the weights alone.",
                    )
        return {kind: found[kind] for kind in ("momentum", "variance") if kind in found}

    # --- Writing ---

    def _write(self) -> int:
        place = lock(self._directory)
        folder = folder_name(self._checkpoint.step, int.from_bytes(os.urandom(4), "little"))
        try:
            _require_no_checkpoint(self._directory)
            place.create(folder)
            _core.require_space(str(self._directory), self._bytes())
            written = self._write_files(self._directory / folder)
            saved = _core.SavedCheckpoint(
                folder=folder,
                ranks=1,
                optimizers=self._checkpoint.optimizers,
                tensors=self._entries,
                converted_from=self._checkpoint.converted_from,
            )
            Commit(self._directory, place, saved).make_current()
        except BaseException:
            place.discard(folder)
            raise
        finally:
            place.release()
        return written

    def _bytes(self) -> int:
        pieces = sum(each.elements // SLICE + 1 for each in self._entries.values())
        return sum(each.chunk_bytes(each.elements) for each in self._entries.values()) + INDEX_BYTES * pieces

    def _write_files(self, folder: Path) -> int:
        """Write the files of the only rank, and return the bytes of its data."""
        files, reader = _core.RankFiles(str(folder), rank=0), self._checkpoint.reader()
        for name, entry in self._entries.items():
            kinds = ["parameter", *self._moments] if entry.kind is not None else ["parameter"]
            stored = self._checkpoint.tensors[name]
            for first, count in slices(entry.elements, SLICE):
                values = {kind: torch.empty(count, dtype=getattr(torch, entry.dtype), device="cpu") for kind in kinds}
                if entry.kind is None:
                    address, size = values["parameter"].data_ptr(), values["parameter"].nbytes
                    reader.copy_elements(name, stored, (first, count), address)
                    files.append_memory(address, size, name, (first, count))
                else:
                    reader.copy(name, stored, first, state_part(values))
                    files.append(state_part(values), name, (first, count))
        return files.finish(packed(None), raw=False)


def _foreign_kind(path: Path) -> str:
    """Return the kind of checkpoint, or refuse one that needs no conversion, or that is none."""
    kind = kind_of(path)
    if kind == "ballast":
        refuse(f"cannot convert {path}: it is a checkpoint of Ballast already", needed="one of another program")
    return kind or refuse_without_checkpoint(path, "cannot convert a checkpoint", needed="one of another program")


def _require_no_checkpoint(directory: Path) -> None:
    try:
        is_there = _core.read_manifest(str(directory)) is not None
    except Error:
        is_there = True
    if is_there:
        refuse(f"cannot convert to {directory}: there is a checkpoint already", needed="another directory, or none")


@dataclass(frozen=True)
class OfflineExport:
    """One export to a folder, which is made if it is missing. `dtype` is one of DTYPES, and `config` a file or its folder."""

    checkpoint: Path
    folder: Path
    dtype: str | None = None
    most_bytes: int | None = None
    config: Path | None = None
    to: str = "safetensors"  # "safetensors" or "distributed"

    def run(self) -> Exported:
        if not self.checkpoint.exists() and not kind_of(self.checkpoint):
            refuse(f"cannot export {self.checkpoint}: it does not exist", needed="a directory of ballast.save(), or of a run")
        self._require_folder()
        config = None if self.config is None else self._require_config(self.config)
        tensors = {}
        for name, each in weights_in(self.checkpoint).tensors.items():  # integers stay as they are
            wanted = each.dtype if self.dtype is None or not each.dtype.is_floating_point else DTYPES[self.dtype]
            tensors[name] = each if wanted == each.dtype else each.in_format(wanted)
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
        _core.require_space(str(self.folder), sum(each.bytes for each in tensors.values()))
        write_distributed(self.checkpoint, self.folder, tensors)
        return sorted(path.name for path in (self.folder / METADATA, *self.folder.glob("*.distcp")))

    def _write_safetensors(self, tensors: dict[str, StoredTensor]) -> list[str]:
        items = [item_of(name, each.dtype, each.shape) for name, each in tensors.items()]
        with safetensors_files(self.folder, STEM, items, self.most_bytes) as writer:
            for name, stored in tensors.items():
                for first, count in slices(stored.elements, COPIED):
                    write_values(writer, name, first, stored.read_part(first, count))
            writer.finish()
            return writer.names

    def _require_folder(self) -> None:
        """Refuse a folder in which the files of two formats would be mixed, or a checkpoint of torch would be replaced."""
        found = ""
        if (self.folder / METADATA).exists():
            found = "a checkpoint of torch.distributed.checkpoint"
        elif self.to == "distributed" and any((self.folder / name).exists() for name in (SINGLE, INDEX)):
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


class ReadLater(dcp.DefaultSavePlanner):  # type: ignore[misc]  # torch does not say its type
    """Plans with tensors on the meta device, and reads each when torch writes it."""

    def __init__(self, stored: Mapping[str, StoredTensor]):
        super().__init__()
        self._stored = stored

    def lookup_object(self, index: MetadataIndex) -> Any:
        stored = self._stored.get(index.fqn)
        return super().lookup_object(index) if stored is None else stored.read_all()


def write_distributed(checkpoint: Path, folder: Path, weights: Mapping[str, StoredTensor]) -> None:
    """Write the weights, and the optimizer's state if the checkpoint is one of Ballast."""
    for path in folder.glob("*"):
        require_no_link(path)  # torch would follow it
    stored = {f"{MODEL_KEY}.{name}": tensor for name, tensor in weights.items()}
    content: dict[str, Any] = {MODEL_KEY: {name: _planned(tensor) for name, tensor in weights.items()}}
    if kind_of(checkpoint) == "ballast":
        saved = manifest.read(checkpoint)
        if saved.converted_from:
            refuse(
                "cannot export a converted checkpoint to torch.distributed.checkpoint: it has no parameter groups",
                where=str(checkpoint),
                needed="a checkpoint of ballast.save(), for the options of the optimizer",
                remedy="Load it with ballast.load_checkpoint(), save with ballast.save(), and export that.",
            )
        state = state_in(saved)
        content[OPTIMIZER_KEY] = _optimizer_content(saved, state)
        for name, values in state.items():
            stored.update({f"{OPTIMIZER_KEY}.state.{name}.{key}": value for key, value in values.items()})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), planner=ReadLater(stored), no_dist=True)


def _optimizer_content(saved: Checkpoint, state: Mapping[str, Mapping[str, StoredTensor]]) -> dict[str, Any]:
    own_steps = {name for each in saved.optimizers if each.own_step for name in parameters_of(each)}
    states: dict[str, dict[str, Any]] = {}
    for name, values in state.items():
        states[name] = {key: _planned(value) for key, value in values.items()}
        if name not in own_steps:
            states[name]["step"] = torch.tensor(float(saved.tensors[name].steps), device="cpu")
    groups = [
        {"params": group.parameters, **options}
        for each, all_options in zip(saved.optimizers, saved.options)
        for group, options in zip(each.groups, all_options)
    ]
    return {"state": states, "param_groups": groups}


def _planned(stored: StoredTensor) -> torch.Tensor:
    return torch.empty(stored.shape, dtype=stored.dtype, device="meta")
