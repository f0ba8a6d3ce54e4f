"""Read DeepSpeed's checkpoints: universal ones, with a folder for each parameter, and those of ZeRO stages 1 to 3 as their
ranks have written them.

In stages 1 and 2 the parameters of a group are one flat tensor, of which each rank has a range. In stage 3 each parameter is
divided over the ranks, and a rank has its parts one after the other. The files may be damaged, forged, or of several
checkpoints: all is checked before a tensor is read."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch

from ballast.checkpoint.sources import STEP, Source
from ballast.checkpoint.torch_file import ANY, contents_of, fail_unreadable, load_without_code, number_in
from ballast.checks import refuse
from ballast.errors import Error
from ballast.json_reader import Json, fail_malformed
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.parameters.units import names_in_model

log = logging.getLogger("ballast")

ITS_OWN = ("deepspeed.",)  # classes whose objects are passed over in the files of a parameter
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
STAGE_0 = "mp_rank_00_model_states.pt"
MASTERS = {"single_partition_of_fp32_groups": "base_optimizer_state", "fp32_flat_groups": "optimizer_state_dict"}
MOST_NAME = 4096  # characters of a path
MOST, MOST_DIMENSIONS = 1 << 62, 64
Result = TypeVar("Result")


class Universal(Source):
    """A universal checkpoint. It has no options: DeepSpeed's groups have other parameters than the script's. `shapes` are those
    of a model, for tensors that are flat and have no shape elsewhere."""

    may_be_flat = True  # stage 3 writes flat tensors
    trained_only = True

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]] | None = None):
        self._directory = directory
        self._folder = directory / "zero"
        self._shapes_of_model = shapes or {}

    def names(self) -> list[str]:
        return sorted(str(path.parent.relative_to(self._folder)) for path in self._folder.glob("*/fp32.pt"))

    def tensor(self, name: str, moment: str = "") -> StoredTensor | None:
        path = self._folder / name / f"{moment or 'fp32'}.pt"
        if not path.exists():
            return None
        found = contents_of(path, passed_over=ITS_OWN)
        stored = found.get("param") if isinstance(found, dict) else found
        if not isinstance(stored, StoredTensor):
            fail_unreadable(path, "it holds no tensor")
        stored.shape = self._shape_of(name, stored.shape)
        return stored

    def state(self, name: str) -> Collection[str]:
        kept = {file.stem for file in (self._folder / name).glob("*.pt")} - {"fp32"}
        return kept | ({STEP} if kept and self._steps_of_all is not None else set())

    def steps(self, name: str) -> int | None:
        path = self._folder / name / f"{STEP}.pt"
        if not path.exists():
            return self._steps_of_all
        return number_in(load_without_code(path, path, ITS_OWN), path)

    @cached_property
    def _steps_of_all(self) -> int | None:
        """Return the steps of the optimizer's first parameter. Stage 3 stores no steps of single parameters: all have
        the same."""
        path = self._folder / "optimizer_state.pt"
        if not path.exists():
            return None
        found = load_without_code(path, path, ANY)
        return steps_of(found.get("optimizer_state_dict", {}) if isinstance(found, dict) else found, path)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of stage 3's flat tensors, from the ranks' files next to them."""
        files = sorted(self._directory.glob("*model_states.pt"))
        try:
            groups = load_without_code(files[0], files[0], ANY).get("param_shapes") if files else None
            return {name: tuple(int(size) for size in shape) for group in groups or [] for name, shape in group.items()}
        except (Error, AttributeError, TypeError, ValueError) as error:  # the script's own objects are in these files too
            log.info("shapes of flat tensors are not compared: %s", error)
            return {}

    def _shape_of(self, name: str, found: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor that may be flat in its file."""
        full = self._shapes.get(name) or self._shapes_of_model.get(name, found)
        return full if len(found) == 1 and math.prod(full) == found[0] else found


def steps_of(optimizer: Any, path: Path) -> int | None:
    """Return the steps in the state_dict() of an optimizer whose parameters all have the same."""
    try:
        counts = [number_in(state[STEP], path) for state in optimizer.get("state", {}).values() if STEP in state]
        # Older versions of FusedAdam count in the groups. Newer ones always leave a 0 there.
        group_counts = [number_in(group.get(STEP, 0), path) for group in optimizer.get("param_groups", [])]
    except (AttributeError, TypeError, KeyError):
        fail_unreadable(path, "it does not hold the state_dict() of an optimizer")
    return counts[0] if counts else max(group_counts, default=0) or None


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
    steps: list[int | None]  # one for each group
    is_of_stage_3: bool
    mappings: list[dict[str, tuple[int, int]]] | None  # first element and number of each parameter, in stages 1 and 2
    paddings: list[list[int]] | None  # elements after each parameter, by group; older versions say nothing of them
    ranks: int  # the number of ranks that the parameters are divided over


@dataclass
class ModelState:
    """What the files with the model say."""

    path: Path
    shapes: list[dict[str, tuple[int, ...]]]  # one mapping for each group of trained parameters
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
            if is_inside and os.path.isdir(directory / tag):  # no name is too long for isdir()
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
    contents = {rank: Json(contents_of(path), str(path)) for rank, path in found.items()}
    first = min(contents)
    return ModelState(
        path=found[first],
        shapes=[_shapes(each) for each in contents[first].get("param_shapes", []).elements()],
        module=_tensors(contents[first]["module"]),
        buffers=_names(contents[first].get("buffer_names", [])),
        aliases=_names(contents[first].get("shared_params", [])),
        frozen=_shapes(contents[first].get("frozen_param_shapes", {})),
        fragments={rank: _tensors(content.get("frozen_param_fragments", {})) for rank, content in contents.items()},
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
    own = Json(contents_of(path, KEPT), str(path))["optimizer_state_dict"]
    key = next((each for each in MASTERS if own.get(each, ()).value != ()), None)
    if key is None:
        fail_malformed(str(path), "it holds no master parameters", needed=" or ".join(MASTERS))
    masters, optimizer = [_flat(each) for each in own[key].elements()], own[MASTERS[key]]
    states: dict[Any, dict[str, Json]] = {number: dict(each.items()) for number, each in optimizer["state"].items()}
    if not states.keys() <= {*range(len(masters))}:
        fail_malformed(str(path), f"the optimizer has state of {len(states)} tensors", needed=f"of {len(masters)}, as {key}")
    in_order = [states.get(number, {}) for number in range(len(masters))]
    steps = steps_of(optimizer.value, path)
    if steps is None and (later := own.get("base_optimizer_state_step", None).value) is not None:
        steps = number_in(later, path)
    return RankState(
        path=path,
        masters=masters,
        moments=[
            {str(name): _flat(each, master.elements) for name, each in state.items() if name != STEP}
            for state, master in zip(in_order, masters)
        ],
        steps=[number_in(state[STEP].value, path) if STEP in state else steps for state in in_order],
        is_of_stage_3=key == "fp32_flat_groups",
        mappings=_by_group(own, "param_slice_mappings", len(masters), _places),
        paddings=_by_group(own, "param_alignment_paddings", len(masters), lambda group: _counts(group, 1 << 32)),
        ranks=_ranks(own.get("partition_count", None).value, path),
    )


def _flat(found: Json, least: int = 0) -> StoredTensor:
    """Return a flat tensor. A moment has a value for each element of the master, which may lack the padding at the end."""
    stored = found.value
    if not isinstance(stored, StoredTensor) or len(stored.shape) != 1 or stored.elements < least:
        found.refuse(f"a flat tensor of at least {least} elements")
    return stored


def _by_group(own: Json, key: str, groups: int, read: Callable[[Json], Result]) -> list[Result] | None:
    """Return what a list has of each group; None if there is no list, as in some versions."""
    found = own.get(key, None)
    return None if found.value is None else [read(each) for each in found.elements(groups)]


def _places(group: Json) -> dict[str, tuple[int, int]]:
    return {str(name): (_count_of(each, "start"), _count_of(each, "numel")) for name, each in group.items()}


def _count_of(address: Json, word: str) -> int:
    return Json(getattr(address.value, word, None), address.file, f"{address.at}.{word}").count(MOST)


def _counts(found: Json, most: int) -> list[int]:
    return [each.count(most) for each in found.elements()]


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


def _tensors(found: Json) -> dict[str, StoredTensor]:
    return {str(name): each.value for name, each in found.items() if isinstance(each.value, StoredTensor)}


def _shapes(found: Json) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, shape in found.items():
        sizes = [*shape.value] if isinstance(shape.value, torch.Size) else shape.value
        shapes[str(name)] = tuple(_counts(Json(sizes, shape.file, shape.at), MOST))
        if len(shapes[str(name)]) > MOST_DIMENSIONS:
            shape.refuse(f"a shape of at most {MOST_DIMENSIONS} dimensions")
    return shapes


def _names(found: Json) -> set[str]:
    names = [*found.value] if isinstance(found.value, dict) else found.value  # shared ones have another name as their value
    return {each.text() for each in Json(names, found.file, found.at).elements()}


@dataclass(frozen=True)
class Part:
    """A part of a parameter in the flat tensors of one rank."""

    rank: int
    group: int
    start: int
    count: int


class JoinedTensor(StoredTensor):
    """A tensor whose elements are in ranges of flat tensors, one after the other."""

    def __init__(self, ranges: list[tuple[StoredTensor, int, int]], dtype: torch.dtype, shape: tuple[int, ...], where: Path):
        super().__init__(dtype, shape, str(where))
        self._ranges = ranges  # the tensor, the first element there, and the count

    def read(self, first: int, count: int, into: int) -> None:
        begin, width = 0, self.dtype.itemsize
        for stored, start, held in self._ranges:
            low, high = max(first, begin), min(first + count, begin + held)
            if low < high:
                stored.read(start + low - begin, high - low, into + (low - first) * width)
            begin += held


class Zero(Source):
    """The checkpoint of the ranks, without options as a universal one."""

    def __init__(self, folder: Path, known: Collection[str] = ()):
        self._folder = folder
        self._ranks = rank_states(self._folder)
        self._model = model_state(self._folder)
        self._shapes = {name: shape for group in self._model.shapes for name, shape in group.items()}
        self._parts = _parts(self._ranks, self._model)
        _require_each_once(self._folder, self._parts, self._shapes)
        self._others = self._untrained()
        saved = [*self._shapes, *self._others]
        self._saved = {own: name for name, own in names_in_model(saved, known).items()}  # names of wrappers may be in them

    def names(self) -> list[str]:
        return [*self._saved]

    def tensor(self, name: str, moment: str = "") -> StoredTensor | None:
        name = self._saved.get(name, name)
        parts = self._parts.get(name)
        if parts is None:
            return None if moment else self._others.get(name)
        ranges = []
        for part in parts:
            rank = self._ranks[part.rank]
            flat = rank.moments[part.group].get(moment) if moment else rank.masters[part.group]
            if flat is None:
                return None
            ranges.append((flat, part.start, part.count))
        return self._joined(name, ranges, self._shapes[name])

    def state(self, name: str) -> Collection[str]:
        parts = self._parts.get(self._saved.get(name, name))
        if not parts:
            return ()
        kept = set.intersection(*(set(self._ranks[part.rank].moments[part.group]) for part in parts))
        return kept | ({STEP} if kept and self.steps(name) is not None else set())

    def steps(self, name: str) -> int | None:
        parts = self._parts.get(self._saved.get(name, name))
        return self._ranks[parts[0].rank].steps[parts[0].group] if parts else None

    def _joined(self, name: str, ranges: list[tuple[StoredTensor, int, int]], shape: tuple[int, ...]) -> JoinedTensor:
        dtypes = {stored.dtype for stored, _, _ in ranges} or {torch.float32}
        if len(dtypes) > 1:
            fail_malformed(str(self._folder), f"the ranks have parts of {name} in several formats")
        return JoinedTensor(ranges, dtypes.pop(), shape, self._folder)

    def _untrained(self) -> dict[str, StoredTensor]:
        """Return frozen parameters and buffers."""
        model = self._model
        left_out = {*self._shapes, *model.aliases}
        in_parts = self._ranks[0].is_of_stage_3  # the module of stage 3 has empty parameters
        kept = {name for name in model.module if name in model.buffers or not in_parts} - left_out
        found = {name: model.module[name] for name in model.module if name in kept}
        for name, shape in model.frozen.items() if in_parts else ():
            found[name] = self._frozen(name, shape)
        return found

    def _frozen(self, name: str, shape: tuple[int, ...]) -> JoinedTensor:
        ranges, elements = [], math.prod(shape)
        for rank in range(len(self._ranks)):
            count = _share(elements, len(self._ranks), rank)
            stored = self._model.fragments.get(rank, {}).get(name)
            if not isinstance(stored, StoredTensor) or stored.elements < count:
                fail_malformed(str(self._folder), f"rank {rank} lacks its part of {name}", needed=f"{count} elements")
            ranges.append((stored, 0, count))
        return self._joined(name, ranges, shape)


def _parts(ranks: list[RankState], model: ModelState) -> dict[str, list[Part]]:
    """Return the parts of each parameter, in the order of its elements."""
    found: dict[str, list[Part]] = {}
    for group in range(len(ranks[0].masters)):
        if len(model.shapes) != len(ranks[0].masters):
            needed = f"{len(model.shapes)}, as in {model.path.name}"
            fail_malformed(str(ranks[0].path), f"it has {len(ranks[0].masters)} groups", needed=needed)
        divided = _divided_parameters if ranks[0].is_of_stage_3 else _divided_group
        for name, part in divided(ranks, group, model.shapes[group]):
            found.setdefault(name, []).append(part)
    return found


def _divided_parameters(
    ranks: list[RankState], group: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Part]]:
    for number, rank in enumerate(ranks):
        start = 0
        for name, shape in shapes.items():
            elements = math.prod(shape)
            yield name, Part(number, group, start, _share(elements, len(ranks), number))
            start += -(-elements // len(ranks))
        _require_elements(rank, group, needed=start, alignment=1)


def _divided_group(ranks: list[RankState], group: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a group in stages 1 and 2. The ranks' flat tensors, one after the other, hold the parameters one after
    the other, as zero_to_fp32.py reads them. With round_robin_gradients, param_slice_mappings of DeepSpeed 0.19 lacks the
    paddings between them."""
    paddings = [0] * len(shapes) if ranks[0].paddings is None else ranks[0].paddings[group]
    if len(paddings) != len(shapes):
        fail_malformed(str(ranks[0].path), f"it has {len(paddings)} paddings", needed=f"{len(shapes)} in group {group}")
    places, end = {}, 0
    for (name, shape), padding in zip(shapes.items(), paddings):
        places[name] = (end, math.prod(shape))
        end += math.prod(shape) + padding
    begin = 0
    for number, rank in enumerate(ranks):
        found = dict(_held_in(places, begin, rank.masters[group].elements))
        if rank.paddings is None and rank.mappings is not None:
            _require_mapped(rank, group, found)
        for name, (start, count) in found.items():
            yield name, Part(number, group, start, count)
        begin += rank.masters[group].elements
    if ranks[0].paddings is not None or ranks[0].mappings is None:
        _require_elements(ranks[-1], group, end, 2 * len(ranks), available=begin)


def _held_in(places: Mapping[str, tuple[int, int]], begin: int, count: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield what a range of a flat tensor holds of each parameter: the first element in the range, and how many."""
    for name, (first, elements) in places.items():
        low, high = max(first, begin), min(first + elements, begin + count)
        if low < high:
            yield name, (low - begin, high - low)


def _require_mapped(rank: RankState, group: int, found: Mapping[str, tuple[int, int]]) -> None:
    """Compare the places with those that an older version of DeepSpeed has written down."""
    assert rank.mappings is not None
    mapped = {name: place for name, place in rank.mappings[group].items() if place[1]}
    if others := sorted(name for name in {*mapped, *found} if mapped.get(name) != found.get(name)):
        fail_malformed(
            str(rank.path),
            f"it has {others[0]} in another place than its order says",
            needed=f"(first element, elements) {found.get(others[0])}",
            available=f"{mapped.get(others[0])}",
        )


def _require_elements(rank: RankState, group: int, needed: int, alignment: int, available: int | None = None) -> None:
    """Refuse flat tensors of another size than the parameters and the alignment explain."""
    found = rank.masters[group].elements if available is None else available
    if -(-needed // alignment) != -(-found // alignment):
        why = f"the flat tensors of group {group} are not those of its parameters"
        fail_malformed(str(rank.path), why, needed=f"{needed} elements", available=f"{found}")


def _share(elements: int, ranks: int, rank: int) -> int:
    """Return how many elements a rank has of a parameter that is divided over all of them.

    >>> [_share(7, 3, rank) for rank in range(3)]
    [3, 3, 1]
    """
    most = -(-elements // ranks)
    return max(0, min(most, elements - rank * most))


def _require_each_once(folder: Path, parts: Mapping[str, list[Part]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in (*shapes, *(name for name in parts if name not in shapes)):
        found = sum(part.count for part in parts.get(name, []))
        if name not in shapes or found != math.prod(shapes[name]):
            fail_malformed(
                f"{name} in {folder}",
                "the files of the ranks do not hold each element of a parameter once",
                needed=f"{math.prod(shapes[name])} elements" if name in shapes else "the shape of each parameter",
                available=f"{found} elements in {len(parts.get(name, []))} parts",
            )
