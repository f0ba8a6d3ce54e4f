"""Turn the options of `plan()`, a model and a machine into questions for the C++ planner, find the placement with the shortest
predicted step among those that fit, and make plans of the answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ballast import _core
from ballast.checks import refuse
from ballast.errors import OutOfMemoryError
from ballast.formats import each_pair, that_need_bf16, units_ahead
from ballast.models import ModelLike, describe
from ballast.models.adapters import with_adapters
from ballast.models.description import (
    OF_ATTENTION,
    OF_MATRICES,
    Attention,
    Description,
    Divided,
    bytes_of_element,
    divide,
    is_block,
    with_divided_experts,
)
from ballast.options import Options
from ballast.outer.fragments import exchange_bytes, outer_state, sent_bytes
from ballast.planning.hardware import ATTENTION_REACH, CORE_UPDATES, GPU_UPDATES, machine, notes_of
from ballast.planning.result import (
    ESTIMATED,
    EXCHANGED,
    OF_CODES,
    OUTER_STATE,
    RESERVED,
    RESERVED_IN_POOL,
    RESERVED_ON_CPU,
    RESERVED_ON_HOST,
    Plan,
)
from ballast.schema import changed, option_name, options_of_stage_3, require_stage_3, set_core
from ballast.sizes import human_amount, human_size, parse_size
from ballast.tiers import IN_FLIGHT, KINDS, fractions_in, set_tiers, spread_of, state_with_parameters, tiers_by_kind

LARGEST_TILE = 2 << 20  # elements of the engine's tiles outside the device, in a large model
COARSE_TILES = 2048  # enough for a rank to compare placements: rates are not known to more than a hundredth of a step
MUON = "muon"
USUAL_SEQUENCE = 4096
STAGES = (0, 2, 3)  # 1 and 2 do not differ, because gradients are reduced after each use


def coarse_tile(elements: int, *, tile: int = 0) -> int:
    """Return the size of tiles for comparing placements, for a rank with this many elements.

    It is `tile` where a rank has few of those; 0 stands for the engine's own sizes.

    >>> coarse_tile(10**9), coarse_tile(10**9, tile=1024), coarse_tile(70 * 10**9) >> 20
    (0, 487424, 32)
    """
    size = tile or LARGEST_TILE
    larger = elements // (size * COARSE_TILES)
    return size * larger if larger > 1 else tile


def has_room_for(needs: Mapping[str, int], has: Mapping[str, int]) -> bool:
    return all(size <= has[tier] for tier, size in needs.items())


def fastest(exact: _core.Question, coarse: _core.Question, has: Mapping[str, int]) -> _core.Choice:
    """Search with large tiles, which is fast, then price the result with the engine's tiles.

    Raises B2004 where nothing fits."""
    try:
        choice = coarse.choose()
    except OutOfMemoryError:
        if not any_fits(exact, coarse, has):
            raise
        return exact.choose()
    return exact.price(choice.placement) if has_room_for(exact.needs(choice.placement), has) else exact.choose()


def any_fits(exact: _core.Question, coarse: _core.Question, has: Mapping[str, int]) -> bool:
    """Return whether a placement fits with the engine's tiles, among those that fit, or nearly fit, with large
    tiles."""
    for placement in exact.placements():
        needs = coarse.needs(placement)
        margin = sum(needs.values()) // 20  # large tiles change a tier's memory by a few hundredths of the total
        if has_room_for(needs, {tier: size + margin for tier, size in has.items()}) and has_room_for(
            exact.needs(placement), has
        ):
            return True
    return False


def by_tier(sizes: Mapping[str, int]) -> str:
    """Format sizes for messages.

    >>> by_tier({"device": 3 << 30, "host": 0})
    'device 3 GiB, host 0 B'
    """
    return ", ".join(f"{tier} {human_size(size)}" for tier, size in sizes.items())


def question_of(description: Description, options: Options, budget: Mapping[str, int], *, tile: int = 0) -> _core.Question:
    """Return the question, with at most this many elements in a tile (0: as the library chooses). With Muon, it is that of the
    matrices, and AdamW has the other parameters in a step that comes after theirs."""
    if options.expert_parallel > 1:
        description = with_divided_experts(description, options.expert_parallel)
    divided = _divided(description) if options.optimizer == MUON else None
    work = _work(description, options)
    places = divided.matrices.places if divided else range(len(work))
    can_wait = description.scripted is None
    question = _question(divided.matrices.model if divided else description.model, options, budget, tile, can_wait=can_wait)
    question.prefetch = units_ahead(description.formats, options.prefetch)
    question.set_optimizer(options.optimizer)
    question.set_work([work[place] for place in places])
    tier = options.activations.tier
    if tier != "device":
        of_a_micro_step = activation_bytes(description, changed(options, layer_major=False))
        away = _unit_bytes(description, of_a_micro_step[tier])
        question.set_activations(_core.Tier[tier], [away[place] for place in places])
    if divided and divided.others:  # a unit in both parts computes with its matrices
        other = _question(divided.others.model, options, budget, tile, can_wait=can_wait)
        other.set_optimizer("adamw")
        other.set_work([(0.0, 0.0) if place in places else work[place] for place in divided.others.places])
        question.set_other(other)
    return question


def _question(
    model: _core.Model, options: Options, budget: Mapping[str, int], tile: int, *, can_wait: bool = True
) -> _core.Question:
    question = _core.Question(model, machine_of(options, budget))
    set_core(question, options)
    question.ranks, question.tile_elements, question.wire = options.ranks_of_host, tile, options.sent.for_core()
    question.update_in_backward = _updates_in_backward(options)
    # wrap() lets updates continue when a step below stage 3 returns if they take time that way, and uses can wait for them.
    takes_time = not options.is_on_cpu or options.ranks_of_host > 1 or options.offload not in ("auto", "none")
    question.overlap_gathers = can_wait and takes_time
    question.waits_for_updates = not can_wait
    if len(possible := stages(options)) == 1:
        question.stage = possible[0]
    return question


def _updates_in_backward(options: Options) -> bool:
    return options.update_in_backward and (options.micro_steps == 1 or options.layer_major)


def notes_of_optimizer(description: Description, options: Options) -> list[str]:
    """Return a note with the number of parameters that AdamW updates next to Muon."""
    if options.optimizer != MUON:
        return []
    part = _divided(description).others
    if part is None:
        return []
    others = sum(tensor.elements for unit in part.model.units for tensor in unit.tensors if not tensor.frozen)
    note = f"AdamW for {human_amount(others)} parameters that are no matrices of blocks: wrap([muon, adamw], model)"
    return [note] if others else []


def sequence_of(description: Description, options: Options) -> int:
    """Return the tokens that attend to each other: those that the caller names, or the usual number where the model takes as
    many. All are in one micro-step."""
    usual = min(USUAL_SEQUENCE, description.longest or USUAL_SEQUENCE)
    return min(options.sequence or usual, options.tokens)


def notes_of_sequence(description: Description, options: Options) -> list[str]:
    """Return a note where the sequence that the caller names is longer than a micro-step or than the model takes."""
    if options.sequence is None or not description.attends:
        return []
    if options.sequence > options.tokens:
        return [f"a micro-step has {options.tokens:,} tokens: sequences of {options.sequence:,} are cut to that"]
    longest = description.longest or options.sequence
    return [f"the configuration names {longest:,} tokens as the longest sequence"] if options.sequence > longest else []


def notes_of_formats(description: Description, options: Options, *, as_flags: bool) -> list[str]:
    """Return a note for each format of bf16 parameters, where none is trained."""
    trained = {unit.dtype for unit in description.model.units if not all(tensor.frozen for tensor in unit.tensors)}
    if _core.DType.bf16 in trained:
        return []
    why = "no trained parameter is in bf16, and others keep state and gradients in fp32"
    unused = that_need_bf16(options.formats)
    return [f"{option_name(name, as_flags=as_flags)} {value} has no effect: {why}" for name, value in unused.items()]


def notes_of_unused(options: Options, stage: int, *, as_flags: bool) -> list[str]:
    """Return a note for each option that has no effect on these ranks, or in the stage of the plan."""
    notes = []
    if options.wire.given() and options.ranks_of_host == 1:
        notes.append(f"wire has no effect {'on one rank' if options.ranks == 1 else 'with one rank on each host'}")
    elif options.wire.across is not None and options.ranks <= options.ranks_of_machine:
        notes.append("wire across has no effect: all ranks are on one machine")
    for name in options_of_stage_3(options) if stage < 3 else []:
        option = option_name(name, as_flags=as_flags)
        notes.append(f"{option} has no effect in stage {stage}, where each rank keeps all parameters")
    if options.outer is not None and options.hosts == 1:
        ranks = "there is one rank" if options.ranks == 1 else "all ranks are on one machine"
        why = f": {ranks}" if options.outer.hosts is None else ""
        notes.append(f"the outer optimizer has one host and exchanges nothing{why}")
    return notes


def _divided(description: Description) -> Divided:
    divided = divide(description.model)
    if divided is None:
        refuse(
            "Muon is for the matrices of repeated blocks, and this model has none",
            where=description.name,
            needed='another optimizer, such as "adamw"',
        )
    return divided


def _work(description: Description, options: Options) -> list[tuple[float, float]]:
    """Return the seconds of each unit, forward and backward: of products, which also load their matrices, so that few tokens
    are slower; of attention; and of the operations between them, which wait for memory. Activation checkpointing repeats the
    forward pass of blocks, "selective" the last of the three; the head is not repeated. Frozen parameters need no gradients."""
    sequence = sequence_of(description, options)
    units, tokens = description.model.units, options.tokens
    attention = [each.of(sequence) for each in description.attention or [Attention(0.0)] * len(units)]
    frozen = description.frozen_flops or [0.0] * len(units)
    treatment = options.activations.amount if description.activations is not None else "kept"
    attends, rate = options.reach, math.inf  # where the caller says what all of the model reaches
    if options.passes > 0:
        attends, rate = ATTENTION_REACH * options.reach, options.all_rates.device_memory
    work = []
    for unit, flops, moved, scores, without in zip(
        units, description.flops, description.moved(), attention, frozen, strict=True
    ):
        element, chunks = bytes_of_element(unit.dtype), 1 if is_block(unit) else -(-tokens // (options.loss_chunk or tokens))
        matrices = tokens * flops / options.reach + chunks * flops / 2 * element / rate
        between = tokens * scores / attends
        memory = tokens * options.passes * moved * element / rate
        repeated = {"checkpointed": matrices + between + memory, "selective": memory}.get(str(treatment), 0.0)
        backward = OF_MATRICES * (matrices + memory) + OF_ATTENTION * between - matrices * without / (flops or 1.0)
        work.append((matrices + between + memory, backward + (repeated if is_block(unit) or len(units) == 1 else 0.0)))
    return work


def activation_bytes(description: Description, options: Options) -> dict[str, int]:
    """Return the bytes of activations by tier, and of what packed matrices need on the device. A drive needs buffers on the
    host."""
    amount, tier = options.activations
    known = description.activations
    if isinstance(amount, int):
        all_of_them = away = amount
        on_device = min(away, 2 * away // len(description.unit_names))
    elif known is None:
        all_of_them = on_device = away = 0
    else:
        all_of_them = known.bytes(options.tokens, amount, loss_chunk=options.loss_chunk)
        on_device, away = known.offloaded(options.tokens, amount, loss_chunk=options.loss_chunk)
    further = options.micro_steps - 1 if options.layer_major else 0  # micro-steps whose layers' inputs are kept too
    if tier == "device":
        return {"device": all_of_them + further * away + description.resident}
    sizes = {"device": on_device + description.resident, tier: (1 + further) * away}
    if tier == "nvme":
        pool = tier_in(options, _core.Tier.host)
        sizes[pool] = sizes.get(pool, 0) + parse_size(IN_FLIGHT)
    return sizes


def _unit_bytes(description: Description, size: int) -> list[int]:
    """Divide activations among the units with attention, in other models by their flops."""
    attention = [unit.flops for unit in description.attention]
    weights = attention if any(attention) else description.flops
    total = sum(weights) or 1.0
    return [int(size * weight / total) for weight in weights]


def machine_of(options: Options, budget: Mapping[str, int]) -> _core.Machine:
    made = machine(budget, options.all_rates, ranks=options.ranks_of_host, ranks_of_machine=options.ranks_of_machine)
    made.products = options.reach
    made.device_updates = GPU_UPDATES.get(options.formats.state, math.inf)
    made.host_updates = CORE_UPDATES[options.formats.state] * options.cores / options.ranks_of_machine
    if options.is_on_cpu:
        made.device_memory, made.device_updates = made.host_memory, made.host_updates
        made.shares_cores = made.host_is_device = True
    made.one_pool = options.has_one_pool
    return made


@dataclass(frozen=True)
class PlanRequest:
    options: Options
    description: Description
    budget: Mapping[str, int]  # bytes of a rank that are left for the plan, by tier
    activations: Mapping[str, int]  # bytes by tier, with those in flight
    outer_bytes: Mapping[str, int]  # bytes by tier of the outer optimizer, at the stage or else at stage 3
    has_room: bool  # whether the activations and the outer optimizer fit
    exact: _core.Question  # has the engine's tiles
    coarse: _core.Question  # has larger tiles where there are many, which is quicker to simulate
    as_flags: bool = False  # advice names flags of the command line, and not keywords
    offers_kept: bool = False  # the caller has not said how activations are treated

    def by_format(self) -> list[PlanRequest]:
        """Return a request for each pair of formats that are allowed, the most exact ones first."""
        options = self.options
        pairs = each_pair(options.state_formats, options.gradient_format)
        if len(pairs) == 1:
            return [self]
        return [self.changed(state_format=(pair.state,), gradient_format=(pair.gradients,)) for pair in pairs]

    def changed(self, **options: Any) -> PlanRequest:
        """Return the request with other values of options, as they are after they have been read."""
        return replace(request_of(changed(self.options, **options), self.description), as_flags=self.as_flags)

    def plan(self, choice: _core.Choice, *, ledger: Sequence[_core.LedgerEntry] | None = None) -> Plan:
        """Turn an answer of the planner into a Plan. `ledger` replaces the memory that the answer holds."""
        options, step, placement = self.options, choice.simulation, choice.placement
        same = ["ranks", "expert_parallel", "optimizer", "prefetch", "keep_gathered", "outer"]
        same += ["tokens", "micro_steps", "headroom", "price", "train_tokens"]
        entries = choice.ledger if ledger is None else ledger
        exchange = self._exchange(placement)
        seconds = step.seconds + sum(exchange.values())
        tiers = {kind: fractions_in(getattr(placement, kind)) for kind in KINDS}
        tiers["state"] = state_with_parameters(tiers["parameters"], tiers["state"])
        return Plan(
            model=self.description.name,
            parameters=self.description.parameters,
            gpu=options.device_name,
            stage=self._stage(placement),
            state_format=options.formats.state,
            gradient_format=options.formats.gradients,
            wire=options.sent.given(),
            replicas=options.parameter_replicas,
            activation_tier=options.activations.tier,
            placement=tiers,
            memory=self._memory(entries, placement),
            budget=self._budget(),
            fits=fits(self, entries, placement),
            seconds=seconds,
            exposed=step.exposed | exchange,
            critical=step.critical | exchange,
            tokens_per_second=options.ranks * options.tokens * options.micro_steps / seconds,
            efficiency=options.reach / options.hardware.flops,
            assumed=_rates(options) | {"flops": options.reach},
            activations=options.activations.amount,
            sequence=sequence_of(self.description, options) if self.description.attends else 0,
            active_parameters=self.description.active_parameters if self.description.inactive else None,
            notes=self._notes(placement),
            **{name: getattr(options, name) for name in same},
            _question=self.exact,
            _placement=placement,
        )

    def not_given(self) -> str:
        """Say which tiers of the machine count as 0 because the caller has not named them."""
        names = [option_name(name, as_flags=self.as_flags) for name in self.options.not_given]
        return f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} not given: 0 assumed" if names else ""

    def _budget(self) -> dict[str, int]:
        """Return all that a rank has: for the plan, for activations, reserved and left free."""
        reserved = {"device": self.options.reserved, "host": self.options.host_reserve}
        parts = (self.budget, self.activations, self.outer_bytes, reserved, self.options.left_free)
        return {tier: sum(part.get(tier, 0) for part in parts) for tier in self.budget}

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
            resident = self.description.resident if tier == "device" else 0
            memory[tier] |= {ESTIMATED: size - resident} if size > resident else {}
            memory[tier] |= {OF_CODES: resident} if resident else {}
        pools = {True: RESERVED_ON_CPU, False: RESERVED_IN_POOL}
        owner = pools[self.options.is_on_cpu] if self.options.has_one_pool else RESERVED
        memory["device"] |= {owner: self.options.reserved} if self.options.reserved > 0 else {}
        memory["host"] |= {RESERVED_ON_HOST: self.options.host_reserve} if memory["host"] and self.options.host_reserve else {}
        return memory

    def _notes(self, placement: _core.Placement) -> tuple[str, ...]:
        notes = list(self.description.notes)
        if self.description.scripted is not None:
            module = f"torch.jit has module {self.description.scripted}"
            notes.append(f"{module}, which cannot wait for its parameters: a step returns when all are updated, below stage 3")
        if self.options.expert_parallel > 1:
            notes.append("the exchange of tokens between ranks with other experts is not counted")
        if self.activations["device"] == self.description.resident:
            notes.insert(0, "activations are not counted: name their size, or plan from a configuration")
        units = zip(self.description.flops, self.description.model.units)
        formats = {max(units, key=lambda unit: unit[0])[1].dtype}  # adapters in fp32 have few of the products
        notes += notes_of_optimizer(self.description, self.options) + notes_of_sequence(self.description, self.options)
        notes += notes_of_formats(self.description, self.options, as_flags=self.as_flags)
        notes += [] if self.options.is_on_cpu else notes_of(self.options.hardware, formats)
        notes += self.options.measured.notes() if self.options.measured else ()
        if len(self.options.not_given) == 2 and self.options.offload == "auto":  # the planner has no tier to choose
            notes.append(self.not_given())
        if self.options.update_in_backward and not _updates_in_backward(self.options):
            notes.append("updates are not made in the backward pass: that needs one micro-step")
        return (*notes, *notes_of_unused(self.options, self._stage(placement), as_flags=self.as_flags))

    def _stage(self, placement: _core.Placement) -> int:
        if self.options.stage is not None or not placement.full_parameters:
            return 3 if self.options.stage is None else self.options.stage
        return 0 if placement.shards == 1 else 2


def request_plan(model: ModelLike, **options: Any) -> PlanRequest:
    """Read the keywords of `plan()`, and describe the model. `pareto_front()` has the same ones."""
    return replace(_described(Options(**options), model), offers_kept=options.get("activations") is None)


def _described(options: Options, model: ModelLike) -> PlanRequest:
    require_stage_3(options, options.stage)
    options.wire.require_possible(options.stage)
    _require_one_budget(options)
    if options.resumable:
        _require_state_on_drives(options)
    if options.expert_parallel > 1:
        _require_shared_experts(options)
    if options.optimizer == MUON and options.outer is not None:
        refuse("outer= exchanges the parameters of one optimizer", needed="one optimizer for all parameters")
    description = describe(model, dtype=options.dtype or ("bf16" if options.base_format else None))
    if options.lora is not None:
        description = with_adapters(description, options.lora, options.base_format)
    _require_counted_time(options, description)
    return request_of(options if description.scripted is None else _for_scripted(options, description.scripted), description)


def _require_shared_experts(options: Options) -> None:
    """Refuse what wrap() refuses where ranks with other data divide experts."""
    why, needed = "", "stage 1, 2 or 3"
    if options.stage == 0:
        why = "in stage 0 each rank keeps the state of all parameters"
    elif options.ranks % options.expert_parallel:
        why, needed = f"{options.ranks} ranks are no multiple of them", "a number that the ranks can be divided by"
    elif options.resumable or options.outer is not None or options.parameter_replicas > 1:
        why, needed = "a run, an outer optimizer and copies of parameters need the same ones on all ranks", "none of these"
    if why:
        refuse(f"cannot divide experts among {options.expert_parallel} ranks: {why}", needed=needed)


def _for_scripted(options: Options, module: str) -> Options:
    """Return the options for a model with a module of torch.jit, which wrap() refuses in stage 3."""
    if stages(options) == (3,):
        refuse(
            "cannot plan to shard parameters: torch.jit has scripted or traced a module, which cannot wait for its parameters",
            where=f"module {module}",
            needed="a stage below 3; or the module as it was before",
        )
    return options if options.stage is not None else changed(options, stage=2)


def _require_one_budget(options: Options) -> None:
    """Refuse a host whose memory is the GPU's own, or it would be counted twice."""
    on_host = {"host_memory": options.host_memory is not None, "activations on the host": options.activations[1] == "host"}
    for name in (name for name, given in on_host.items() if given and options.has_one_pool and not options.is_on_cpu):
        refuse(
            f"cannot plan with {name} on {options.device_name}: the GPU and the host share one memory",
            needed=f"no memory but the GPU's, which is that of both: {human_size(options.hardware.memory)}, or gpu_memory",
        )


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
    budget = {"device": max(0, left["device"]), "host": max(0, host), "nvme": max(0, drives)}
    exact = question_of(description, options, budget)
    stage = 3 if options.stage is None else options.stage
    outer = outer_memory(exact, options, _core.placement_of_stage(stage, options.ranks_of_host))
    outer_bytes = {tier: sum(owners.values()) for tier, owners in outer.items()}
    has_room = has_room and has_room_for(outer_bytes, left)
    if outer_bytes and has_room:
        budget = {tier: max(0, size - outer_bytes.get(tier, 0)) for tier, size in budget.items()}
        exact = question_of(description, options, budget)
    tile = coarse_tile(description.parameters // (1 if options.stage == 0 else options.ranks_of_host))
    coarse = question_of(description, options, budget, tile=tile)
    return PlanRequest(options, description, budget, activations, outer_bytes, has_room, exact, coarse)


def left_of(options: Options, activations: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of a rank that activations leave, by tier. They are negative where these need more."""
    device = options.hardware.memory - options.reserved - options.left_free["device"]
    whole = {"device": device, **options.room}
    return {tier: size - activations.get(tier, 0) for tier, size in whole.items()}


def tier_in(options: Options, tier: _core.Tier) -> str:
    """Return the tier whose memory this is: the device's, where the host shares it."""
    return "device" if options.has_one_pool and tier == _core.Tier.host else tier.name


def outer_memory(question: _core.Question, options: Options, placement: _core.Placement) -> dict[str, dict[str, int]]:
    if options.outer is None:
        return {}
    memory: dict[str, dict[str, int]] = {}
    for tier, size in outer_state(question, placement, options.outer).items():
        owners = memory.setdefault(tier_in(options, _core.Tier[tier]), {})
        owners[OUTER_STATE] = owners.get(OUTER_STATE, 0) + size
    memory.setdefault(tier_in(options, _core.Tier.host), {})[EXCHANGED] = exchange_bytes(question, placement, options.outer)
    return memory


def fits(request: PlanRequest, ledger: Sequence[_core.LedgerEntry], placement: _core.Placement) -> bool:
    """Return whether each tier has room for the entries of a plan, and for the outer optimizer."""
    needs = {tier.name: 0 for tier in _core.Tier}
    for entry in ledger:
        needs[tier_in(request.options, entry.tier)] += entry.bytes
    for tier, owners in outer_memory(request.exact, request.options, placement).items():
        needs[tier] += sum(owners.values()) - request.outer_bytes[tier]
    return has_room_for(needs, request.budget)


def _rates(options: Options) -> dict[str, float]:
    """Return the rates that the plan depends on, by the names and with the values that the caller may give."""
    unused = ["network"] if options.ranks <= options.ranks_of_machine and options.hosts == 1 else []
    unused += ["device_memory"] if options.is_on_cpu else []  # the host is the device
    rates = vars(options.all_rates)
    share_memory = not options.is_on_cpu and 1 < options.ranks_of_host <= options.ranks_of_machine
    unused += [] if share_memory and rates["shared"] > rates["peers"] else ["shared"]
    return {name: rate for name, rate in rates.items() if name not in unused}


# --- What a request leaves open ---


def stages(options: Options) -> tuple[int, ...]:
    """Return the requested stage, or else all stages that differ and that wrap() has for these options."""
    if options.stage is not None:
        return (options.stage,)
    if _updates_in_backward(options):
        return (3,)
    tiers = {} if options.chooses_tiers else tiers_by_kind(options.offload)
    if options.parameter_replicas == 1 and spread_of(tiers.get("parameters", "device")) == _core.Spread(device=1.0):
        return options.wire.stages(STAGES if options.expert_parallel == 1 else STAGES[1:], options.ranks_of_host)
    return (3,)  # below stage 3 each rank keeps all parameters, on the device


def candidates(request: PlanRequest) -> list[_core.Placement]:
    """Return all placements, or the requested one in each stage."""
    if request.options.chooses_tiers:
        return _resumable_placements(request) if request.options.resumable else request.exact.placements()
    placements = []
    for stage in stages(request.options):
        placement = _core.placement_of_stage(stage, request.options.ranks_of_host)
        placement.parameter_replicas = request.options.parameter_replicas
        set_tiers(placement, request.options.offload)
        placements.append(placement)
    return placements


def _resumable_placements(request: PlanRequest) -> list[_core.Placement]:
    """Return all placements of a run that resumes, whose state is all on drives. A machine without drives has them, too: the
    error then names the missing space."""
    with_drives = {**request.budget, "nvme": max(1, request.budget["nvme"])}
    placements = question_of(request.description, request.options, with_drives).placements()
    return [placement for placement in placements if placement.state.nvme == 1.0]


def ledgers_of(request: PlanRequest) -> Iterator[tuple[_core.Placement, list[_core.LedgerEntry]]]:
    return ((placement, request.exact.memory(placement)) for placement in candidates(request))


def fastest_plan(request: PlanRequest) -> Plan | None:
    """Return the fastest plan with the request's formats, if one fits. With an outer optimizer each stage is a request of its
    own: in stage 0 each rank has all of the outer optimizer's state, which may not fit."""
    options = request.options
    if not request.has_room:
        return None
    if options.outer is not None and options.stage is None:
        in_stages = [plan for stage in stages(options) if (plan := fastest_plan(request.changed(stage=stage))) is not None]
        return min(in_stages, key=lambda plan: plan.seconds, default=None)
    if options.divides_state:
        try:
            return request.plan(fastest(request.exact, request.coarse, request.budget))
        except OutOfMemoryError:
            return None
    question = request.coarse if options.chooses_tiers else request.exact
    fitting = (placement for placement, ledger in ledgers_of(request) if fits(request, ledger, placement))
    choices = (question.price(placement) for placement in fitting)
    choice = min(choices, key=lambda choice: choice.simulation.seconds, default=None)
    if choice is None:
        return None
    return request.plan(choice if question is request.exact else request.exact.price(choice.placement))
