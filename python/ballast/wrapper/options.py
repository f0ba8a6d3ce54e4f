"""Read and check the options of `wrap()`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ballast import _core
from ballast.checks import is_number, one_of, read_count, refuse, refuse_value, require_directory, require_timeout
from ballast.formats import AUTO, Formats, each_pair
from ballast.keep_gathered import require_stage_3
from ballast.outer.options import DiLoCo
from ballast.replicas import OF_HOSTS, Replicas
from ballast.sizes import Size, parse_size
from ballast.tiers import KINDS, TIERS, Offload, TierFractions, fractions_of, set_tiers, spread_of, tier_of, tiers_by_kind
from ballast.wire import Wire
from ballast.wrapper.activation_options import ActivationOptions

ALL_OF_A_SHARD = 1 << 60


@dataclass(frozen=True)
class WrapOptions:
    """The options of `wrap()` without its process groups. Their defaults are in its signature."""

    stage: int | None  # None: chosen when the parameters are partitioned
    offload: Offload | None
    memory: int | None  # bytes that the library may keep on this rank's device
    max_grad_norm: float | None
    state_format: tuple[str, ...] | None  # those to choose from, the most exact one first; None: see `formats`
    gradient_format: tuple[str, ...]
    update_in_backward: bool
    overlap_gathers: bool
    prefetch: int  # units that are gathered ahead
    keep_gathered: int  # bytes for gathered parameters; 0: as many as prefetching needs
    elementwise: bool
    units: tuple[str, ...]  # classes of modules whose parameters are gathered together; empty: the repeated blocks
    run: str
    mirror: bool  # whether each rank's records are on another rank's drive too
    checkpoint: str  # from which a run without records begins; from the start on the newest one in the folder
    timeline: bool
    verify: int  # steps between two repeated updates
    tile: Size
    threads: int
    timeout: float | None
    activations: ActivationOptions | None  # None: they stay on the device
    wire: Wire
    replicas: Replicas  # copies of the parameters; "host" until the ranks are connected
    outer: DiLoCo | None  # None: all hosts make each step together
    calls_differ: bool  # ranks use different units of stage 3

    def for_training(self, *, gpu: int | None, stream: int) -> _core.TrainingOptions:
        options = _core.TrainingOptions()
        assert self.stage is not None  # it is chosen by now
        options.stage = self.stage
        options.parameter_replicas = self.parameter_replicas
        options.format = _core.StateFormat[self.formats.state]
        options.gradient_format = _core.GradientFormat[self.formats.gradients]
        options.run = self.run
        options.mirror = self.mirror
        options.begins_again = bool(self.checkpoint)
        options.threads = self.threads
        options.gpu = gpu
        options.stream = stream
        options.keeps_timeline = self.timeline
        options.update_in_backward = self.update_in_backward
        options.overlap_gathers = self.overlap_gathers and self.stage < 3  # in stage 3 they always overlap
        options.prefetch = self.prefetch
        options.gathered_bytes = self.keep_gathered
        options.verify = self.verify
        options.wire = self.wire.for_core()
        options.tile_elements = parse_size(self.tile)
        for kind, tiers in self.tiers.items():
            setattr(options, kind, spread_of(tiers))
        options.directories = self.directories
        return options

    @property
    def parameter_replicas(self) -> int:
        assert self.replicas != OF_HOSTS  # the ranks are connected by now
        return self.replicas

    @property
    def formats(self) -> Formats:
        """The formats; the most exact ones, while several are allowed."""
        return Formats(self.state_formats[0], self.gradient_format[0])

    @property
    def state_formats(self) -> tuple[str, ...]:
        return self.state_format or ("split",)

    @property
    def chooses_formats(self) -> bool:
        return len(self.state_formats) > 1 or len(self.gradient_format) > 1

    def of_each_format(self) -> list[WrapOptions]:
        """Return options for each pair of formats that are allowed, the most exact ones first."""
        return [self.with_formats(pair) for pair in each_pair(self.state_formats, self.gradient_format)]

    def with_formats(self, formats: Formats) -> WrapOptions:
        return replace(self, state_format=(formats.state,), gradient_format=(formats.gradients,))

    @property
    def chooses_tiers(self) -> bool:
        return isinstance(self.offload, str) and tier_of(self.offload) == AUTO

    @property
    def chooses(self) -> bool:
        return self.stage is None or self.chooses_tiers or self.chooses_formats

    @property
    def keeps_full_parameters(self) -> bool:
        """Whether each rank certainly keeps all parameters. A stage that is not chosen yet may become 3."""
        return self.stage is not None and self.stage < 3

    @property
    def tiers(self) -> Mapping[str, TierFractions]:
        """The tiers by kind, as far as they are given. Other kinds stay on the device."""
        return {} if self.offload is None or self.chooses_tiers else tiers_by_kind(self.offload)

    @property
    def tier_without_kinds(self) -> str | None:
        return self.offload if isinstance(self.offload, str) and not self.chooses_tiers else None

    @property
    def directories(self) -> list[str]:
        """The directories on drives, each once."""
        given = [self.offload] if isinstance(self.offload, str) else []
        words = [word for tiers in self.tiers.values() for word in fractions_of(tiers)] + given
        return list(dict.fromkeys(path for _, _, path in (word.partition(":") for word in words) if path))

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
        return self.chooses or self.memory is not None or is_placed or parse_size(self.tile) > 0

    @property
    def max_norm(self) -> float:
        return math.inf if self.max_grad_norm is None else float(self.max_grad_norm)


def read_memory(memory: Size | None) -> int | None:
    return None if memory is None else parse_size(memory)


def read_units(given: str | Iterable[str], stage: int | None) -> tuple[str, ...]:
    """Return the names of classes. A string is one name.

    >>> read_units("Block", 3), read_units(["Block", "Embedding"], None), read_units((), 2)
    (('Block',), ('Block', 'Embedding'), ())
    """
    units: tuple[object, ...] = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    names = tuple(each for each in units if isinstance(each, str))
    if len(names) < len(units):
        refuse_value("units", given, 'names of classes of modules, such as units=["Block"]')
    if names:
        require_stage_3("units", given, stage)
    return names


def read_calls_differ(given: bool, stage: int | None) -> bool:
    if given:
        require_stage_3("calls_differ", given, stage)
    return given


def checked(options: WrapOptions) -> WrapOptions:
    """Refuse values and combinations that are not possible. Return the options, with stage 3 where only that is
    possible."""
    if options.max_grad_norm is not None and not (is_number(options.max_grad_norm) and options.max_grad_norm > 0):
        refuse_value("max_grad_norm", options.max_grad_norm, "a number above 0, or None")
    options = _with_counts(options)
    require_timeout(options.timeout)
    if options.update_in_backward and options.keeps_full_parameters:
        why = f"in stage {options.stage} torch uses the parameters during the backward pass"
        refuse_value("update_in_backward", True, "stage 3", why=why)
    if options.update_in_backward and options.max_grad_norm is not None:
        refuse(
            "update_in_backward and max_grad_norm exclude each other: the norm is known after the backward pass",
            needed="one of them",
        )
    _check_offload(options)
    if options.outer is not None and options.run:
        refuse(
            f'run="{options.run}" and outer= exclude each other: drives do not keep the outer optimizer of a run',
            needed="ballast.save() and ballast.load_checkpoint(), which keep it",
        )
    narrowed = _narrowed(options)
    narrowed.wire.require_possible(narrowed.stage)
    return narrowed


def _with_counts(options: WrapOptions) -> WrapOptions:
    """Return the options with their counts as numbers of Python."""
    of_threads = "a number of threads, or 0 for one on each core that this process may use"
    return replace(
        options,
        verify=read_count("verify", options.verify, least=0, needed="a number of steps, or 0 for never"),
        threads=read_count("threads", options.threads, least=0, needed=of_threads),
    )


def for_stored_step(options: WrapOptions) -> WrapOptions:
    """Return the options for an optimizer whose own step makes the updates, with state that the library keeps. That step
    needs masters in fp32."""
    why = "the optimizer makes updates with its own step, for which the library has no rule"
    if options.state_format not in (None, ("fp32",)):
        refuse_value("state_format", options.formats.state, "fp32: its step computes with that", why=why)
    if options.update_in_backward:
        refuse_value("update_in_backward", True, "updates after the backward pass", why=why)
    if options.verify > 0:
        refuse_value("verify", options.verify, "0: the library cannot repeat its updates", why=why)
    return replace(options, state_format=("fp32",))


def for_custom_step(options: WrapOptions) -> WrapOptions:
    """Return the options for an optimizer whose own step makes the updates, and keeps its state itself. That step needs each
    shard in one piece."""
    return replace(for_stored_step(options), tile=ALL_OF_A_SHARD)


def without_gpu(options: WrapOptions) -> WrapOptions:
    """Return the options for a CPU: a tier without a kind applies to the state alone, because moving gradients to the
    host would copy them from memory to memory."""
    if isinstance(options.offload, str) and not options.chooses_tiers:
        return replace(options, offload={"state": options.offload})
    return options


def _narrowed(options: WrapOptions) -> WrapOptions:
    """Choose stage 3 where the other options are possible in stage 3 only."""
    if options.stage is not None:
        return options
    offloads_parameters = spread_of(options.tiers.get("parameters", "device")) != _core.Spread(device=1.0)
    needs_stage_3 = offloads_parameters or options.update_in_backward or options.replicas != 1
    return replace(options, stage=3) if needs_stage_3 else options


def _check_offload(options: WrapOptions) -> None:
    if not (options.offload is None or isinstance(options.offload, (str, Mapping))):
        refuse_value("offload", options.offload, 'a tier such as "host", or tiers by kind; or None')
    if options.run:
        _core.require_run_name(options.run)
    for name in ("mirror", "checkpoint"):
        if getattr(options, name) and not options.run:
            refuse(f"{name}={getattr(options, name)!r} needs a run", needed='run="NAME", with all state on drives')
    if options.run and options.chooses:
        refuse(f'run="{options.run}" and "{AUTO}" exclude each other: a run resumes where it was', needed="a stage and tiers")
    if options.chooses_tiers:
        assert isinstance(options.offload, str)
        if options.offload.endswith(":"):
            refuse(f'offload="{options.offload}" names no directory', needed=f'a directory, such as "{AUTO}:/scratch"')
    for kind, tiers in options.tiers.items():
        left_out = "Kinds that are left out stay on the device; the state goes with the parameters."
        one_of("kind of state", kind, KINDS, remedy=left_out)
        for word in fractions_of(tiers):
            _check_word(kind, word, options)
    if options.replicas != 1 and spread_of(options.tiers.get("parameters", "device")) != _core.Spread(device=1.0):
        refuse(
            "replicas= and parameters in another tier exclude each other: copies of parameters are kept on the device",
            needed="one of them",
        )
    for path in options.directories:
        require_directory(path, where="offload")
    placement = _core.placement_of_stage(3 if options.stage is None else options.stage, 1)
    set_tiers(placement, options.tiers)
    if options.run:
        _core.require_run_on_drives(options.run, state=spread_of(options.tiers.get("state", "device")))


def _check_word(kind: str, word: str, options: WrapOptions) -> None:
    tier, _, path = word.partition(":")
    one_of("tier", tier, TIERS)
    if kind == "parameters" and tier != "device" and options.keeps_full_parameters:
        refuse(f"cannot keep parameters on {tier}: below stage 3 each rank keeps all of them, on the device", needed="stage 3")
    if tier == "nvme" and not path:
        refuse(f"cannot keep {kind} on a drive: no directory is given", needed='a directory, such as "nvme:/scratch"')
