"""Read DeepSpeed's checkpoints of ZeRO stages 1 to 3 as their ranks have written them.

In stages 1 and 2 the parameters of a group are one flat tensor, of which each rank has a range. In stage 3 each parameter is
divided over the ranks, and a rank has its parts one after the other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ballast.checkpoint.source import STEP
from ballast.checkpoint.zero_files import ModelState, RankState, model_state, rank_states
from ballast.json_reader import fail_malformed
from ballast.torch.parameters.stored_tensors import StoredTensor
from ballast.torch.tensor_names import names_in_model


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


class Zero:
    """A Source for one directory."""

    may_be_flat = False
    trained_only = False
    of_training = True

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

    def options(self, name: str) -> Mapping[str, Any]:
        return {}  # DeepSpeed's groups have other parameters than the script's

    def extra(self) -> Any:
        return None

    def _joined(
        self, name: str, ranges: list[tuple[StoredTensor, int, int]], shape: tuple[int, ...]
    ) -> JoinedTensor:
        dtypes = {stored.dtype for stored, _, _ in ranges} or {torch.float32}
        if len(dtypes) > 1:
            fail_malformed(str(self._folder), f"the ranks have parts of {name} in several formats")
        return JoinedTensor(ranges, dtypes.pop(), shape, self._folder)

    def _untrained(self) -> dict[str, StoredTensor]:
        """Return frozen parameters and buffers."""
        model = self._model
        left_out = {*self._shapes, *model.aliases}
        in_parts = self._ranks[0].is_of_stage_3  # whose module has empty parameters
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
    """Yield the parts of a group in stage 3."""
    for number, rank in enumerate(ranks):
        start = 0
        for name, shape in shapes.items():
            elements = math.prod(shape)
            yield name, Part(number, group, start, _share(elements, len(ranks), number))
            start += -(-elements // len(ranks))
        _require_elements(rank, group, needed=start, alignment=1)


def _divided_group(
    ranks: list[RankState], group: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, Part]]:
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
        found = dict(_in_range(places, begin, rank.masters[group].elements))
        if rank.paddings is None and rank.mappings is not None:
            _require_mapped(rank, group, found)
        for name, (start, count) in found.items():
            yield name, Part(number, group, start, count)
        begin += rank.masters[group].elements
    if ranks[0].paddings is not None or ranks[0].mappings is None:
        _require_elements(ranks[-1], group, end, 2 * len(ranks), available=begin)


def _in_range(places: Mapping[str, tuple[int, int]], begin: int, count: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield what a range of a flat tensor holds of each parameter: the first element in the range, and how many."""
    for name, (first, elements) in places.items():
        low, high = max(first, begin), min(first + elements, begin + count)
        if low < high:
            yield name, (low - begin, high - low)


def _require_mapped(rank: RankState, group: int, found: Mapping[str, tuple[int, int]]) -> None:
    """Compare the places with those that an older version of DeepSpeed has written down."""
    assert rank.mappings is not None
    mapped = {name: (each.start, each.numel) for name, each in rank.mappings[group].items() if each.numel}
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
