"""The options of `wrap()`, and which values and combinations are possible."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from ballast import _core
from ballast.checks import is_number, one_of, read_count, refuse, refuse_value, require_directory, require_timeout
from ballast.formats import AUTO, Formats, each_pair
from ballast.schema import Option, call_of, changed, documented, options_of, require_stage_3, set_core
from ballast.sizes import Size, parse_size
from ballast.step_options import ScheduleOptions, StepOptions
from ballast.tiers import (
    KINDS,
    TIERS,
    ActivationOptions,
    TierFractions,
    directory_of,
    fractions_of,
    read_activation_options,
    set_tiers,
    spread_of,
    tier_of,
    tiers_by_kind,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


ALL_OF_A_SHARD = 1 << 60


def read_units(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of classes. A string is one name.

    >>> read_units("Block"), read_units(["Block", "Embedding"]), read_units(())
    (('Block',), ('Block', 'Embedding'), ())
    """
    units: tuple[object, ...] = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    names = tuple(each for each in units if isinstance(each, str))
    if len(names) < len(units):
        refuse_value("units", given, 'names of classes of modules, such as units=["Block"]')
    return names


@documented
@dataclass(kw_only=True, unsafe_hash=True, repr=False)
class Tuning(ScheduleOptions):
    """Set what hardly anybody sets by hand: `wrap(..., tuning=ballast.Tuning(prefetch=2))`.

    >>> import ballast
    >>> ballast.Tuning(prefetch=2)
    ballast.Tuning(prefetch=2)

    {options}
    """

    overlap_gathers: Option[bool | None, bool | None] = Option(
        None,
        "below stage 3, lets step() return while parameters are updated and gathered: each use waits for those that it needs; "
        "None: if `model` is given, except where one rank has all on a CPU, or torch.jit has scripted or traced a module",
        core="overlap_gathers",
        to_core=bool,
    )
    units: Option[str | Iterable[str], tuple[str, ...]] = Option(
        (),
        "in stage 3, names of module classes that are gathered as one; default: the repeated blocks",
        read_units,
        needs_stage_3=True,
        deepspeed=("zero_optimization.leaf_module",),
    )
    elementwise: Option[bool, bool] = Option(
        False, "declares that an unknown optimizer treats each element alone, so that it can work on shards"
    )
    calls_differ: Option[bool, bool] = Option(
        False,
        "in stage 3, ranks use different units, as experts without tokens; they see it in the first 10 steps",
        needs_stage_3=True,
    )
    replicated: Option[Iterable[torch.Tensor], tuple[torch.Tensor, ...]] = Option(
        (),
        "parameters that all ranks of `mesh` with other parts of the model hold, which the gradient norm counts once",
        tuple,
        per_rank=True,  # each rank names its own tensors
    )
    tile: Option[Size, int] = Option(
        0,
        'elements that are moved and updated together, such as "1Mi"; 0: what a rank keeps of a unit on the device, 256Ki to '
        "2Mi elsewhere",
        parse_size,
        core="tile_elements",
    )
    threads: Option[int, int] = Option(
        0,
        "CPU threads of updates; 0: this rank's share of the cores that it may use",
        partial(
            read_count,
            "threads",
            least=0,
            needed="a number of threads, or 0 for this rank's share of the cores that it may use",
        ),
        per_rank=True,
        core="threads",
        deepspeed=("zero_optimization.offload_optimizer.cpuadam_cores_perc",),
    )
    timeout: Option[float | None, float | None] = Option(
        None, "seconds of each wait for other ranks", require_timeout, per_rank=True
    )
    verify: Option[int, int] = Option(
        0,
        "repeats a part of the updates with other code, once in this many steps; different bits raise B3001",
        partial(read_count, "verify", least=0, needed="a number of steps, or 0 for never"),
        per_rank=True,
        core="verify",
    )
    timeline: Option[bool, bool] = Option(
        False,
        "records when each operation ran, for `optimizer.write_timeline(path)`",
        per_rank=True,
        core="keeps_timeline",
    )

    def __repr__(self) -> str:
        return call_of(self)


