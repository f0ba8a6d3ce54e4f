"""Turn the options of `plan()`, a model and a machine into questions for the C++ planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast import _core
from ballast.checks import refuse
from ballast.formats import each_pair
from ballast.models import ModelLike, describe
from ballast.models.description import Description
from ballast.options import Options, TreatedActivations
from ballast.outer.memory import exchange_bytes, outer_state, sent_bytes
from ballast.planning import searching
from ballast.planning.hardware import Budget, notes_of
from ballast.planning.option_text import name_of
from ballast.planning.question import (
    MUON,
    activation_bytes,
    notes_of_formats,
    notes_of_optimizer,
    notes_of_sequence,
    notes_of_unused,
    question_of,
    sequence_of,
)
from ballast.planning.result import ESTIMATED, EXCHANGED, OUTER_STATE, RESERVED, RESERVED_ON_CPU, RESERVED_ON_HOST, Plan
from ballast.planning.searching import coarse_tile
from ballast.schema import changed, require_stage_3
from ballast.tiers import KINDS, fractions_in, set_tiers, spread_of, state_with_parameters, tiers_by_kind

STAGES = (0, 2, 3)  # 1 and 2 do not differ, because gradients are reduced after each use


@dataclass(frozen=True)
class PlanRequest:
    """The request of the caller, in the planner's terms."""

    options: Options
    description: Description
    budget: Budget  # bytes of a rank that are left for the plan
    activations: Mapping[str, int]  # bytes by tier, with those in flight
    of_outer: Mapping[str, int]  # bytes by tier of the outer optimizer, at the stage or else at stage 3
    has_room: bool  # for the activations and the outer optimizer
    exact: _core.Question  # with the engine's tiles
    coarse: _core.Question  # with larger tiles where there are many, which is quicker to simulate
    as_flags: bool = False  # advice names flags of the command line, and not keywords
    offers_kept: bool = False  # the caller has not said how activations are treated

    def of_each_format(self) -> list[PlanRequest]:
        """Return a request for each pair of formats that are allowed, the most exact ones first."""
        options = self.options
        pairs = each_pair(options.state_formats, options.gradient_format)
        if len(pairs) == 1:
            return [self]
        of_pairs = (changed(options, state_format=(pair.state,), gradient_format=(pair.gradients,)) for pair in pairs)
        return [replace(request_of(each, self.description), as_flags=self.as_flags) for each in of_pairs]

    def plan(self, choice: _core.Choice, *, ledger: Sequence[_core.LedgerEntry] | None = None) -> Plan:
        """Turn an answer of the planner into a Plan. `ledger` replaces the memory that the answer holds."""
        options, step, placement = self.options, choice.simulation, choice.placement
        entries = choice.ledger if ledger is None else ledger
        exchange = self._exchange(placement)
        return Plan(
            model=self.description.name,
            parameters=self.description.parameters,
            ranks=options.ranks,
            gpu=options.device_name,
            stage=_stage(placement) if options.stage is None else options.stage,
            state_format=options.formats.state,
            gradient_format=options.formats.gradients,
            wire=options.sent.given(),
            optimizer=options.optimizer,
            replicas=options.parameter_replicas,
            prefetch=options.prefetch,
            keep_gathered=options.keep_gathered,
            outer=options.outer,
            activation_tier=options.activations.tier,
            placement=_tiers(placement),
            memory=self._memory(entries, placement),
            budget=self._budget(),
            fits=fits(self, entries, placement),
            seconds=step.seconds + sum(exchange.values()),
            exposed=step.exposed | exchange,
            critical=step.critical | exchange,
            tokens_per_second=_tokens(options) / (step.seconds + sum(exchange.values())),
            assumed=_rates(options) | {"flops": options.reach},
            tokens=options.tokens,
            micro_steps=options.micro_steps,
            activations=options.activations.amount,
            efficiency=options.efficiency,
            headroom=options.headroom,
            sequence=sequence_of(self.description, options) if self.description.attends else 0,
            price=options.price,
            train_tokens=options.train_tokens,
            active_parameters=self.description.active_parameters if self.description.inactive else None,
            notes=self._notes(placement),
            _question=self.exact,
            _placement=placement,
        )

    def on_command_line(self) -> PlanRequest:
        """Return the same request, whose advice names flags."""
        return replace(self, as_flags=True)

    def with_kept_activations(self, plan: Plan) -> PlanRequest:
        """Return the request for the same stage and formats as the plan, without activation checkpointing."""
        options = changed(
            self.options,
            activations=TreatedActivations("kept", "device"),
            stage=plan.stage,
            state_format=(plan.state_format,),
            gradient_format=(plan.gradient_format,),
        )
        return request_of(options, self.description)

    def not_given(self) -> str:
        """Say which tiers of the machine count as 0 because the caller has not named them."""
        names = [name_of(name, as_flags=self.as_flags) for name in self.options.not_given]
        return f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} not given: 0 assumed" if names else ""

    @property
    def _may_offload(self) -> bool:
        """Whether the caller leaves tiers to the planner, and names none of them."""
        return len(self.options.not_given) == 2 and self.options.offload == "auto"

    def _budget(self) -> dict[str, int]:
        """Return all that a rank has: for the plan, for activations, reserved and left free."""
        reserved = {"device": self.options.reserved, "host": self.options.host_reserve}
        free = self.options.left_free
        return {
            tier: size + self.activations.get(tier, 0) + self.of_outer.get(tier, 0) + reserved.get(tier, 0) + free.get(tier, 0)
            for tier, size in vars(self.budget).items()
        }

    def of_stage(self, stage: int) -> PlanRequest:
        return replace(request_of(changed(self.options, stage=stage), self.description), as_flags=self.as_flags)

    def _exchange(self, placement: _core.Placement) -> dict[str, float]:
        """Return the seconds of a step in which a rank waits for what hosts exchange, by the name of this phase."""
        outer, options = self.options.outer, self.options
        if outer is None:
            return {}
        return {"exchange": sent_bytes(self.exact, placement, outer, options.hosts) / options.all_rates.network / outer.every}

    def _memory(self, ledger: Sequence[_core.LedgerEntry], placement: _core.Placement) -> dict[str, dict[str, int]]:
        memory: dict[str, dict[str, int]] = {tier.name: {} for tier in _core.Tier}
        for entry in ledger:
            owners = memory[tier_in(self.options, entry.tier)]
            owners[entry.owner] = owners.get(entry.owner, 0) + entry.bytes
        for tier, owners in outer_memory(self.exact, self.options, placement).items():
            memory[tier] |= owners
        for tier, size in self.activations.items():
            memory[tier] |= {ESTIMATED: size} if size > 0 else {}
        owner = RESERVED_ON_CPU if self.options.is_on_cpu else RESERVED
        memory["device"] |= {owner: self.options.reserved} if self.options.reserved > 0 else {}
        memory["host"] |= {RESERVED_ON_HOST: self.options.host_reserve} if memory["host"] and self.options.host_reserve else {}
        return memory

    def _notes(self, placement: _core.Placement) -> tuple[str, ...]:
        notes = list(self.description.notes)
        if self.activations["device"] == 0:
            notes.insert(0, "activations are not counted: name their size, or plan from a configuration")
        formats = {unit.dtype for unit in self.description.model.units}
        notes += notes_of_optimizer(self.description, self.options)
        notes += notes_of_sequence(self.description, self.options)
        notes += notes_of_formats(self.description, self.options, as_flags=self.as_flags)
        notes += [] if self.options.is_on_cpu else notes_of(self.options.hardware, formats)
        notes += self.options.measured.notes() if self.options.measured else ()
        notes += [self.not_given()] if self._may_offload else []
        if self.options.update_in_backward and self.options.micro_steps > 1:
            notes.append("updates are not made in the backward pass: that needs one micro-step")
        stage = _stage(placement) if self.options.stage is None else self.options.stage
        return (*notes, *notes_of_unused(self.options, stage, as_flags=self.as_flags))


