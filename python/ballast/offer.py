"""A model and a machine, ready for the C++ planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast import _core, searching
from ballast import options as options_
from ballast.hardware import RATES, Budget, machine
from ballast.models import ModelLike, describe
from ballast.models.description import Description
from ballast.options import Options
from ballast.places import KINDS, fractions_in
from ballast.result import ESTIMATED, RESERVED, Plan
from ballast.searching import coarse_tile


@dataclass(frozen=True)
class Offer:
    """What is asked, in the planner's words."""

    options: Options
    described: Description
    budget: Budget  # what is left for the plan, of a rank
    activations: int
    exact: _core.Question  # with the tiles of the engine
    coarse: _core.Question

    def plan(self, choice: _core.Choice, *, ledger: Sequence[_core.LedgerEntry] | None = None) -> Plan:
        """An answer of the planner, for people; `ledger` instead of its own."""
        asked, step, placement = self.options, choice.simulation, choice.placement
        entries = choice.ledger if ledger is None else ledger
        used = _machine(asked, self.budget)
        return Plan(
            model=self.described.name,
            parameters=self.described.parameters,
            ranks=asked.ranks,
            gpu=asked.gpu,
            stage=_stage(placement) if asked.stage is None else asked.stage,
            format=asked.format,
            places={kind: fractions_in(getattr(placement, kind)) for kind in KINDS},
            memory=self._memory(entries),
            budget={**vars(self.budget), "device": self.budget.device + self.activations + asked.reserve},
            fits=fits(self, entries),
            seconds=step.seconds,
            exposed=step.exposed,
            critical=step.critical,
            tokens_per_second=asked.ranks * asked.tokens * asked.micro_steps / step.seconds,
            assumed={name: getattr(used, name) for name in RATES} | {"flops": asked.hardware.flops * asked.efficiency},
            notes=self._notes(),
            _question=self.exact,
            _placement=placement,
        )

    def _memory(self, ledger: Sequence[_core.LedgerEntry]) -> dict[str, dict[str, int]]:
        memory: dict[str, dict[str, int]] = {tier.name: {} for tier in _core.Tier}
        for entry in ledger:
            memory[entry.tier.name][entry.owner] = entry.bytes
        extra = {ESTIMATED: self.activations, RESERVED: self.options.reserve}
        memory["device"] |= {owner: size for owner, size in extra.items() if size > 0}
        return memory

    def _notes(self) -> tuple[str, ...]:
        notes = list(self.described.notes)
        if self.activations == 0:
            notes.insert(0, "activations are not counted: name their size, or plan from a configuration")
        if not self.options.clipping and self.options.micro_steps > 1:
            notes.append("updates are not made in the backward pass: that needs one micro-step")
        return tuple(notes)


def offer(model: ModelLike, given: Mapping[str, Any]) -> Offer:
    """Reads options and model, and divides the machine by its ranks."""
    asked = options_.read(given)
    return offer_of(asked, describe(model, dtype=asked.dtype))


def offer_of(asked: Options, described: Description) -> Offer:
    """The same, of options that are read and a model that is described."""
    activations = _activations(described, asked)
    memory = asked.hardware.memory if asked.gpu_memory is None else asked.gpu_memory
    left = max(0, memory - activations - asked.reserve)
    parts = asked.ranks_of_machine
    host, drives = (0, 0) if asked.offload == "none" else (asked.host_memory // parts, asked.drives // parts)
    budget = Budget(device=left, host=host, nvme=drives)
    exact = _question(described, asked, budget)
    coarse = _question(described, asked, budget)
    coarse.tile_elements = coarse_tile(described.parameters // (1 if asked.stage == 0 else asked.ranks))
    return Offer(asked, described, budget, activations, exact, coarse)


def fits(asked: Offer, ledger: Sequence[_core.LedgerEntry]) -> bool:
    """Whether each tier has room for what a plan needs of it."""
    needs = {tier.name: 0 for tier in _core.Tier}
    for entry in ledger:
        needs[entry.tier.name] += entry.bytes
    return searching.fits(needs, vars(asked.budget))


def _machine(asked: Options, budget: Budget) -> _core.Machine:
    return machine(budget, asked.all_rates, ranks=asked.ranks, ranks_of_machine=asked.ranks_of_machine)


def _question(described: Description, asked: Options, budget: Budget) -> _core.Question:
    question = _core.Question(described.model, _machine(asked, budget))
    question.ranks, question.stage, question.micro_steps = asked.ranks, asked.stage, asked.micro_steps
    question.format = _core.StateFormat[asked.format]
    question.whole_records = asked.resumable
    question.set_optimizer(asked.optimizer)
    question.set_work(_work(described, asked))
    if not asked.clipping:
        schedule = _core.Schedule()
        schedule.update_in_backward = asked.micro_steps == 1
        question.schedule = schedule
    return question


def _work(described: Description, asked: Options) -> list[tuple[float, float]]:
    """Seconds of each unit: backward is twice the forward, and does it again where activations were not kept."""
    speed = asked.hardware.flops * asked.efficiency
    sequence = min(asked.sequence, asked.tokens)
    again = 3.0 if asked.activations == "checkpointed" and described.activations else 2.0
    attention = described.attention or [0.0] * len(described.flops)
    forward = [asked.tokens * (f + a * sequence) / speed for f, a in zip(described.flops, attention, strict=True)]
    return [(seconds, again * seconds) for seconds in forward]


def _activations(described: Description, asked: Options) -> int:
    if isinstance(asked.activations, int):
        return asked.activations
    if described.activations is None:
        return 0
    return described.activations.bytes(asked.tokens, checkpointed=asked.activations == "checkpointed")


def _stage(placement: _core.Placement) -> int:
    if not placement.whole_parameters:
        return 3
    return 0 if placement.shards == 1 else 2