@documented
@dataclass(unsafe_hash=True)
class Run:
    """Name a run, which resumes after its last step: `wrap(..., run=ballast.Run("mine", mirror=True))`.

    >>> import ballast
    >>> ballast.Run("mine").mirror
    False

    {options}
    """

    name: Option[str, str] = Option("", "under which drives keep state and trained parameters", core="run")
    mirror: Option[bool, bool] = Option(
        False,
        "keeps the records on another host's drive too (on one host: another rank's), to survive its loss",
        core="mirror",
    )
    checkpoint: Option[str | os.PathLike[str], str] = Option(
        "",
        "a directory of `ballast.save()`: a run that has no records, or lost them, begins from its newest one",
        lambda given: os.fspath(given),
        per_rank=True,
        core="begins_again",
        to_core=bool,
    )


def _read_mesh(given: DeviceMesh | None) -> DeviceMesh | None:
    if given is not None and not hasattr(given, "mesh_dim_names"):
        refuse_value("mesh", given, "a DeviceMesh of torch.distributed, or None")
    return given


def _read_tuning(given: Tuning) -> Tuning:
    if not isinstance(given, Tuning):
        refuse_value("tuning", given, "ballast.Tuning(...)")
    return given


@dataclass(kw_only=True, unsafe_hash=True)
class WrapOptions(StepOptions):
    """The options of `wrap()`."""

    memory: Option[Size | None, int | None] = Option(
        None,
        'limits what the library keeps on this rank\'s device (or CPU), such as "40GiB", without activations. A larger plan is '
        'refused before anything is reserved (B2004). All ranks set it, or none: "auto" then counts on three quarters of the '
        "free memory",
        parse_size,
        per_rank=True,
    )
    activations: Option[str | None, ActivationOptions | None] = Option(
        None,
        '"host" or "nvme:/scratch" moves there what autograd saves in calls of `model`, until backward; on a CPU a drive only. '
        "`ballast.offload_activations()` does so for a part of a program",
        read_activation_options,
        per_rank=True,
    )
    max_grad_norm: Option[float | None, float | None] = Option(None, "clips gradients to this norm in each step")
    mesh: Option[DeviceMesh | None, DeviceMesh | None] = Option(
        None,
        'the ranks that share this training; None: all. Of several dimensions, those with other data are called "data" or '
        '"dp", those with other parts of the same model "tensor", "tp" and the like: the gradient norm includes these. '
        "Placements of DTensors say the rest",
        _read_mesh,
        per_rank=True,
    )
    run: Option[str | Run, Run] = Option(
        "",
        "a name under which drives keep state and trained parameters, not buffers: a training of the same model and optimizer "
        "resumes after its last step, on any ranks, in any stage and format; others are refused. `ballast.Run` also names a "
        "mirror and a checkpoint",
        lambda given: given if isinstance(given, Run) else Run(given),
    )
    tuning: Option[Tuning, Tuning] = Option(Tuning(), "what hardly anybody sets: see `help(ballast.Tuning)`", _read_tuning)

    def for_training(self, *, gpu: int | None, stream: int) -> _core.TrainingOptions:
        options = _core.TrainingOptions()
        assert self.stage is not None  # it is chosen by now
        set_core(options, self, self.tuning, self.run)
        options.overlap_gathers = bool(self.tuning.overlap_gathers) and self.stage < 3  # stage 3 always overlaps them
        options.max_norm = self.max_norm
        options.gpu = gpu
        options.stream = stream
        for kind, tiers in self.tiers.items():
            setattr(options, kind, spread_of(tiers))
        options.directories = self.directories
        return options

    def shared(self) -> dict[str, object]:
        """Return the options that are the same on all ranks, by name. The tiers are named by `offload`."""
        groups = (self, self.tuning, self.run)
        shared = {
            name: getattr(options, name)
            for options in groups
            for name, option in options_of(type(options)).items()
            if not option.per_rank and name not in ("run", "tuning")
        }
        return shared | {"run": shared.pop("name")}

    @property
    def chooses_formats(self) -> bool:
        return len(self.state_formats) > 1 or len(self.gradient_format) > 1

    def by_format(self) -> list[WrapOptions]:
        """Return options for each pair of formats that are allowed, the most exact ones first."""
        return [self.with_formats(pair) for pair in each_pair(self.state_formats, self.gradient_format)]

    def with_formats(self, formats: Formats) -> WrapOptions:
        return changed(self, state_format=(formats.state,), gradient_format=(formats.gradients,))

    @property
    def chooses_tiers(self) -> bool:
        return isinstance(self.offload, str) and tier_of(self.offload) == AUTO

    @property
    def chooses(self) -> bool:
        return self.stage is None or self.chooses_tiers or self.chooses_formats

    @cached_property
    def keeps_full_parameters(self) -> bool:
        """Whether each rank certainly keeps all parameters. A stage that is not chosen yet may become 3."""
        return self.stage is not None and self.stage < 3

    @property
    def tiers(self) -> Mapping[str, TierFractions]:
        """The tiers by kind, as far as they are given. Other kinds stay on the device."""
        return {} if self.offload is None or self.chooses_tiers else tiers_by_kind(self.offload)

    @property
    def directories(self) -> list[str]:
        """The directories on drives, each once."""
        given = [self.offload] if isinstance(self.offload, str) else []
        words = [word for tiers in self.tiers.values() for word in fractions_of(tiers)] + given
        return list(dict.fromkeys(path for path in map(directory_of, words) if path))

    @property
    def tier_of_state(self) -> str:
        """The tier of the optimizer's state; the first one where it is in several."""
        return tier_of(next(iter(fractions_of(self.tiers.get("state", "device")))))

    @property
    def needs_stored_state(self) -> bool:
        """Whether the library has to keep all state itself: it is in tiles, on a drive, in several tiers, or its size decides
        where it is."""
        tiers = fractions_of(self.tiers.get("state", "device"))
        is_placed = len(tiers) > 1 or self.tier_of_state == "nvme"
        return self.chooses or self.memory is not None or is_placed or self.tuning.tile > 0

    @property
    def max_norm(self) -> float:
        return math.inf if self.max_grad_norm is None else float(self.max_grad_norm)


