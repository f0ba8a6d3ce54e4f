"""The fragments of the parameters: the step at which each is exchanged, and the memory that the outer optimizer takes for them
on a rank, by tier, before there is one. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ballast import _core
from ballast.outer.options import DiLoCo


def fragments_of(elements: Sequence[int], fragments: int) -> list[int]:
    """Return the fragment of each parameter, from their numbers of elements. Fragments are runs of whole parameters, of
    nearly equal size.

    >>> fragments_of([4, 4, 1, 1, 1, 1], 3)
    [0, 1, 2, 2, 2, 2]
    """
    total, before, found = sum(elements), 0, []
    for count in elements:
        middle = before + count / 2
        found.append(min(int(middle * fragments / total), fragments - 1) if total else 0)
        before += count
    return found


def due_at(step: int, every: int, fragments: int) -> int | None:
    """Return the fragment that is exchanged after this step, counted from 1; None if there is none. The last one is
    exchanged after each `every` steps, and the others at equal distances before it.

    >>> [due_at(step, every=4, fragments=2) for step in range(1, 9)]
    [None, 0, None, 1, None, 0, None, 1]
    """
    position = (step - 1) % every + 1
    return next((number for number in range(fragments) if every * (number + 1) // fragments == position), None)


def part_of_rank(elements: int, rank: int, ranks: int) -> slice:
    """Return the elements of a rank, where ranks that have all elements divide them. The last ranks may have fewer, or none.

    >>> [part_of_rank(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    each = -(-elements // ranks)
    return slice(min(rank * each, elements), min((rank + 1) * each, elements))


PIECE = 1 << 20  # elements that are updated at a time: memory for more gradients is not needed

GROUP = 128  # values that share a scale on the wire
BYTES_OF_GROUP = {"exact": 4 * GROUP, "int8": GROUP + 4, "int4": GROUP // 2 + 4}

Bytes = dict[str, int]  # keys: tiers


def model_of_shard(name: str, elements: int) -> _core.Model:
    """Return the model that the outer optimizer trains for one fragment: this rank's shard of it, cut into pieces."""
    sizes = [min(PIECE, elements - begin) for begin in range(0, elements, PIECE)]
    units = [(f"{name}, piece {number}", size) for number, size in enumerate(sizes)]
    return _core.Model([_core.Unit(each, dtype=_core.DType.fp32, tensors=[_core.Tensor(each, [size])]) for each, size in units])


def set_training_of_shard(core: Any, units: int) -> None:
    """Set the options of that training, in a question to the planner or for the engine. Stage 3 keeps parameters too where the
    options say, and updates in the backward pass keep no gradients."""
    core.stage, core.format, core.gradient_format = 3, _core.StateFormat.fp32, _core.GradientFormat.fp32
    core.update_in_backward, core.trace = True, [_core.Visit(unit, _core.Phase.backward) for unit in range(units)]


def fragment_elements(question: _core.Question, placement: _core.Placement, options: DiLoCo, rank: int) -> list[int]:
    """Return the elements of each fragment that a rank exchanges, of the model of a question."""
    kept = _kept_of_fragments(question, placement, options, rank)
    if _divides(question, placement):
        parts = [part_of_rank(elements, rank, question.ranks) for elements in kept]
        return [part.stop - part.start for part in parts]
    return kept


def _divides(question: _core.Question, placement: _core.Placement) -> bool:
    """Whether each rank has all parameters, and exchanges a part of them."""
    return placement.shards == 1 and question.ranks > 1


def _kept_of_fragments(question: _core.Question, placement: _core.Placement, options: DiLoCo, rank: int) -> list[int]:
    """Return the elements of each fragment whose state a rank keeps."""
    kept = question.kept_elements(placement, rank=rank)
    tensors = [
        (tensor, elements)
        for unit, unit_elements in zip(question.model.units, kept)
        for tensor, elements in zip(unit.tensors, unit_elements)
        if not tensor.frozen
    ]
    tensors.sort(key=lambda each: -1 if each[0].number is None else each[0].number)
    totals = [0] * options.fragments
    for (_, elements), fragment in zip(tensors, fragments_of([each.elements for each, _ in tensors], options.fragments)):
        totals[fragment] += elements
    return totals


def outer_state(question: _core.Question, placement: _core.Placement, options: DiLoCo) -> Bytes:
    """Return what the tables of `optimizer.memory()` will add up to on the rank that needs the most."""
    totals = []
    for elements in {tuple(elements) for elements in _elements_by_rank(question, placement, options)}:
        total: Counter[str] = Counter()
        for count in filter(None, elements):
            total.update(dict(_fragment_bytes(count, options.tier, options.momentum > 0)))
        totals.append(total)
    most = max(totals, key=lambda total: total.total())
    return dict(most)


def exchange_bytes(question: _core.Question, placement: _core.Placement, options: DiLoCo) -> int:
    """Return the host memory for the values of a fragment while it is exchanged, on the rank that needs the most. Where hosts
    may be lost, there are the averages too. Where ranks divide a fragment, there is afterwards the whole one."""
    largest = max(max(elements) for elements in _elements_by_rank(question, placement, options))
    if _divides(question, placement):
        return 4 * (largest + max(_kept_of_fragments(question, placement, options, rank=0)))
    return (8 if options.survive_lost_hosts else 4) * largest


def sent_bytes(question: _core.Question, placement: _core.Placement, options: DiLoCo, hosts: int) -> float:
    """Return what a rank sends to other hosts in an exchange of all fragments: its share of the values, and its share of the
    result."""
    elements = max(sum(elements) for elements in _elements_by_rank(question, placement, options))
    return 2 * (1 - 1 / hosts) * BYTES_OF_GROUP[options.wire] / GROUP * elements


def _elements_by_rank(question: _core.Question, placement: _core.Placement, options: DiLoCo) -> list[list[int]]:
    ranks = question.ranks if _divides(question, placement) else placement.shards
    return [fragment_elements(question, placement, options, rank) for rank in range(ranks)]


@lru_cache(maxsize=1024)
def _fragment_bytes(elements: int, tier: str, has_momentum: bool) -> tuple[tuple[str, int], ...]:
    """Return the bytes in each tier. State in other tiers than the device is updated by CPUs, whose device is the host."""
    machine = _core.Machine()
    machine.host_is_device = machine.one_pool = tier != "device"
    question = _core.Question(model_of_shard("", elements), machine)
    question.ranks, units = 1, len(question.model.units)
    set_training_of_shard(question, units)
    question.set_optimizer("sgd_momentum" if has_momentum else "sgd")
    question.set_work([(0.0, 0.0)] * units)
    placement = _core.placement_of_stage(3, 1)
    if tier == "nvme":
        placement.parameters = placement.state = _core.Spread(nvme=1.0)
    total: Bytes = {}
    for entry in question.memory(placement):
        home = entry.tier.name if tier == "device" or entry.tier.name == "nvme" else "host"
        total[home] = total.get(home, 0) + entry.bytes
    return tuple(total.items())
