"""What `wrap()` can be asked, read and checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ballast import _core
from ballast.checks import all_known, is_number, one_of, refuse, require_timeout
from ballast.options import read_stage
from ballast.places import KINDS, TIERS, Offload, Place, by_kind, fractions_of, set_places, spread_of, tier_of
from ballast.sizes import Size, parse_size

AUTO = "auto"
ALL_OF_A_SHARD = 1 << 60


@dataclass(frozen=True)
class WrapOptions:
    """The keywords of `wrap()`, beside the process group."""

    stage: int | None = 2  # none: chosen when parameters are partitioned
    units: tuple[str, ...] = ()  # classes of modules whose parameters are gathered together; else repeated blocks
    offload: Offload | None = None
    memory: Size | None = None  # that the library may keep on this rank's device
    max_grad_norm: float | None = None
    elementwise: bool = False  # the user says so of the optimizer's step
    update_in_backward: bool = False
    state_format: str = "auto"
    tile: Size = 0
    run: str = ""
    threads: int = 0
    timeout: float | None = None
    timeline: bool = False
    verify: int = 0  # every so many steps an update is made twice

    def for_training(self, *, gpu: int | None, stream: int) -> _core.TrainingOptions:
        options = _core.TrainingOptions()
        assert self.stage is not None  # chosen by now
        options.stage = self.stage
        options.format = self.format
        options.run = self.run
        options.threads = self.threads
        options.gpu = gpu
        options.stream = stream
        options.keeps_timeline = self.timeline
        options.update_in_backward = self.update_in_backward
        options.verify = self.verify
        options.tile_elements = parse_size(self.tile)
        for kind, place in self.places.items():
            setattr(options, kind, spread_of(place))
        options.directories = self.directories
        return options

    @property
    def format(self) -> _core.StateFormat:
        return _core.StateFormat.split if self.state_format == "auto" else _core.StateFormat[self.state_format]

    @property
    def chooses_places(self) -> bool:
        return isinstance(self.offload, str) and tier_of(self.offload) == AUTO

    @property
    def chooses(self) -> bool:
        return self.stage is None or self.chooses_places

    @property
    def keeps_parameters_whole(self) -> bool:
        """For certain: what is still to be chosen may be stage 3."""
        return self.stage is not None and self.stage < 3

    @property
    def places(self) -> Mapping[str, Place]:
        """By kind, where they are given. What is not named is on the device."""
        return {} if self.offload is None or self.chooses_places else by_kind(self.offload)

    @property
    def directories(self) -> list[str]:
        """Of drives, each once."""
        given = [self.offload] if isinstance(self.offload, str) else []
        words = [word for place in self.places.values() for word in fractions_of(place)] + given
        return list(dict.fromkeys(path for _, _, path in (word.partition(":") for word in words) if path))

    @property
    def tier_of_state(self) -> str:
        """The first of them, where it is in several."""
        return tier_of(next(iter(fractions_of(self.places.get("state", "device")))))

    @property
    def max_norm(self) -> float:
        return math.inf if self.max_grad_norm is None else float(self.max_grad_norm)


def read(given: Mapping[str, Any]) -> WrapOptions:
    """
    >>> read({"stag": 2})
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 there is no option "stag"
      needed:    one of stage, units, ...
      remedy:    Did you mean "stage"?
    ...
    """
    all_known("option", given, (known.name for known in fields(WrapOptions)))
    options = WrapOptions(**given)
    options = replace(options, stage=read_stage(options.stage))
    if options.memory is not None:
        options = replace(options, memory=parse_size(options.memory))
    one_of("state format", options.state_format, ["auto", *(known.name for known in _core.StateFormat)])
    if options.max_grad_norm is not None and not (is_number(options.max_grad_norm) and options.max_grad_norm > 0):
        refuse(f"max_grad_norm={options.max_grad_norm!r} was asked for", needed="a number above 0, or None")
    _require_count("verify", options.verify, "a number of steps, or 0 for never")
    _require_count("threads", options.threads, "a number of threads, or 0 for one on each core that this process may use")
    require_timeout(options.timeout)
    if isinstance(options.units, str):
        options = replace(options, units=(options.units,))
    if options.update_in_backward and options.keeps_parameters_whole:
        refuse("update_in_backward was asked for", needed="stage 3: below it parameters are torch's while it goes backward")
    if options.update_in_backward and options.max_grad_norm is not None:
        refuse("update_in_backward was asked for, and max_grad_norm", needed="one of them: norms come after the backward pass")
    _check_places(options)
    return _narrowed(options)


def _require_count(name: str, value: Any, needed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        refuse(f"{name}={value!r} was asked for", needed=needed)


def for_own_step(options: WrapOptions) -> WrapOptions:
    """Where the optimizer's own step makes updates: it needs all masters at once, in fp32, and parts in one piece."""
    why = "the optimizer makes updates with its own step, for which the library has no rule"
    if options.chooses or options.memory is not None:
        asked = "memory" if options.memory is not None else f'"{AUTO}"'
        refuse(f"{asked} was asked for, but {why}", needed="a stage and places: nobody knows what its step is going to keep")
    if len(fractions_of(options.places.get("state", "device"))) > 1:
        refuse(f"state was to be kept in several tiers, but {why}", needed='"host" or "device": it is not cut')
    if options.tier_of_state == "nvme":
        refuse(f"state was to be kept on a drive, but {why}", needed='"host" or "device": it needs all state at once')
    if options.state_format not in ("auto", "fp32"):
        refuse(f"state_format={options.state_format!r} was asked for, but {why}", needed="fp32: it computes with that")
    if options.update_in_backward:
        refuse(f"update_in_backward was asked for, but {why}", needed="updates after the backward pass")
    if options.verify > 0:
        refuse(f"verify={options.verify} was asked for, but {why}", needed="0: the library cannot make them a second time")
    if parse_size(options.tile) > 0:
        refuse(f"tile={options.tile!r} was asked for, but {why}", needed="none: it takes a rank's part as a whole")
    return replace(options, state_format="fp32", tile=ALL_OF_A_SHARD)


