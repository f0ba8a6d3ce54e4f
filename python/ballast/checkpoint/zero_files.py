"""Read the files of DeepSpeed's ranks, ZeRO stages 1 to 3. They may be damaged, forged, or of several checkpoints: all is
checked before a tensor is read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from ballast.checkpoint.source import STEP
from ballast.checkpoint.torch_file import contents_of
from ballast.checkpoint.universal import steps_of
from ballast.checkpoint.unpickling import number_in
from ballast.checks import refuse
from ballast.json_reader import fail_malformed
from ballast.torch.parameters.stored_tensors import StoredTensor

OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
STAGE_0 = "mp_rank_00_model_states.pt"
MASTERS = {"single_partition_of_fp32_groups": "base_optimizer_state", "fp32_flat_groups": "optimizer_state_dict"}
MOST_NAME = 4096  # characters of a path


class FragmentAddress:
    """Where a part of a parameter is in a rank's flat tensor, in place of DeepSpeed's class of this name."""

    start: Any = None
    numel: Any = None

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.start, self.numel = state.get("start"), state.get("numel")


KEPT = {"deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress}


@dataclass
class RankState:
    """What one rank has saved: for each group a flat tensor of masters, and one of each moment."""

    path: Path
    masters: list[StoredTensor]
    moments: list[dict[str, StoredTensor]]
    steps: list[int | None]  # of each group
    is_of_stage_3: bool
    mappings: list[Mapping[str, FragmentAddress]] | None  # where each parameter is, in stages 1 and 2
    paddings: list[list[int]] | None  # elements after each parameter, by group; older versions say nothing of them
    ranks: int  # that the parameters are divided over


@dataclass
class ModelState:
    """What the files with the model say."""

    path: Path
    shapes: list[dict[str, tuple[int, ...]]]  # of the trained parameters, by group
    module: dict[str, StoredTensor]
    buffers: set[str]
    aliases: set[str]  # further names of shared parameters
    frozen: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes of frozen parameters that are sharded
    fragments: dict[int, dict[str, StoredTensor]] = field(default_factory=dict)  # their parts, by rank


def folder_of(directory: Path) -> Path:
    """Return the folder with the files: the directory itself, or the one that its file `latest` names. Without that file, there
    must be one."""
    if any(directory.glob("*_states.pt")):
        return directory
    for file in ("latest", "latest_universal"):
        if (path := directory / file).is_file():
            with open(path, errors="replace") as text:
                tag = PurePath(text.read(MOST_NAME).strip().partition("\n")[0].replace("\0", ""))
            is_inside = tag.parts and not tag.is_absolute() and ".." not in tag.parts
            if is_inside and os.path.isdir(directory / tag):  # which no name is too long for
                return directory / tag
    found_in = sorted({path.parent for path in directory.glob("*/*_states.pt")})
    if len(found_in) != 1:
        refuse(
            "cannot choose a checkpoint of DeepSpeed" if found_in else "there is no checkpoint of DeepSpeed in the directory",
            where=str(directory),
            needed="a file `latest` that names a folder with a checkpoint, or the folder itself",
            available=", ".join(path.name for path in found_in[:6]),
        )
    return found_in[0]


def is_sharded(folder: Path) -> bool:
    """Return whether the ranks have files of their own: in stage 0 there is only one, with the model."""
    return [path.name for path in folder.glob("*_states.pt")] != [STAGE_0]


def rank_states(folder: Path) -> list[RankState]:
    """Return the state of all ranks, in their order."""
    paths = _by_rank(folder, OPTIMIZER_FILE)
    if not paths:
        fail_malformed(str(folder), "the checkpoint lacks the files of the ranks", needed="*_optim_states.pt")
    states = [_rank_state(path) for _, path in sorted(paths.items())]
    _require_all(folder, paths, states[0].ranks)
    first = states[0]
    for state in states[1:]:
        for what in ("ranks", "steps"):
            if getattr(state, what) != getattr(first, what):
                fail_malformed(
                    f"{first.path.name} and {state.path.name} in {folder}",
                    f"the files of two ranks are not of one checkpoint: they differ in {what}",
                    needed=str(getattr(first, what)),
                    available=str(getattr(state, what)),
                )
        if len(state.masters) != len(first.masters):
            fail_malformed(str(state.path), f"it has {len(state.masters)} groups", needed=f"{len(first.masters)}, as on rank 0")
    return states


def model_state(folder: Path) -> ModelState:
    """Return what the files with the model say: one in stages 0 to 2, and one of each rank in stage 3."""
    found = _by_rank(folder, MODEL_FILE)
    if not found:
        fail_malformed(str(folder), "the checkpoint lacks the file with the model", needed="*mp_rank_00_model_states.pt")
    contents = {rank: contents_of(path) for rank, path in found.items()}
    first = min(contents)
    return replace(
        _of_model(contents[first], found[first]),
        fragments={rank: _fragments(content, found[rank]) for rank, content in contents.items()},
    )


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the files of each rank. Refuse checkpoints whose ranks hold parts of layers or some of the layers."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("*_states.pt")):
        if match := pattern.fullmatch(path.name):
            rank = int(match[1] or 0)
            if rank in found:
                fail_malformed(f"{found[rank].name} and {path.name} in {folder}", f"the checkpoint has rank {rank} twice")
            found[rank] = path
        elif not OPTIMIZER_FILE.fullmatch(path.name) and not MODEL_FILE.fullmatch(path.name):
            refuse(
                "cannot read this checkpoint of DeepSpeed: its ranks had other layers, experts, or parts of layers",
                where=str(path),
                needed="one of data parallelism (ZeRO) alone",
                remedy="DeepSpeed's ds_to_universal converts it: python -m deepspeed.checkpoint.ds_to_universal "
                f"--inject_missing_state --input_folder {folder} --output_folder {folder}-universal",
            )
    return found


def _require_all(folder: Path, found: Mapping[int, Path], ranks: int) -> None:
    if other := sorted(set(range(min(ranks, len(found) + 1))) ^ set(found)):
        fail_malformed(
            str(folder),
            f"the checkpoint lacks the file of rank {other[0]}" if other[0] not in found else f"it has no rank {other[0]}",
            needed=f"*_optim_states.pt of {ranks} ranks",
            available=f"{len(found)}",
        )


def _rank_state(path: Path) -> RankState:
    content = contents_of(path, KEPT)
    own = _dict(content, "optimizer_state_dict", path)
    key = next((each for each in MASTERS if each in own), None)
    if key is None:
        fail_malformed(str(path), "it holds no master parameters", needed=" or ".join(MASTERS))
    masters, optimizer = own[key], _dict(own, MASTERS[key], path)
    if not isinstance(masters, list) or not all(isinstance(each, StoredTensor) and len(each.shape) == 1 for each in masters):
        fail_malformed(str(path), f"{key} is no list of flat tensors")
    state = _dict(optimizer, "state", path)
    of_groups = [state.get(number, {}) for number in range(len(masters))]
    if set(state) - set(range(len(masters))) or not all(isinstance(each, dict) for each in of_groups):
        fail_malformed(str(path), f"the optimizer has state of {len(state)} tensors", needed=f"of {len(masters)}, as {key}")
    moments = [{name: each for name, each in found.items() if name != STEP} for found in of_groups]
    for found, master in zip(moments, masters):
        _require_alike(found, master, path)
    common = _steps(optimizer, own, path)
    return RankState(
        path=path,
        masters=masters,
        moments=moments,
        steps=[_steps({"state": {0: each}}, {}, path) or common for each in of_groups],
        is_of_stage_3=key == "fp32_flat_groups",
        mappings=_mappings(own, len(masters), path),
        paddings=_paddings(own, len(masters), path),
        ranks=_ranks(own.get("partition_count"), path),
    )


def _require_alike(moments: Mapping[Any, Any], master: StoredTensor, path: Path) -> None:
    """Refuse moments that do not have a value for each element of the master, which may lack the padding at the end."""
    for name, each in moments.items():
        flat = isinstance(name, str) and isinstance(each, StoredTensor) and len(each.shape) == 1
        if not flat or each.elements < master.elements:
            needed = f"a flat tensor of {master.elements} elements, as the masters"
            fail_malformed(str(path), f"{name} is no value for each element", needed=needed)


def _steps(optimizer: Mapping[str, Any], own: Mapping[str, Any], path: Path) -> int | None:
    def read(found: Any) -> Any:
        return found.read_all() if isinstance(found, StoredTensor) and found.elements == 1 else found

    try:
        states = {key: {STEP: read(each[STEP])} for key, each in optimizer["state"].items() if STEP in each}
        found = steps_of({"state": states, "param_groups": optimizer.get("param_groups", [])}, path)
    except (AttributeError, TypeError, KeyError):
        fail_malformed(str(path), "it does not hold the state_dict() of an optimizer")
    later = own.get("base_optimizer_state_step")
    return number_in(later, path) if found is None and later is not None else found


def _mappings(own: Mapping[str, Any], groups: int, path: Path) -> list[Mapping[str, FragmentAddress]] | None:
    found = own.get("param_slice_mappings")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != groups or not all(isinstance(each, dict) for each in found):
        fail_malformed(str(path), "param_slice_mappings is no list with the parameters of each group")
    for group in found:
        for name, each in group.items():
            counts = (getattr(each, "start", None), getattr(each, "numel", None))
            if not isinstance(name, str) or not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
                fail_malformed(str(path), f"param_slice_mappings does not say where {name} is")
    return found


def _paddings(own: Mapping[str, Any], groups: int, path: Path) -> list[list[int]] | None:
    found = own.get("param_alignment_paddings")
    if found is None:
        return None
    of_groups = found if isinstance(found, list) else []
    counts = [count for each in of_groups for count in (each if isinstance(each, list) else [None])]
    if len(of_groups) != groups or not all(type(count) is int and 0 <= count < 1 << 32 for count in counts):
        fail_malformed(str(path), "param_alignment_paddings is no list with the paddings of each group")
    return of_groups


def _ranks(found: Any, path: Path) -> int:
    counts = set(found) if isinstance(found, list) else {found}
    if len(counts) != 1 or type(found := counts.pop()) is not int or not 0 < found < 1 << 32:
        refuse(
            "cannot read this checkpoint of DeepSpeed: its parameters are not all divided over the same ranks",
            where=f"partition_count in {path}",
            needed="one of data parallelism (ZeRO) alone",
            remedy="DeepSpeed's ds_to_universal converts it.",
        )
    return int(found)


def _fragments(content: Any, path: Path) -> dict[str, StoredTensor]:
    has_any = isinstance(content, dict) and content.get("frozen_param_fragments")
    return _dict(content, "frozen_param_fragments", path) if has_any else {}


def _of_model(content: Any, path: Path) -> ModelState:
    module = _dict(content, "module", path)
    shapes = content.get("param_shapes") or []
    if not isinstance(shapes, list):
        fail_malformed(str(path), "param_shapes is no list")
    return ModelState(
        path=path,
        shapes=[_shapes(each, path) for each in shapes],
        module={str(name): each for name, each in module.items() if isinstance(each, StoredTensor)},
        buffers=_names(content, "buffer_names", path),
        aliases=_names(content, "shared_params", path),
        frozen=_shapes(content.get("frozen_param_shapes") or {}, path),
    )


def _shapes(found: Any, path: Path) -> dict[str, tuple[int, ...]]:
    if not isinstance(found, dict):
        fail_malformed(str(path), "param_shapes has no names")
    shapes = {}
    for name, shape in found.items():
        sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (None,)
        if not isinstance(name, str) or len(sizes) > 64 or not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
            fail_malformed(str(path), f"param_shapes has no shape of {name}")
        shapes[name] = sizes
    return shapes


def _names(content: dict[Any, Any], key: str, path: Path) -> set[str]:
    found = content.get(key) or ()
    if not isinstance(found, (list, dict, tuple)) or not all(isinstance(name, str) for name in found):
        fail_malformed(str(path), f"{key} has no names")
    return set(found)


def _dict(content: Any, key: str, path: Path) -> dict[Any, Any]:
    found = content.get(key) if isinstance(content, dict) else None
    if not isinstance(found, dict):
        fail_malformed(str(path), f"it has no {key}", needed="a file of DeepSpeed's save_checkpoint()")
    return found