def checked(options: WrapOptions) -> WrapOptions:
    """Refuse values and combinations that are not possible. Return the options, with stage 3 where only that is
    possible."""
    if options.max_grad_norm is not None and not (is_number(options.max_grad_norm) and options.max_grad_norm > 0):
        refuse_value("max_grad_norm", options.max_grad_norm, "a number above 0, or None")
    for group in (options, options.tuning):
        require_stage_3(group, options.stage)
    if options.tuning.update_in_backward and options.keeps_full_parameters:
        why = f"in stage {options.stage} torch uses the parameters during the backward pass"
        refuse_value("update_in_backward", True, "stage 3", why=why)
    _core.require_clipping(update_in_backward=bool(options.tuning.update_in_backward), max_norm=options.max_norm)
    _check_offload(options)
    if options.outer is not None and options.run.name:
        refuse(
            f'run="{options.run.name}" and outer= exclude each other: drives do not keep the outer optimizer of a run',
            needed="ballast.save() and ballast.load_checkpoint(), which keep it",
        )
    offloads_parameters = spread_of(options.tiers.get("parameters", "device")) != _core.Spread(device=1.0)
    needs_stage_3 = offloads_parameters or options.tuning.update_in_backward or options.replicas != 1
    narrowed = changed(options, stage=3) if options.stage is None and needs_stage_3 else options
    narrowed.wire.require_possible(narrowed.stage)
    return narrowed


ONE_BY_ONE = "Or wrap them one after the other, each with options of its own."


