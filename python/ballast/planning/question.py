"""The questions to the planner that a request leads to: a model, with the time of its arithmetic, on a machine."""

from __future__ import annotations

from ballast import _core
from ballast.checks import refuse
from ballast.formats import that_need_bf16
from ballast.models.description import OF_ATTENTION, OF_MATRICES, Attention, Description, Divided, divide, is_block
from ballast.options import Options
from ballast.planning.hardware import Budget, machine
from ballast.planning.option_text import name_of
from ballast.schema import options_of_stage_3, set_core
from ballast.sizes import human_amount, parse_size
from ballast.tiers import IN_FLIGHT

MUON = "muon"
USUAL_SEQUENCE = 4096


def question_of(description: Description, options: Options, budget: Budget, *, tile: int = 0) -> _core.Question:
    """Return the question, with at most this many elements in a tile (0: as the library chooses). With Muon, it is that of the
    matrices, and AdamW has the other parameters in a step that comes after theirs."""
    divided = _divided(description) if options.optimizer == MUON else None
    work = _work(description, options)
    places = divided.matrices.places if divided else range(len(work))
    question = _question(divided.matrices.model if divided else description.model, options, budget, tile)
    question.set_optimizer(options.optimizer)
    question.set_work([work[place] for place in places])
    tier = options.activations.tier
    if tier != "device":
        away = _by_unit(description, activation_bytes(description, options)[tier])
        question.set_activations(_core.Tier[tier], [away[place] for place in places])
    if divided and divided.others:  # a unit in both parts computes with its matrices
        other = _question(divided.others.model, options, budget, tile)
        other.set_optimizer("adamw")
        other.set_work([(0.0, 0.0) if place in places else work[place] for place in divided.others.places])
        question.set_other(other)
    return question


def _question(model: _core.Model, options: Options, budget: Budget, tile: int) -> _core.Question:
    question = _core.Question(model, machine_of(options, budget))
    set_core(question, options)
    question.ranks, question.tile_elements, question.wire = options.ranks_of_host, tile, options.sent.for_core()
    question.update_in_backward = options.update_in_backward and options.micro_steps == 1
    return question


def notes_of_optimizer(description: Description, options: Options) -> list[str]:
    """Return a note with the number of parameters that AdamW updates beside Muon."""
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
    return [f"{name_of(name, as_flags=as_flags)} {value} has no effect: {why}" for name, value in unused.items()]


def notes_of_unused(options: Options, stage: int, *, as_flags: bool) -> list[str]:
    """Return a note for each option that has no effect on these ranks, or in the stage of the plan."""
    notes = []
    if options.wire.given() and options.ranks_of_host == 1:
        notes.append(f"wire has no effect {'on one rank' if options.ranks == 1 else 'with one rank on each host'}")
    elif options.wire.across is not None and options.ranks <= options.ranks_of_machine:
        notes.append("wire across has no effect: all ranks are on one machine")
    for name in options_of_stage_3(options) if stage < 3 else []:
        option = name_of(name, as_flags=as_flags)
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
    """Return the seconds of each unit, forward and backward. Activation checkpointing repeats the forward pass of blocks, and
    not that of the head. Frozen parameters need no gradients."""
    sequence = sequence_of(description, options)
    units = description.model.units
    attention = [each.of(sequence) for each in description.attention or [Attention(0.0)] * len(units)]
    frozen = description.frozen_flops or [0.0] * len(units)
    checkpointed = options.activations.amount == "checkpointed" and description.activations is not None
    seconds = options.tokens / options.reach
    work = []
    for unit, matrices, between, without in zip(units, description.flops, attention, frozen, strict=True):
        forward = matrices + between
        repeated = forward if checkpointed and (is_block(unit) or len(units) == 1) else 0.0
        backward = OF_MATRICES * matrices + OF_ATTENTION * between + repeated - without
        work.append((seconds * forward, seconds * backward))
    return work


def activation_bytes(description: Description, options: Options) -> dict[str, int]:
    """Return the bytes of activations by tier. A drive needs buffers on the host."""
    amount, tier = options.activations
    checkpointed = amount == "checkpointed"
    known = description.activations
    if isinstance(amount, int):
        all_of_them = away = amount
        on_device = min(away, 2 * away // len(description.unit_names))
    elif known is None:
        all_of_them = on_device = away = 0
    else:
        all_of_them = known.bytes(options.tokens, checkpointed=checkpointed)
        on_device, away = known.offloaded(options.tokens, checkpointed=checkpointed)
    if tier == "device":
        return {"device": all_of_them}
    buffers = {"host": parse_size(IN_FLIGHT)} if tier == "nvme" else {}
    return {"device": on_device, **buffers, tier: away}


def _by_unit(description: Description, size: int) -> list[int]:
    """Divide activations among the units with attention, in other models by their flops."""
    attention = [unit.flops for unit in description.attention]
    weights = attention if any(attention) else description.flops
    total = sum(weights) or 1.0
    return [int(size * weight / total) for weight in weights]


def machine_of(options: Options, budget: Budget) -> _core.Machine:
    made = machine(budget, options.all_rates, ranks=options.ranks_of_host, ranks_of_machine=options.ranks_of_machine)
    made.products = options.reach
    if options.is_on_cpu:
        made.device_memory = made.host_memory
        made.shares_cores = made.host_is_device = True
    return made
