"""Gradients and steps of an optimizer, in a training of the library."""

from __future__ import annotations

import logging
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch

from ballast import _core
from ballast._torch_compat import NO_BACKWARD, current_backward, has_gradient_in_backward, without_torch_function
from ballast.checks import refuse, refuse_order
from ballast.errors import FailureError, UsageError
from ballast.ranks import require_same, words_of_all_ranks
from ballast.torch.gpu import in_stream, require_stream
from ballast.torch.gradients.gradient_sums import GradientShards, refuse_different
from ballast.torch.gradients.taken_gradients import (
    Bounds,
    GradientCopies,
    TakenGradient,
    TakenGradients,
    refuse_as_updated,
    refuse_norm,
)
from ballast.torch.parameters.parameter_memory import ParameterMemory
from ballast.torch.parameters.unit_gather import name_different_uses
from ballast.torch.parameters.units import ParameterUnit, UnitParameter, backward_order, unit_names
from ballast.torch.process_groups import ProcessGroups
from ballast.torch.training.joint_runs import ALONE, JointRun
from ballast.torch.training.preconditions import refuse_other_end
from ballast.torch.training.use_agreement import UseAgreement
from ballast.torch.updates.commit_metadata import encode_missed_steps
from ballast.torch.updates.sharded_state import Rule, ShardedState
from ballast.torch.updates.updates import Tiles

log = logging.getLogger("ballast")


@dataclass(frozen=True)
class StepInputs:
    """What the steps of a partition take from its optimizer, whose groups may change from step to step."""

    described: Callable[[], dict[str, str]]  # the options of the parameter groups as they are now, the same on all ranks
    rules: Callable[[], list[Rule]]  # one rule for each group, as it is now
    # Makes the updates of tiles, with the factor of gradients, and whether it is the last call of a step. None: a rule does.
    custom_step: Callable[[ShardedState, Tiles, float, bool], None] | None
    joint_run: JointRun | None  # the run whose rounds the steps belong to
    is_alone: bool  # no other optimizer trains the model
    agreement: UseAgreement | None  # ranks agree before each use of a unit; None: ranks keep full parameters, or there is one
    calls_differ: bool  # ranks use different units, also after the first steps


class GradientOrder:
    """Decide which units to take when a gradient arrives. Units and their members are only numbers here.

    Gradients arrive one by one, in a different order on each rank, and some of them on some ranks only. Units are taken
    as a whole and in one order, pass after pass. So all ranks take the same ones, and sums do not depend on how
    parameters are grouped into units. A pass ends when a gradient arrives for the second time.
    """

    def __init__(self, order: Sequence[int], members: Sequence[int]):
        self._order = list(order)
        self._members = list(members)
        self._begin_pass()
        self.passes = 0  # passes that have begun
        self.completed: list[int] = []  # units, in the order in which they completed in the first pass

    def _begin_pass(self) -> None:
        self._missing = [set(range(count)) for count in self._members]
        self._taken = 0

    def ended_by(self, unit: int, member: int) -> list[int]:
        """Return the units that are left to take in the pass that this gradient ends. The gradient is not kept yet."""
        if self.passes == 0 or member in self._missing[unit]:
            return []
        rest = self._order[self._taken :]
        self._begin_pass()
        self.passes += 1
        return rest

    def arrived(self, unit: int, member: int) -> list[int]:
        """Return the units to take now."""
        if self.passes == 0:
            self.passes = 1
        missing = self._missing[unit]
        missing.discard(member)
        if self.passes == 1 and not missing:
            self.completed.append(unit)
        first = self._taken
        while self._taken < len(self._order) and not self._missing[self._order[self._taken]]:
            self._taken += 1
        return self._order[first : self._taken]

    @property
    def next_unit(self) -> int | None:
        """The unit whose turn it is."""
        return self._order[self._taken] if self._taken < len(self._order) else None

    def missing_of_begun(self, unit: int) -> list[int]:
        """Return the members whose gradients are missing in this pass; none before one of the unit has arrived."""
        return sorted(self._missing[unit]) if self.is_begun(unit) else []

    @property
    def has_arrived(self) -> bool:
        """Whether a gradient has arrived in this pass whose unit is not taken."""
        return any(map(self.is_begun, self._order[self._taken :]))

    def is_begun(self, unit: int) -> bool:
        """Return whether a gradient of the unit has arrived in this pass."""
        return len(self._missing[unit]) < self._members[unit]

    def turn(self) -> int | None:
        """Return the unit whose turn it is, and count it as taken, though its gradients may come in another pass."""
        unit = self.next_unit
        if unit is not None:
            self.held()
            self._taken += 1
        return unit

    def turn_for_others(self) -> tuple[int, list[int]]:
        """Return the unit whose turn it is, in another pass if this one is complete, and its members without a gradient. Count
        the unit as taken, and these as arrived."""
        if self.next_unit is None:
            self._begin_pass()
            self.passes += 1
        unit = self._order[self._taken]
        missing = sorted(self._missing[unit])
        if self.passes <= 1 and missing:
            self.completed.append(unit)
        self._missing[unit] = set()
        self.held()
        self._taken += 1
        return unit, missing

    def held(self) -> None:
        """Count a gradient that belongs to this pass and is taken later."""
        self.passes = max(1, self.passes)

    def complete(self, passes: int) -> None:
        """Count this number of passes, of which all units are taken."""
        self.passes, self._taken = passes, len(self._order)
        self._missing = [set() for _ in self._members]

    def rest(self, passes: int) -> list[int]:
        """Return the units that complete this number of passes."""
        left = self._order[self._taken :] if self.passes > 0 else []
        return left + self._order * (passes - self.passes)