def options_for_several(options: WrapOptions) -> WrapOptions:
    """Return the options for several optimizers that are wrapped in one call, and refuse those that have another meaning for
    several optimizers than for one."""
    if options.stage is None:
        refuse('stage="auto" chooses for one optimizer alone', needed="a stage for all of them")
    if options.memory is not None:
        refuse("memory= limits what is kept for one optimizer", needed="no limit for a list of them", remedy=ONE_BY_ONE)
    if options.max_grad_norm is not None:
        refuse(
            "max_grad_norm= clips the gradients of one optimizer",
            needed="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which clips those of all",
            remedy=ONE_BY_ONE,
        )
    if options.outer is not None:
        refuse("outer= exchanges the parameters of one optimizer", needed="one optimizer for all of a model's parameters")
    return options


def for_stored_step(options: WrapOptions) -> WrapOptions:
    """Return the options for an optimizer whose own step makes the updates, with state that the library keeps. That step
    needs masters in fp32."""
    why = "the optimizer makes updates with its own step, for which the library has no rule"
    if options.state_format not in ((), ("fp32",)):
        refuse_value("state_format", options.formats.state, "fp32: its step computes with that", why=why)
    if options.tuning.update_in_backward:
        refuse_value("update_in_backward", True, "updates after the backward pass", why=why)
    if options.tuning.verify > 0:
        refuse_value("verify", options.tuning.verify, "0: the library cannot repeat its updates", why=why)
    return changed(options, state_format=("fp32",))


def for_custom_step(options: WrapOptions) -> WrapOptions:
    """Return the options for an optimizer whose own step makes the updates, and keeps its state itself. That step needs each
    shard in one piece."""
    return changed(for_stored_step(options), tuning=changed(options.tuning, tile=ALL_OF_A_SHARD))


def without_gpu(options: WrapOptions) -> WrapOptions:
    """Return the options for a CPU: a tier without a kind applies to the state alone, because moving gradients to the
    host would copy them from memory to memory."""
    if isinstance(options.offload, str) and not options.chooses_tiers:
        return changed(options, offload={"state": options.offload})
    return options


def _check_offload(options: WrapOptions) -> None:
    if not (options.offload is None or isinstance(options.offload, (str, Mapping))):
        refuse_value("offload", options.offload, 'a tier such as "host", or tiers by kind; or None')
    run = options.run
    if run.name:
        _core.require_run_name(run.name)
    for name in ("mirror", "checkpoint"):
        if getattr(run, name) and not run.name:
            refuse(
                f"{name}={getattr(run, name)!r} needs a run", needed='run=ballast.Run("NAME", ...), with all state on drives'
            )
    if run.name and options.chooses:
        refuse(f'run="{run.name}" and "{AUTO}" exclude each other: a run resumes where it was', needed="a stage and tiers")
    if options.chooses_tiers:
        assert isinstance(options.offload, str)
        if options.offload.endswith(":"):
            refuse(f'offload="{options.offload}" names no directory', needed=f'a directory, such as "{AUTO}:/scratch"')
    for kind, tiers in options.tiers.items():
        left_out = "Kinds that are left out stay on the device; the state goes with the parameters."
        one_of("kind of state", kind, KINDS, remedy=left_out)
        for tier, _, path in (word.partition(":") for word in fractions_of(tiers)):
            one_of("tier", tier, TIERS)
            if tier == "nvme" and not path:
                refuse(f"cannot keep {kind} on a drive: no directory is given", needed='a directory, such as "nvme:/scratch"')
    if options.replicas != 1 and spread_of(options.tiers.get("parameters", "device")) != _core.Spread(device=1.0):
        refuse(
            "replicas= and parameters in another tier exclude each other: copies of parameters are kept on the device",
            needed="one of them",
        )
    for path in options.directories:
        require_directory(path, where="offload")
    placement = _core.placement_of_stage(3 if options.stage is None else options.stage, 1)
    set_tiers(placement, options.tiers)
    if run.name:
        _core.require_run_on_drives(run.name, state=spread_of(options.tiers.get("state", "device")))