def without_gpu(options: WrapOptions) -> WrapOptions:
    """What is said of the state alone is meant for it alone: on a CPU gradients would be copied from memory to memory."""
    if isinstance(options.offload, str) and not options.chooses_places:
        return replace(options, offload={"state": options.offload})
    return options


def _narrowed(options: WrapOptions) -> WrapOptions:
    """What only stage 3 can do leaves no stage to choose."""
    if options.stage is not None:
        return options
    away = spread_of(options.places.get("parameters", "device")) != _core.Spread(device=1.0)
    return replace(options, stage=3) if away or options.update_in_backward else options


def _check_places(options: WrapOptions) -> None:
    if not (options.offload is None or isinstance(options.offload, (str, Mapping))):
        refuse(f"offload={options.offload!r} was asked for", needed='a place such as "host", or places by kind; or None')
    if options.run and options.chooses:
        refuse(f'run="{options.run}" was asked for, and "{AUTO}"', needed="a stage and places: a run goes on where it was")
    if options.chooses_places:
        assert isinstance(options.offload, str)
        if options.offload.endswith(":"):
            refuse(f'offload="{options.offload}" was asked for', needed=f'such as "{AUTO}:/scratch"')
    all_known("kind of state", options.places, KINDS)
    for kind, place in options.places.items():
        for word in fractions_of(place):
            _check_word(kind, word, options)
    for path in options.directories:
        if not Path(path).is_dir():
            refuse(f"{path} is no directory", where="offload", needed="one that exists, on the drive")
    placement = _core.placement_of_stage(3 if options.stage is None else options.stage, 1)
    set_places(placement, options.places)
    if options.run and spread_of(options.places.get("state", "device")).nvme < 1.0:
        refuse(f'cannot keep run "{options.run}": its state is not all on drives', needed='offload={"state": "nvme:DIRECTORY"}')


def _check_word(kind: str, word: str, options: WrapOptions) -> None:
    tier, _, path = word.partition(":")
    one_of("tier", tier, TIERS)
    if kind == "parameters" and tier != "device" and options.keeps_parameters_whole:
        refuse(f"parameters were to be kept on {tier}", needed="stage 3: below it they are kept whole, on the device")
    if tier == "nvme" and not path:
        refuse(f"a drive was asked for to keep {kind} on, and no directory was given", needed='such as "nvme:/scratch"')
