"""What `wrap()` can be asked, read and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ballast import _core
from ballast.checks import all_known, one_of, refuse
from ballast.sizes import Size, parse_size

KINDS = ("parameters", "gradients", "state")
ALL_OF_A_SHARD = 1 << 60


@dataclass(frozen=True)
class WrapOptions:
    """The keywords of `wrap()`, beside the process group."""

    stage: int = 2
    units: tuple[str, ...] = ()  # classes of modules whose parameters are gathered together; else repeated blocks
    offload: str | Mapping[str, str] | None = None
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
        options.stage = self.stage
        options.format = self._format()
        options.run = self.run
        options.threads = self.threads
        options.gpu = gpu
        options.stream = stream
        options.keeps_timeline = self.timeline
        options.update_in_backward = self.update_in_backward
        options.verify = self.verify
        options.tile_elements = parse_size(self.tile)
        directories = []
        for kind, word in self._places().items():
            tier, _, path = word.partition(":")
            setattr(options, kind, _core.Spread(**{tier: 1.0}))
            if path and path not in directories:
                directories.append(path)
        options.directories = directories
        return options

    def _format(self) -> _core.StateFormat:
        return _core.StateFormat.split if self.state_format == "auto" else _core.StateFormat[self.state_format]

    def _places(self) -> Mapping[str, str]:
        """Of one word: the state goes there, and gradients with it, where they can."""
        if self.offload is None:
            return {}
        if not isinstance(self.offload, str):
            return self.offload
        return {"state": self.offload, "gradients": "host"}

    def tier_of(self, kind: str) -> str:
        return self._places().get(kind, "device").partition(":")[0]

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
    if options.stage not in (0, 1, 2, 3):
        refuse(f"stage={options.stage!r} was asked for", needed="0, 1, 2 or 3")
    one_of("state format", options.state_format, ["auto", *(known.name for known in _core.StateFormat)])
    if options.max_grad_norm is not None and not options.max_grad_norm > 0:
        refuse(f"max_grad_norm={options.max_grad_norm} was asked for", needed="a number above 0, or None")
    if isinstance(options.verify, bool) or not isinstance(options.verify, int) or options.verify < 0:
        refuse(f"verify={options.verify!r} was asked for", needed="a number of steps, or 0 for never")
    if options.update_in_backward and options.stage < 3:
        refuse("update_in_backward was asked for", needed="stage 3: below it parameters are torch's while it goes backward")
    if options.update_in_backward and options.max_grad_norm is not None:
        refuse("update_in_backward was asked for, and max_grad_norm", needed="one of them: norms come after the backward pass")
    all_known("kind of state", options._places(), KINDS)
    for kind, word in options._places().items():
        _check_place(kind, word, options.stage)
    return options


def for_own_step(options: WrapOptions) -> WrapOptions:
    """Where the optimizer's own step makes updates: it needs all masters at once, in fp32, and parts in one piece."""
    why = "the optimizer makes updates with its own step, for which the library has no rule"
    if options.tier_of("state") == "nvme":
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


def _check_place(kind: str, word: str, stage: int) -> None:
    tier, _, path = word.partition(":")
    one_of("tier", tier, [known.name for known in _core.Tier])
    if kind == "parameters" and tier != "device" and stage < 3:
        refuse(f"parameters were to be kept on {tier}", needed="stage 3: below it they are kept whole, on the device")
    if tier == "nvme" and not path:
        refuse("state was to be kept on a drive, and no directory was given", needed='such as "nvme:/scratch"')
    if path and not Path(path).is_dir():
        refuse(f"{path} is no directory", where=f"offload, {kind}", needed="one that exists, on the drive")