def request_plan(model: ModelLike, **options: Any) -> PlanRequest:
    """Read the keywords of `plan()`, and describe the model. `pareto_front()` has the same ones."""
    return replace(_described(Options(**options), model), offers_kept=options.get("activations") is None)


def _tokens(options: Options) -> int:
    """Return the tokens of a step, of all ranks."""
    return options.ranks * options.tokens * options.micro_steps


def _described(options: Options, model: ModelLike) -> PlanRequest:
    require_stage_3(options, options.stage)
    options.wire.require_possible(options.stage)
    if options.resumable:
        _require_state_on_drives(options)
    if options.optimizer == MUON and options.outer is not None:
        refuse("outer= exchanges the parameters of one optimizer", needed="one optimizer for all parameters")
    description = describe(model, dtype=options.dtype)
    _require_counted_time(options, description)
    return request_of(options, description)


def _require_state_on_drives(options: Options) -> None:
    """Refuse a run that `wrap(run=)` refuses."""
    if options.outer is not None:
        refuse(
            "resumable and outer exclude each other: drives do not keep the outer optimizer of a run",
            needed="ballast.save() and ballast.load_checkpoint(), which keep it",
        )
    if options.offload == "auto":
        return
    tiers = {} if options.offload == "none" else tiers_by_kind(options.offload)
    if spread_of(tiers.get("state", "device")).nvme < 1.0:
        refuse(
            f"cannot plan a run that resumes with offload={options.offload!r}: its state is not all on drives",
            needed='offload="auto", or the state on "nvme"',
        )


def _require_counted_time(options: Options, description: Description) -> None:
    """Refuse to compute a cost from a time without the model's arithmetic."""
    if (options.price is not None or options.train_tokens is not None) and not any(description.flops):
        refuse(
            "cannot compute the cost or the length of a training: the time of this model's arithmetic is not known",
            where=description.name,
            needed="a model with matrices, whose work for each token the planner counts",
        )


