"""Choose the stage and the tiers: of the configurations that fit into the memory that all ranks may use, take the one with the
least predicted time."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from ballast import _core
from ballast._torch_compat import is_in_backward
from ballast.checks import fail
from ballast.errors import OutOfMemoryError
from ballast.formats import STATE_FORMATS, preferred
from ballast.outer.fragments import Bytes, exchange_bytes, outer_state
from ballast.planning.hardware import (
    CORE_PRODUCTS,
    RATES,
    Gpu,
    available_memory,
    gpu_like,
    machine,
    rates_of,
    rates_of_cpus,
    this_machine,
)
from ballast.planning.request import STAGES, by_tier, coarse_tile, fastest
from ballast.ranks import Group, from_all_ranks
from ballast.schema import changed, set_core
from ballast.tiers import KINDS, Offload, fractions_in, in_words, set_tiers
from ballast.torch.gpu import free_bytes, name_and_bytes, return_cached_memory
from ballast.torch.parameters.managed_parameter import is_without_values
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, first_trace, gpu_of, model_of, prefetched
from ballast.torch.updates.sharded_state import Rule
from ballast.wrap_options import WrapOptions

# The part of free memory to use. The rest is for activations, CUDA and other uses, whose sizes are not known yet.
USED_FRACTION = 0.75
BYTES = ("device_bytes", "host_bytes", "nvme_bytes")


@dataclass(frozen=True)
class AvailableMachine:
    """The machine that a rank is on. Sizes are in bytes."""

    name: str
    ranks: int  # ranks that share the machine, according to the launcher
    device: int | None  # bytes for this rank alone; None: its part of the host
    parameter_bytes: int  # bytes that torch holds on the host, for the parameters that are about to be partitioned
    free: int  # free bytes of the host
    drives: int
    gpu: Gpu | None
    cores: int
    threads: int = 0  # of this rank; 0: its share of the cores


def machine_of_all_ranks(group: Group, options: WrapOptions, members: Sequence[UnitParameter]) -> _core.Machine:
    machines = from_all_ranks(group, _available_machine(options, members))
    budgets = [_machine(each, machines) for each in machines]
    least = budgets[group.rank]
    for name in (*BYTES, *RATES, "products"):
        setattr(least, name, min(getattr(each, name) for each in budgets))
    return least


def _available_machine(options: WrapOptions, members: Sequence[UnitParameter]) -> AvailableMachine:
    found, gpu = this_machine(), gpu_of(members)
    device = None if options.memory is None else int(options.memory)
    held = sum(each.parameter.nbytes for each in members if not is_without_values(each.parameter))
    if device is None and gpu is not None:
        return_cached_memory(gpu)
        device = int(USED_FRACTION * free_bytes(gpu)) + (0 if is_in_backward() else held)  # autograd may have saved them
    by_drive = {os.stat(path).st_dev: shutil.disk_usage(path).free for path in options.directories}
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return AvailableMachine(
        name=socket.gethostname(),
        ranks=int(local) if local.isdigit() else 1,
        device=device,
        parameter_bytes=held if gpu is None else 0,
        free=available_memory(found),
        drives=sum(by_drive.values()),
        gpu=None if gpu is None else gpu_like(*name_and_bytes(gpu)),
        cores=found["cores"],
        threads=options.tuning.threads,
    )


def _machine(of: AvailableMachine, machines: Sequence[AvailableMachine]) -> _core.Machine:
    sharing = max(of.ranks, sum(each.name == of.name for each in machines))
    host = int(USED_FRACTION * of.free) // sharing
    # Torch's memory is freed piece by piece.
    device = min(host + of.parameter_bytes, of.free) if of.device is None else of.device
    budget = {"device": device, "host": host, "nvme": of.drives // sharing}
    cores = min(of.cores, of.threads * sharing or of.cores)
    rates = rates_of_cpus(cores) if of.gpu is None else rates_of(of.gpu, {}, ranks_of_machine=sharing)
    made = machine(budget, rates, ranks=len(machines), ranks_of_machine=sharing)
    made.products = CORE_PRODUCTS * cores / sharing if of.gpu is None else of.gpu.reach * of.gpu.flops
    if of.gpu is None:
        made.device_memory = made.host_memory
        made.shares_cores = made.host_is_device = True
    made.one_pool = of.gpu is None or of.gpu.one_pool
    return made


log = logging.getLogger("ballast")


@dataclass(frozen=True)
class PartitionRequest:
    """The parameters to partition, and how to partition them."""

    group: Group
    rule: Rule
    members: Sequence[UnitParameter]  # the trained parameters
    can_wait: bool  # whether uses can wait for parameters; else these stay full
    units: Callable[[int], list[ParameterUnit]]  # the units of each stage


@dataclass(frozen=True)
class Configuration:
    """A stage with a placement."""

    stage: int
    placement: _core.Placement
    needs: Mapping[str, int]  # bytes by tier
    seconds: float = 0.0  # the time of the transfers and updates of a step

    def in_words(self) -> str:
        places = {kind: fractions_in(getattr(self.placement, kind)) for kind in KINDS}
        return in_words(self.stage, places, device="the device")


def settled(options: WrapOptions, request: PartitionRequest) -> WrapOptions:
    """Return the options with a stage and tiers. Raise B2004 if they do not fit.

    All ranks call it together and get the same result: they agree on the memory that each may use, and all other inputs
    are the same on each.
    """
    if not options.chooses and options.memory is None:
        return options
    machine = machine_of_all_ranks(request.group, options, request.members)
    searches = [Search(each, request, machine) for each in options.by_format()]
    fitting = [search for search in searches if search.fastest is not None]
    if not fitting:
        searches[-1].refuse()
    if not options.chooses:
        return options
    chosen = preferred(fitting, lambda search: search.chosen.seconds)
    if request.group.rank == 0:
        formats = f"; {chosen.settled().formats.in_words()}" if options.chooses_formats else ""
        log.info("%s%s", chosen.in_words(), formats)
    return chosen.settled()


class Search:
    """Asks the planner about configurations with one pair of formats."""

    def __init__(self, options: WrapOptions, request: PartitionRequest, machine: _core.Machine):
        self._options = options
        self._request = request
        self._machine = of = machine
        self._has = {"device": of.device_bytes, "host": of.host_bytes, "nvme": of.nvme_bytes}
        if not options.chooses:  # memory of the host and drives is checked when it is reserved
            self._has = {"device": of.device_bytes}
        elif of.one_pool:
            del self._has["host"]
        self._configurations = [self._best(stage) for stage in self._stages()]
        fitting = [configuration for configuration in self._configurations if self._fits(configuration)]
        least = min((configuration.seconds for configuration in fitting), default=0.0)
        self.fastest = next((each for each in fitting if each.seconds <= 1.01 * least), None)  # the lowest stage of equals

    @property
    def chosen(self) -> Configuration:
        """The fastest configuration that fits, where there is one."""
        assert self.fastest is not None
        return self.fastest

    def settled(self) -> WrapOptions:
        """Return the options of the chosen configuration."""
        options = changed(self._options, stage=self.chosen.stage)
        if not options.chooses_tiers:
            return options
        return changed(options, offload=_named(self.chosen.placement, options.directories))

    def _stages(self) -> tuple[int, ...]:
        if self._options.stage is not None:
            return (self._options.stage,)
        ranks = self._request.group.size
        known = tuple(stage for stage in STAGES if not (stage == 2 and ranks == 1) and (stage < 3 or self._request.can_wait))
        return self._options.wire.stages(known, ranks)

    def _best(self, stage: int) -> Configuration:
        """Return the fastest configuration that fits, else the one that lacks the least memory."""
        units = self._request.units(stage)
        exact = self._question(stage, units)
        placement = self._given(stage)
        outer_bytes = self._outer_bytes(exact, placement)
        if not self._options.chooses_tiers:
            given = Configuration(stage, placement, _added(exact.needs(placement), outer_bytes))
            is_compared = self._options.chooses and self._fits(given)
            return replace(given, seconds=exact.price(placement).simulation.seconds) if is_compared else given
        left = {tier: max(0, size - outer_bytes.get(tier, 0)) for tier, size in {"host": 0, **self._has}.items()}
        exact, coarse = (self._question(stage, units, coarse=coarse, taken=outer_bytes) for coarse in (False, True))
        try:
            choice = fastest(exact, coarse, left)
        except OutOfMemoryError:
            needs = {placement: _added(exact.needs(placement), outer_bytes) for placement in exact.placements()}
            return min((Configuration(stage, *each) for each in needs.items()), key=self._shortage)
        needed = _added(exact.needs(choice.placement), outer_bytes)
        return Configuration(stage, choice.placement, needed, choice.simulation.seconds)

    def _outer_bytes(self, question: _core.Question, placement: _core.Placement) -> Bytes:
        """Return the bytes of the outer optimizer by tier. Where the host is the device, all of them are there."""
        outer = self._options.outer
        if outer is None:
            return {}
        outer_bytes = outer_state(question, placement, outer)
        outer_bytes["host"] = outer_bytes.get("host", 0) + exchange_bytes(question, placement, outer)
        if self._machine.one_pool:
            outer_bytes["device"] = outer_bytes.get("device", 0) + outer_bytes.pop("host")
        return outer_bytes

    def _question(
        self, stage: int, units: list[ParameterUnit], *, coarse: bool = False, taken: Mapping[str, int] | None = None
    ) -> _core.Question:
        """Return the question about the program that the training will compile, with the memory that is not taken."""
        options, ranks, machine = self._options, self._request.group.size, copy(self._machine)
        for tier, size in (taken or {}).items():
            setattr(machine, f"{tier}_bytes", max(0, getattr(machine, f"{tier}_bytes") - size))
        question = _core.Question(model_of(units), machine)
        set_core(question, options, options.tuning)
        question.ranks, question.stage = ranks, stage
        question.overlap_gathers = bool(options.tuning.overlap_gathers) and stage < 3
        question.set_rule(self._request.rule)
        question.set_work([(0.0, 0.0)] * len(units))  # the model's computing time is not known before the first step
        if coarse:
            elements = sum(unit.elements for unit in units) // (1 if stage == 0 else ranks)
            question.tile_elements = coarse_tile(elements, tile=question.tile_elements)
        question.full_records = bool(options.run.name)
        question.trace = first_trace(units, question.model, stage)
        question.prefetch = prefetched(units, question.prefetch)
        return question

    def _given(self, stage: int) -> _core.Placement:
        placement = _core.placement_of_stage(stage, self._request.group.size)
        placement.parameter_replicas = self._options.parameter_replicas
        set_tiers(placement, self._options.tiers)
        return placement

    # --- Configurations that fit ---

    def _fits(self, configuration: Configuration) -> bool:
        return self._shortage(configuration) == 0

    def _shortage(self, configuration: Configuration) -> int:
        """Return how many bytes the tiers lack in total."""
        return sum(max(0, configuration.needs[tier] - size) for tier, size in self._has.items())

    def in_words(self) -> str:
        """Return the reason for the choice."""
        chosen = self.chosen
        others = [
            f"stage {configuration.stage} {_seconds(configuration.seconds) if self._fits(configuration) else 'does not fit'}"
            for configuration in self._configurations
            if configuration is not chosen
        ]
        budget = by_tier({tier: size for tier, size in self._has.items() if size > 0})
        forecast = f"transfers and updates of a step are forecast to take {_seconds(chosen.seconds)}"
        return f"chosen for {budget} of each rank: {'; '.join([chosen.in_words(), forecast, *others])}"

    def refuse(self) -> NoReturn:
        """Raise B2004, with the memory of the configuration that lacks the least."""
        options, configuration = self._options, min(self._configurations, key=self._shortage)
        remedies = ["more free memory" if options.memory is None else "more memory="]
        in_bfloat16 = any(member.parameter.dtype == torch.bfloat16 for member in self._request.members)
        if options.tuning.prefetch > 1:
            remedies.append("ballast.Tuning(prefetch=1)")
        if options.tuning.keep_gathered:
            remedies.append("less of ballast.Tuning(keep_gathered=), or none")
        if options.formats.gradients == "fp32" and in_bfloat16:
            remedies.append('gradient_format="bf16"')
        if options.formats.state != STATE_FORMATS[-1] and in_bfloat16:
            remedies.append(f'state_format="{STATE_FORMATS[-1]}"')
        if options.stage is not None and options.keeps_full_parameters:
            remedies.append('stage="auto"')
        elif options.stage is None and not self._request.can_wait:
            remedies.append("ballast.wrap(optimizer, model), which lets stage 3 be chosen")
        if not options.directories:
            remedies.append('a drive, with offload="auto:DIRECTORY"')
        fail(
            "memory_budget",
            f"cannot begin to train: {'every plan' if options.chooses else 'this plan'} needs more memory than a rank has",
            where=configuration.in_words() + (", which lacks the least" if options.chooses else ""),
            needed=by_tier({tier: configuration.needs[tier] for tier in self._has}),
            available=by_tier(self._has),
            remedy="Any of these may do: " + "; ".join([*remedies, "more ranks"]) + ".",
        )


def _added(needs: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {tier: size + more.get(tier, 0) for tier, size in needs.items()}


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _named(placement: _core.Placement, directories: Sequence[str]) -> Offload:
    """Return the placement in words, with the directory of data on a drive."""
    drive = f"nvme:{directories[0]}" if directories else ""
    return {
        kind: {drive if tier == "nvme" else tier: part for tier, part in fractions_in(getattr(placement, kind)).items()}
        for kind in KINDS
    }
