"""The options of a step, which a training and a plan have in common, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ballast import _core
from ballast.checks import read_count, refuse, refuse_value
from ballast.formats import (
    Formats,
    GradientFormats,
    StateFormats,
    Wire,
    WireFormats,
    read_gradient_formats,
    read_state_formats,
    read_wire,
)
from ballast.outer.options import DiLoCo, read_outer
from ballast.schema import Option
from ballast.sizes import Size, parse_size
from ballast.tiers import Offload

Replicas = Literal["host"] | int


def read_replicas(given: object) -> Replicas:
    """Return the number of copies, also from text, or "host" for one in each host. None is one copy.

    >>> read_replicas(None), read_replicas("host"), read_replicas("4")
    (1, 'host', 4)
    """
    if given is None:
        return 1
    if given == "host":
        return "host"
    if str(given).isdecimal() and not isinstance(given, bool) and int(str(given)) > 0:  # text on a command line
        return int(str(given))
    refuse_value("replicas", given, '"host", or a number of copies of the parameters; or None')


def copies_on(machines: Sequence[Any], replicas: Replicas) -> int:
    """Return the number of copies for ranks on these machines, which are named by rank.

    >>> copies_on(["a", "a", "b", "b"], "host")
    2
    >>> copies_on(["a", "a"], "host"), copies_on(["a"] * 6, 3)
    (1, 3)
    """
    if replicas == "host":
        return _hosts(machines)
    if len(machines) % replicas != 0 or (replicas > 1 and replicas == len(machines)):
        refuse(
            f"cannot keep {replicas} copies of the parameters on {len(machines)} ranks",
            needed="several ranks for each copy, as many for all",
        )
    return replicas


def _hosts(machines: Sequence[Any]) -> int:
    hosts = list(dict.fromkeys(machines))
    ranks = len(machines) // len(hosts)
    if list(machines) != [host for host in hosts for _ in range(ranks)]:
        refuse(
            'cannot keep a copy of the parameters in each host (replicas="host"): the hosts have different numbers of ranks, '
            "or ranks that are no neighbours",
            where=", ".join(f"host {number}: {list(machines).count(host)} ranks" for number, host in enumerate(hosts)),
            needed="as many ranks on each host, numbered host by host",
        )
    if ranks == 1 and len(hosts) > 1:
        refuse(
            'cannot share a copy of the parameters in each host (replicas="host"): each host has one rank',
            needed="several ranks on each host",
            remedy="Use stage=2, in which each rank keeps all parameters.",
        )
    return len(hosts)


Stage = int | Literal["auto"]  # 0 to 3
KeepGathered = bool | Size | Literal["all"]

MOST_UNITS = 1_000_000  # more than any model has
ALL_BYTES = (1 << 63) - 1  # more than any model takes; the library reserves no more than all units take


def read_stage(value: object) -> int | None:
    if value == "auto":
        return None
    if str(value) not in ("0", "1", "2", "3"):
        refuse(f"there is no stage {value}", needed='0, 1, 2, 3 or "auto"')
    return int(str(value))


def read_keep_gathered(given: KeepGathered) -> bool | int:
    """Return the bytes for gathered parameters. True: for all; False: as many as prefetching needs, which is the least.

    >>> read_keep_gathered("4GiB"), read_keep_gathered(0), read_keep_gathered("all")
    (4294967296, False, True)
    """
    if given is True or given == "all":
        return True
    return False if given is False else parse_size(given) or False


@dataclass(kw_only=True, unsafe_hash=True)
class StepOptions:
    """Options that change the values or the memory of a step."""

    stage: Option[Stage, int | None] = Option(
        2,
        "0 shards nothing; 1 and 2 shard the state and the reduced gradients; 3 also shards the parameters of `model`, and "
        'gathers them where torch uses them; "auto" chooses the fastest',
        read_stage,
        core="stage",
        metavar="N",
    )
    offload: Option[Offload | None, Any] = Option(
        None,
        'None keeps everything on the device. "host" or "nvme:/scratch" moves the state there. A mapping gives "parameters" '
        '(frozen ones too), "gradients" and "state" (left out: with the parameters) a tier, or fractions: {"device": 0.25, '
        '"nvme:/scratch": 0.75}. "auto" or "auto:/scratch" chooses',
        per_rank=True,  # its directories; the tiers are compared
        metavar="TIER",
    )
    state_format: Option[StateFormats | None, tuple[str, ...]] = Option(
        None,
        '"split" (default), "fp32", "bf16", "compact" or "4bit": the format of the state of bfloat16 parameters. Several of '
        'them, or "auto" for all: chooses the most exact ones that fit and cost at most 5 % of a step. None: "split", or '
        '"fp32" for an optimizer with its own step',
        read_with=lambda given, _: () if given is None else read_state_formats(given),
        core="format",
        to_core=lambda formats: _core.StateFormat[(formats or ("split",))[0]],
        metavar="NAMES",
    )
    gradient_format: Option[GradientFormats, tuple[str, ...]] = Option(
        "fp32",
        '"fp32" or "bf16", of reduced gradients of bfloat16 parameters; both, or "auto": as `state_format`',
        read_gradient_formats,
        core="gradient_format",
        to_core=lambda formats: _core.GradientFormat[formats[0]],
        metavar="NAMES",
        deepspeed=("data_types.grad_accum_dtype",),
    )
    wire: Option[WireFormats, Wire] = Option(
        "exact",
        '"int8" for all that ranks send, or formats by kind, such as {"gather": "int8", "across": "int4"} or '
        '"gather=int8,across=int4": codes of parameters (in stage 3), of gradients, and of sums between hosts',
        read_with=lambda given, of: read_wire(given, of.stage),
        core="wire",
        to_core=Wire.for_core,
        metavar="FORMATS",
    )
    outer: Option[DiLoCo | None, DiLoCo | None] = Option(
        None,
        "lets each host train on its own, and exchange parameters with the others every N steps: "
        "`outer=ballast.DiLoCo(every=64)`. Its memory is part of `memory`",
        read_outer,
        per_rank=True,  # the hosts compare theirs
        metavar="every=N,...",
    )
    replicas: Option[Replicas | None, Replicas] = Option(
        None,
        'in stage 3, "host" keeps a copy of the parameters in each host, on the device: uses gather inside of hosts only, '
        "while all ranks share the state. Or a number of copies, each of as many neighbours",
        read_with=lambda given, _: read_replicas(given),
        needs_stage_3=True,
        core="parameter_replicas",  # a number, once the ranks are connected
        metavar="N",
        deepspeed=("zero_optimization.zero_hpz_partition_size",),
    )

    @property
    def formats(self) -> Formats:
        """The formats; the most exact ones, while several are allowed."""
        return Formats(self.state_formats[0], self.gradient_format[0])

    @property
    def state_formats(self) -> tuple[str, ...]:
        """The formats to choose from, the most exact one first."""
        return self.state_format or ("split",)

    @property
    def parameter_replicas(self) -> int:
        assert self.replicas != "host"  # the ranks are connected by now
        return self.replicas


@dataclass(kw_only=True, unsafe_hash=True)
class ScheduleOptions:
    """Options that change when the work of a step is done, and no value."""

    update_in_backward: Option[bool, bool] = Option(
        False,
        "in stage 3, updates a unit once it is reduced; excludes clipping, loss scaling, accumulation, skipping",
        core="update_in_backward",
    )
    prefetch: Option[int, int] = Option(
        1,
        "in stage 3, how many blocks are gathered ahead, each in memory of its own: 2 keeps a slow link at work",
        partial(read_count, "prefetch", least=0, most=MOST_UNITS, needed="a number of units"),
        needs_stage_3=True,
        core="prefetch",
        deepspeed=("zero_optimization.prefetch_bucket_size", "zero_optimization.stage3_prefetch_bucket_size"),
    )
    keep_gathered: Option[KeepGathered | None, bool | int | None] = Option(
        None,
        'in stage 3, True or "all" keeps parameters gathered until backward, "4GiB" some; None: as memory allows',
        read_keep_gathered,
        needs_stage_3=True,
        core="gathered_bytes",
        to_core=lambda size: ALL_BYTES if size is True else int(size or 0),
        metavar="SIZE",
        deepspeed=tuple(
            f"zero_optimization.{prefix}{key}"
            for prefix in ("", "stage3_")
            for key in ("max_live_parameters", "max_reuse_distance")
        ),
    )