def request_of(options: Options, description: Description) -> PlanRequest:
    """Divide the machine among its ranks, and make the questions for the planner."""
    activations = activation_bytes(description, options)
    left = left_of(options, activations)
    has_room = left["device"] > 0 and min(left.values()) >= 0
    host, drives = (0, 0) if options.offload == "none" else (left["host"], left["nvme"])
    budget = Budget(device=max(0, left["device"]), host=max(0, host), nvme=max(0, drives))
    exact = question_of(description, options, budget)
    stage = 3 if options.stage is None else options.stage
    of_outer = _by_tier(outer_memory(exact, options, _core.placement_of_stage(stage, options.ranks_of_host)))
    has_room = has_room and searching.fits(of_outer, left)
    if of_outer and has_room:
        budget = Budget(**{tier: max(0, size - of_outer.get(tier, 0)) for tier, size in vars(budget).items()})
        exact = question_of(description, options, budget)
    tile = coarse_tile(description.parameters // (1 if options.stage == 0 else options.ranks_of_host))
    coarse = question_of(description, options, budget, tile=tile)
    return PlanRequest(options, description, budget, activations, of_outer, has_room, exact, coarse)


def left_of(options: Options, activations: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of a rank that activations leave, by tier. They are negative where these need more."""
    device = options.hardware.memory - options.reserved - options.left_free["device"]
    whole = {"device": device, **options.room}
    return {tier: size - activations.get(tier, 0) for tier, size in whole.items()}


def tier_in(options: Options, tier: _core.Tier) -> str:
    """Return the tier whose memory this is. On CPUs the host is the device."""
    return "device" if options.is_on_cpu and tier == _core.Tier.host else tier.name


def outer_memory(question: _core.Question, options: Options, placement: _core.Placement) -> dict[str, dict[str, int]]:
    """Return the bytes of the outer optimizer, by tier and owner."""
    if options.outer is None:
        return {}
    memory: dict[str, dict[str, int]] = {}
    for tier, size in outer_state(question, placement, options.outer).items():
        owners = memory.setdefault(tier_in(options, _core.Tier[tier]), {})
        owners[OUTER_STATE] = owners.get(OUTER_STATE, 0) + size
    memory.setdefault(tier_in(options, _core.Tier.host), {})[EXCHANGED] = exchange_bytes(question, placement, options.outer)
    return memory


def _by_tier(memory: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    return {tier: sum(owners.values()) for tier, owners in memory.items()}


def fits(request: PlanRequest, ledger: Sequence[_core.LedgerEntry], placement: _core.Placement) -> bool:
    """Return whether each tier has room for the entries of a plan, and for the outer optimizer."""
    needs = {tier.name: 0 for tier in _core.Tier}
    for entry in ledger:
        needs[tier_in(request.options, entry.tier)] += entry.bytes
    for tier, size in _by_tier(outer_memory(request.exact, request.options, placement)).items():
        needs[tier] += size - request.of_outer[tier]
    return searching.fits(needs, vars(request.budget))


def _rates(options: Options) -> dict[str, float]:
    """Return the rates that the plan depends on, by the names and with the values that the caller may give."""
    unused = ["network"] if options.ranks <= options.ranks_of_machine and options.hosts == 1 else []
    unused += ["device_memory"] if options.is_on_cpu else []  # the host is the device
    return {name: rate for name, rate in vars(options.all_rates).items() if name not in unused}


def _tiers(placement: _core.Placement) -> dict[str, dict[str, float]]:
    """Return where parameters, gradients and state are: the state is no nearer than the parameters."""
    by_kind = {kind: fractions_in(getattr(placement, kind)) for kind in KINDS}
    return by_kind | {"state": state_with_parameters(by_kind["parameters"], by_kind["state"])}


def _stage(placement: _core.Placement) -> int:
    if not placement.full_parameters:
        return 3
    return 0 if placement.shards == 1 else 2


# --- What a request leaves open ---


def stages(options: Options) -> tuple[int, ...]:
    """Return the requested stage, or else all stages that differ."""
    if options.stage is not None:
        return (options.stage,)
    if options.parameter_replicas == 1 and (options.chooses_tiers or _parameters(options) == _core.Spread(device=1.0)):
        return options.wire.stages(STAGES, options.ranks_of_host)
    return (3,)  # below stage 3 each rank keeps all parameters, on the device


def candidates(request: PlanRequest) -> list[_core.Placement]:
    """Return all placements, or the requested one in each stage."""
    if request.options.chooses_tiers:
        return _with_state_on_drives(request) if request.options.resumable else request.exact.placements()
    placements = []
    for stage in stages(request.options):
        placement = _core.placement_of_stage(stage, request.options.ranks_of_host)
        placement.parameter_replicas = request.options.parameter_replicas
        set_tiers(placement, request.options.offload)
        placements.append(placement)
    return placements


def _with_state_on_drives(request: PlanRequest) -> list[_core.Placement]:
    """Return all placements of a run that resumes, whose state is all on drives. A machine without drives has them, too: the
    error then names the missing space."""
    with_drives = replace(request.budget, nvme=max(1, request.budget.nvme))
    placements = question_of(request.description, request.options, with_drives).placements()
    return [placement for placement in placements if placement.state.nvme == 1.0]


def _parameters(options: Options) -> _core.Spread:
    return spread_of(tiers_by_kind(options.offload).get("parameters", "device"))