class Partition(ShardedState):
    """Takes gradients, and makes steps with them."""

    def __init__(
        self,
        units: list[ParameterUnit],
        ranks: ProcessGroups,
        inputs: StepInputs,
        options: _core.TrainingOptions,
        make_memory: Callable[[_core.Training, list[ParameterUnit]], ParameterMemory],
    ):
        self._inputs, self._rules = inputs, inputs.rules()
        self._order = backward_order(units)
        super().__init__(units, ranks, self._rules, options, make_memory)
        self._trained = [unit.trained for unit in units]
        in_unit = [number for trained in self._trained for number in range(len(trained))]
        self._places = [(member.unit, number) for member, number in zip(self.members, in_unit)]
        self._members_of: list[list[int]] = [[] for _ in units]  # trained, by unit
        for number, member in enumerate(self.members):
            self._members_of[member.unit].append(number)
        self._most_members = max(map(len, self._members_of), default=0)
        self._copies = GradientCopies(units)
        self._shards_of_gradients = GradientShards(self.core, self.sharing, self.ranks.size, self.members)
        self._has_other_parts = ranks.model_group is not None  # other ranks have other parts of the model
        self.gradients = TakenGradients(
            self.ranks, self.members, self._tensor_norms, self._clamp_gradients, self.memory.undo_casts
        )
        self._updates_in_backward = options.update_in_backward
        self._may_update_early = self.keeps_run and not options.update_in_backward and inputs.custom_step is None
        # Exchanges of several optimizers in backward passes could wait for each other on two ranks.
        self._agrees_on_units = options.update_in_backward and (self.ranks.size == 1 or inputs.is_alone)
        self.has_finite_factor = True  # the last step's factors of gradients were finite; else it was skipped
        self.before_clipping = 1.0  # the ratio of the norm before clipping to that of the last step
        self.gradients.are_parts = ranks.dtensors is not None
        self.gradients.may_scale = not options.update_in_backward
        self._order_is_learnt = False
        self._backward = NO_BACKWARD  # the backward pass in which the last gradient has arrived
        self._last_backward = [NO_BACKWARD] * len(units)  # the same, by unit
        self._reset_step()
        self._joint_run, self._agreement = inputs.joint_run, inputs.agreement
        self.memory.watch_gathers(weakref.ref(self))
        if self._agreement is not None:
            first = [unit.members[0].parameter for unit in units]
            self._agreement.join(self, self.ranks, first, lasts=inputs.calls_differ)

    def _reset_step(self) -> None:
        self._gradient_order = GradientOrder(self._order, [*map(len, self._trained)])
        self.gradients.begin_step()
        self.unused.clear()
        self._passes: int | None = None  # the passes of all ranks, after they have agreed
        self._has_expected = False  # the core knows the options with which the step probably updates
        self._prepared: dict[str, str] | None = None  # the options with which the backward pass updates, once it has begun

    def require_not_updated(self, what: str) -> None:
        """Refuse an operation between updates of a backward pass and their step."""
        if self._prepared is not None:
            refuse_as_updated(f"{what} between a backward pass and its step", "step() after each backward pass")

    def release(self, together: bool, gathers: bool = True, keeps: bool = True) -> None:
        """End the training. Parameters return to torch's memory if all ranks call it together and gather them; else
        only full ones do. With `keeps` false all lose their values."""
        with in_stream(self._gpu, self._stream):
            if together:
                self.end_step()
            try:
                self.memory.release(together, gathers, keeps)
            finally:
                if self._agreement is not None:
                    self._agreement.leave(self)
        self.gradients.end()

    @property
    def has_begun(self) -> bool:
        """Whether gradients have come since the last step."""
        return self._gradient_order.passes > 0 or bool(self._passes)

    def end_step(self) -> None:
        """End a step that has begun. A rank that left it open would end the training of all ranks."""
        try:
            if self._agreement is not None:
                self._agreement.step()
            [begun] = self.ranks.all_reduce([int(self.has_begun)])
            updates = self._updates_in_backward
            if begun > 0 and not (updates and self._joint_run is not None and self._joint_run.has_stepped):
                self.step(discard=not updates, in_round=updates, ends=True)
        except FailureError as error:  # this rank still releases its memory
            log.warning("the training had failed before it was released: %s", error)

    # --- Gradients ---

    def arrived(self, parameter: torch.nn.Parameter, *, hold: bool = False) -> bool:
        """Take a gradient that was added to `parameter.grad`. With `hold`, it waits for the next one, or for the step. Return
        False if this does not train the parameter."""
        number = self._index.get(id(parameter))
        if number is None:
            return False
        if self._gpu is not None:
            require_stream(self._gpu, self._stream)
        if (backward := current_backward()) != self._backward:
            self._backward = backward
            if self._agreement is not None:
                self._agreement.see_backward(backward)
            if self.gradients.are_cleared():
                self._discard_cleared_gradients()
        if self._passes is not None:
            self._continue_after_norm()
        with without_torch_function():  # the parameter may be without its values
            gradient = parameter.grad
        if number in self.gradients.taken and type(gradient) is not TakenGradient:
            self._discard_cleared_gradients()
        unit, place = self._places[number]
        if self.stage == 3 and unit != self._gradient_order.next_unit:
            self._complete_unit()
            self._pass_over_units(unit)
        self._last_backward[unit] = backward
        for each in self._gradient_order.ended_by(unit, place):
            self._take(each, in_turn=True)
        self.gradients.take(number, parameter, gradient)
        if hold:
            self._gradient_order.held()
        else:
            for each in self._gradient_order.arrived(unit, place):
                self._take(each, in_turn=True)
        return True

    def _continue_after_norm(self) -> None:
        """Begin another backward pass after those whose norm was computed."""
        self.core.wait_for_commit()  # raises the error of a step that has failed
        for member in self.gradients.taken:
            self.gradients.require_unscaled(member)
        self._gradient_order.complete(self._passes or 0)
        self._passes = None
        self.gradients.forget_norms()

    def _complete_unit(self) -> None:
        """Take the unit whose turn it is if the backward pass computes none of its missing gradients, such as those of an
        expert without tokens. Other ranks may have all of them, and reduce the unit before they gather the next one."""
        unit = self._gradient_order.next_unit
        if unit is None or self._last_backward[unit] != current_backward():
            return
        trained = self._trained[unit]
        missing = [trained[place].parameter for place in self._gradient_order.missing_of_begun(unit)]
        if not any(map(has_gradient_in_backward, missing)):
            for parameter in missing:
                self.arrived(parameter)

    def _pass_over_units(self, unit: int) -> None:
        """Take the units before this one whose gradients the backward pass does not compute, if ranks use different units."""
        if self._agreement is None or self._updates_in_backward or not self._agreement.knows_unused(self._backward):
            return
        while (
            (before := self._gradient_order.next_unit) not in (None, unit)
            and not self._gradient_order.is_begun(before)
            and not any(has_gradient_in_backward(each.parameter) for each in self._trained[before])
        ):
            for member in self._trained[before]:
                self.arrived(member.parameter)

    def _unused_by_all(self, unit: int | None, *, ends: bool = False) -> list[int] | None:
        """Return the members of a unit that have no gradient on any rank; None if all ranks have ended the backward pass. Each
        rank takes the unit that has its turn, or has ended the backward pass: then it takes the unit for the others."""
        members = [] if unit is None else self._members_of[unit]
        used = self.gradients.used(members)
        if self.ranks.size > 1:
            words = [int(ends), *used, *([0] * (self._most_members - len(members)))]
            ended, *used = self.ranks.all_reduce(words)
            ends = ended == self.ranks.size
        return None if ends else [member for member, ranks in zip(members, used) if ranks == 0]

    def _take_for_others(self) -> None:
        """Take the units that other ranks still take in their backward pass."""
        while (unused := self._unused_by_all(self._gradient_order.next_unit, ends=True)) is not None:
            if (unit := self._gradient_order.turn()) is None:
                break  # another rank makes one pass more, which fails there
            self._take(unit, unused)

    def _leave_out(self, members: Sequence[int]) -> None:
        for member in map(self.members.__getitem__, members):
            self.core.leave_out(member.unit, member.tensor)
            self.unused.add(member)

    def _take(self, unit: int, unused: Sequence[int] | None = None, *, count: bool = True, in_turn: bool = False) -> None:
        """Take a unit, of which the members in `unused` have no gradient on any rank; None: the ranks agree on these. With
        `in_turn`, it is the unit's turn on this rank, and other ranks may use other units."""
        if in_turn and self._agreement is not None:
            self._agreement.take(self, unit)
        if unused is None:
            unused = (self._unused_by_all(unit) or []) if self._agrees_on_units else []
        self.memory.release_unit()
        if self._updates_in_backward and self._prepared is None:
            self.memory.require_not_gathered("cannot update parameters in the backward pass")
            if self._joint_run is not None:
                self._joint_run.require_turn()
            self.core.prepare(rules=self._inputs.rules(), missed=self._missed())
            self._prepared = self._inputs.described()
        elif count and self._may_update_early and not self._has_expected:
            self.core.expect(rules=self._inputs.rules(), missed=self._missed())
            self._has_expected = True
        try:  # an interrupt may arrive when the core has acquired the unit
            memory = self._acquire_gradients(unit)
            self._leave_out(unused)
            if count:
                self._copies.copy(unit, memory)
        except UsageError as error:
            name_different_uses(error)
            raise
        finally:
            self.core.release()

    def gradient_norm(self, order: float) -> float:
        """Return the norm of all gradients. All ranks call it together."""
        if not self._have_gradients():
            if self.gradients.are_spent():
                refuse_norm("the norm of the gradients")
            return 0.0
        self.gradients.norm_is_known = True
        factor = self.gradients.factor(self._scale_gradients)
        if math.isnan(factor):
            return math.nan
        if order == 2.0:
            return self.core.gradient_norm(loss_scale=1.0 / factor)
        norms = torch.tensor(self._tensor_norms(order), dtype=torch.float64, device="cpu")
        return float(torch.linalg.vector_norm(norms, order)) * (factor if order > 0.0 else 1.0)

    def _tensor_norms(self, order: float) -> list[float]:
        """Return the norm of each gradient before torch scales it. All ranks call it together."""
        if not self._have_gradients():
            refuse_norm("the norm of a gradient")
        if order != 2.0:
            return self._shards_of_gradients.norms(order)
        norms = self.core.tensor_norms(loss_scale=1.0)
        return [norms[member.unit][member.tensor] for member in self.members]

    def _scale_gradients(self, factors: Mapping[int, float]) -> None:
        if self._has_other_parts:
            refuse_different(
                "cannot scale or clip gradients by different factors: other ranks have other parts of the model",
                where="mesh=",
                needed="one factor of all gradients",
            )
        self._shards_of_gradients.scale(factors)

    def _clamp_gradients(self, bounds: Bounds) -> None:
        if self._have_gradients():
            self.gradients.require_same_on_all_ranks("clamp gradients")
            self._shards_of_gradients.clamp(bounds)

    def _have_gradients(self) -> bool:
        """Agree on the passes of the step, and return whether there is any. If there is none, they may still come."""
        self.accept_assignments()
        self.gradients.require_not_added("cannot compute a norm")
        if self._agree() == 0:
            self._passes = None
        return self._passes is not None

    # --- Other units than those that this rank uses ---

    def before_gather(self, unit: int, exact: bool) -> None:
        self._complete_unit()
        if self._agreement is not None:
            self._agreement.use(self, unit, exact)

    def after_call(self) -> None:
        if self._agreement is not None:
            self._agreement.end_call()

    def name_of_unit(self, unit: int) -> str:
        return unit_names(self.units)[unit]

    def gather_for_others(self, unit: int, exact: bool) -> None:
        """Gather a unit that other ranks use."""
        self.memory.release_unit()
        acquire = self.core.acquire_exact_parameters if exact else self.core.acquire_parameters
        try:  # an interrupt may arrive when the core has acquired the unit
            acquire(unit)
        finally:
            self.core.release()

    def take_arrived(self) -> None:
        """Take all that has arrived in a backward pass that ends, and count zeros for units that were to come before."""
        while self._gradient_order.has_arrived and not self._updates_in_backward:
            assert self._agreement is not None and self._gradient_order.next_unit is not None
            self._agreement.take(self, self._gradient_order.next_unit)
            self.take_for_others()

    def take_for_others(self) -> None:
        """Take the unit whose turn it is, whose gradients have arrived on other ranks, with those that this rank has."""
        unit, missing = self._gradient_order.turn_for_others()
        for place in missing:
            parameter = self._trained[unit][place].parameter
            with without_torch_function():  # the parameter may be without its values
                gradient = parameter.grad
            self.gradients.take(self._index[id(parameter)], parameter, gradient)
        self._take(unit)

    # --- Steps ---

    def _missed(self) -> list[int]:
        """Return the missed steps of each tensor of all units; nothing if there are none."""
        return [each.missed for each in self.all_members] if any(map(attrgetter("missed"), self.members)) else []

    def _agree(self, *, count: bool = True, ends: bool = False) -> int:
        """Complete the same passes on all ranks, accept writes to parameters, and return the number of passes."""
        if self._gpu is not None:
            require_stream(self._gpu, self._stream)
        self.memory.release_unit()  # the last unit may be frozen, so that no gradient has released it
        if self._passes is not None:
            return self._passes
        if self._agreement is not None:
            self._agreement.step()
        if self._agrees_on_units:
            self._take_for_others()
        writes = self.writes(with_casts=count)  # a step that is discarded would undo them
        options = self._inputs.described() if count and self.ranks.size > 1 else {}
        described = zlib.crc32(str(options).encode())
        mine = [self._gradient_order.passes, len(writes), int(not count), described, *self.gradients.digests()]
        passes, written, are_discarded, option_digests, *taken = words_of_all_ranks(self.ranks, mine)
        if len({*are_discarded}) > 1:
            refuse_other_end(are_discarded)
        if len({*option_digests}) > 1:
            require_same(self.ranks, options)
        if count:
            self.gradients.compare_ranks(*taken)
        if any(written):
            self._keep_writes(writes, ends)
        self._passes = max(passes)
        if count and self._passes > 0 and not self._updates_in_backward:
            self._leave_out(self.gradients.unused())
        completed = self._gradient_order.completed
        for unit in self._gradient_order.rest(self._passes):
            self._take(unit, count=count)
        if self._passes > 0 and not self._order_is_learnt:  # from the next step on, that in which units came on rank 0
            seen = completed + [unit for unit in self._order if unit not in completed]
            self._order = self.ranks.all_reduce(seen if self.ranks.rank == 0 else [0] * len(seen))
            self._order_is_learnt = True
        return self._passes

    def _keep_writes(self, writes: Mapping[UnitParameter, torch.Tensor], ends: bool) -> None:
        """Take over the written parameters. At the end of the training, warn of writes that cannot be kept."""
        try:
            self._take_over(writes)
        except UsageError as error:
            if not ends:
                raise
            log.warning("writes to parameters are lost at the end of the training: %s", error)

    def step(
        self, *, loss_scale: float = 1.0, discard: bool = False, in_round: bool = False, ends: bool = False
    ) -> _core.StepResult | None:
        """Make a step, and return its result; None if no rank has a gradient. In a round of joint runs it is committed in any
        case. With `ends` nothing that the user has done to gradients is refused any more."""
        with nullcontext() if self._joint_run is None or not in_round else self._joint_run.step() as joint_round:
            if self._gpu is not None:
                require_stream(self._gpu, self._stream)
            if not discard and not ends:
                self.memory.require_not_gathered("cannot make a step")
                self.accept_assignments()
                self.gradients.require_complete()
                self.gradients.require_not_added("cannot make a step")
            has_agreed = self._passes is not None  # ranks agreed for a norm; the user may have written to parameters since
            if self._agree(count=not discard, ends=ends) == 0:
                self._reset_step()
                self.gradients.require_cleared()
                if joint_round is not None:  # the state is committed as it is
                    with self._in_round(joint_round):
                        self.move_shards(lambda part: None)
                return None
            if has_agreed:
                self.accept_writes(with_casts=not discard)
            if self._prepared is not None and not ends:
                self._require_as_prepared(self._prepared, loss_scale, discard)
            try:
                with self._in_round(joint_round):
                    if self.keeps_run and self._inputs.custom_step is None:  # an optimizer's own step keeps its counts itself
                        self.core.set_note(encode_missed_steps(self.members, self.unused, self.steps + 1))
                    result = self.core.step_prepared() if self._updates_in_backward else self._update(loss_scale, discard)
            finally:
                self._pass_on_log()
            if not result.skipped:
                for member in self.unused:
                    member.missed += 1
            self.memory.after_step(result)
            self.gradients.spend()
            self._reset_step()
            return result

    @contextmanager
    def _in_round(self, joint_round: _core.JointRound | None) -> Iterator[None]:
        """Name the round in the commit of the step that is made inside the block."""
        if joint_round is not None:
            self.core.set_round(joint_round)
        try:
            yield
        finally:
            self.core.set_round(ALONE)

    def _update(self, loss_scale: float, discard: bool) -> _core.StepResult:
        rules = self._rules if discard else self._inputs.rules()  # the optimizer may be gone
        custom_step = self._inputs.custom_step
        factor = 1.0 if discard else self.gradients.factor(self._scale_gradients)
        self.has_finite_factor = not math.isnan(factor)
        self.before_clipping = 1.0 if math.isnan(factor) else self.gradients.before_clipping(factor)
        return self.core.step(
            rules=rules,
            missed=self._missed(),
            loss_scale=loss_scale / factor if self.has_finite_factor else loss_scale,
            discard=discard or not self.has_finite_factor,
            custom_step=None if custom_step is None else partial(custom_step, self),
        )

    def _require_as_prepared(self, prepared: dict[str, str], loss_scale: float, discard: bool) -> None:
        """Refuse a step that is not the one for which the backward pass has updated parameters."""
        if discard:
            refuse_as_updated("cannot discard gradients", "a step after each backward pass")
        if loss_scale != 1.0:
            refuse_as_updated(f"cannot use gradients that were scaled by {loss_scale}", "a loss that is not scaled")
        now = self._inputs.described()
        for name, before in prepared.items():
            if now.get(name) != before:
                option, _, group_name = name.partition(" ")
                what = f"cannot use {option}={now.get(name)} {group_name}"
                refuse_as_updated(what, f"{option}={before} until step(), or another one before the backward pass")

    def discard(self) -> bool:
        """Discard the gradients since the last step, and return whether there were any. All ranks call it together."""
        has_begun = self.has_begun
        if has_begun:
            self.step(discard=True)
        return has_begun

    def accept_assignments(self) -> None:
        """Discard gradients that were cleared through the model, and take those that were assigned to parameters."""
        self._discard_cleared_gradients()
        for parameter in self.gradients.not_taken():
            self.arrived(parameter)

    def _discard_cleared_gradients(self) -> None:
        """Discard gradients that were cleared through the model."""
        cleared = self.gradients.cleared()
        if len(cleared) < len(self.gradients.taken) and cleared:
            refuse(
                "cannot use gradients: some of the step were cleared, and others were not",
                where=f"parameter {self.members[cleared[0]].name}",
                needed="optimizer.zero_grad(), or model.zero_grad(), of all parameters",
            )
        if cleared:
            self.gradients.taken = set()
            self.discard()

    # --- While something else needs the device ---

    def offload(self, parameters: bool) -> None:
        require_stream(self._gpu, self._stream)  # the stream is checked before writes are taken over
        self.require_not_updated("cannot offload the optimizer")
        self._discard_cleared_gradients()
        self.accept_writes()
        [taken] = self.ranks.all_reduce([len(self.gradients.taken)])
        if taken > 0:
            refuse_order(
                "cannot offload the optimizer between a backward pass and its step: it has gradients",
                needed="step() or zero_grad() before offload()",
            )
        self._copies.forget_views()
        super().offload(parameters)

    # --- Reports ---

    def chrome_trace(self) -> str:
        self.memory.release_unit()
        return self.core.chrome_trace()
