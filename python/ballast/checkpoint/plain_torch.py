"""Read what torch.save() has written: weights, or a model with its optimizer, under any keys. A folder may have the weights in
several files, and the optimizer's state in a file of its own, as transformers and Accelerate write them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ballast.checkpoint.kinds import torch_files_in
from ballast.checkpoint.sources import STEP, Content, Keyed, of_only_model
from ballast.checkpoint.torch_file import contents_of, read_tensors
from ballast.checks import is_number, refuse
from ballast.json_reader import Json, fail_malformed, read_json
from ballast.torch.parameters.stored_tensors import StoredTensor, tensors_in

log = logging.getLogger("ballast")

# The keys of a model, where a file has other dictionaries with tensors too, such as the state of Lightning's callbacks.
OF_MODELS = ("state_dict", "model", "module", "model_state_dict")
OF_MASTERS = ("optimizer.fp32_groups.", "optimizer.fp32_groups_flat.")


def plain_torch(
    path: Path, trained: Sequence[str], known: Collection[str], order: Sequence[Sequence[str]] | None = None
) -> Keyed:
    return Keyed(content_of(path), trained, known, order)


def plain_torch_alone(path: Path) -> Keyed:
    """Return the Source of a file or folder without a model that says which names are its own."""
    content = content_of(path)
    inside = {around[0] for around in content.paths.values() if len(around) > 1}
    if named := [key for key in OF_MODELS if key in inside]:
        wanted = {*named, *(prefix.partition(".")[0] for prefix in content.groups)}
        kept = {key: each for key, each in content.tensors.items() if content.paths[key][0] in wanted}
        content = replace(content, tensors=kept)
    return of_only_model(content)


def content_of(path: Path) -> Content:
    """Return the tensors of a file, or of the files in a folder that belong together."""
    found = _Collected()
    weights, optimizer = torch_files_in(path) if path.is_dir() else ([path], None)
    files = [file for each in weights for file in (_listed(each) if each.suffix == ".json" else [each])]
    extra: Any = None
    for file in files:
        content = contents_of(file)
        extra = content.get("extra") if isinstance(content, dict) and len(files) == 1 else None
        found.add(content, (), file)
    if not files:
        for name, stored in tensors_in(path).items():
            found.add(stored, (name,), path)
    if optimizer is not None:
        found.add({"optimizer": contents_of(optimizer)}, (), optimizer)
    found.leave_out_state_with_masters(path)
    groups = {prefix: read_tensors(each) for prefix, each in found.groups.items()}
    read_extra = partial(read_tensors, extra)
    return Content(path, found.tensors, found.paths, found.numbers, groups, extra=read_extra, of_training=bool(found.groups))


def _listed(index: Path) -> list[Path]:
    """Return the files that an index names, which are next to it."""
    found = set()
    for _, where in Json(read_json(index), str(index))["weight_map"].items():
        name = where.text()
        if "\0" in name or Path(name).name != name or not (index.parent / name).is_file():
            fail_malformed(str(index), f"{name}, which it names, is not there", needed="files next to the index")
        found.add(index.parent / name)
    return sorted(found)


class _Collected:
    """Collects the tensors and the counts of steps in nested dictionaries and lists."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.paths: dict[str, tuple[str, ...]] = {}
        self.numbers: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}

    def leave_out_state_with_masters(self, path: Path) -> None:
        """Leave the state of DeepSpeed's 16-bit training without ZeRO out. Its masters are in a list, and the model has them
        rounded: with the moments next to those, a training would go on from other values."""
        if any(key.startswith(OF_MASTERS) for key in self.tensors):
            log.warning("%s: the optimizer's state is left out, because its masters are not read", path)
            self.tensors = {key: each for key, each in self.tensors.items() if not key.startswith("optimizer.")}
            self.numbers, self.groups = {}, {}

    def add(self, found: Any, around: tuple[str, ...], file: Path) -> None:
        key = ".".join(around)
        if isinstance(found, StoredTensor):
            if key in self.tensors:
                refuse(
                    f'cannot read "{key}": it is in more than one file, or twice in one',
                    where=f"{self.tensors[key].where} and {file}",
                    needed="the files of one checkpoint",
                )
            self.tensors[key], self.paths[key] = found, around
        elif is_number(found):
            if around[-1:] == (STEP,):
                self.numbers[key] = found
        elif isinstance(found, dict):
            if "state" in found and "param_groups" in found:
                self.groups[f"{key}." if key else ""] = found["param_groups"]
            for word, each in found.items():
                if word != "param_groups":
                    self.add(each, (*around, str(word)), file)
        elif isinstance(found, list):
            for number, each in enumerate(found):
                self.add(each, (*around, str(number)), file)
