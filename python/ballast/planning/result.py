"""The result of planning."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ballast import _core
from ballast.formats import Formats, formats_in_words
from ballast.outer.options import DiLoCo
from ballast.planning.hardware import CPU, SHARED_RATES, UNNAMED
from ballast.sizes import human_amount, human_count, human_parameters, human_size, human_time
from ballast.tiers import KINDS, fractions_in, in_words
from ballast.wrap_options import Tuning

ESTIMATED = "activations (estimated)"
OF_CODES = "scales, a matrix of codes"
RESERVED = "reserved (CUDA, NCCL)"
RESERVED_ON_CPU = "reserved (Python, torch)"
RESERVED_IN_POOL = "reserved (CUDA, system)"
RESERVED_ON_HOST = "reserved (system, torch)"
OUTER_STATE = "outer optimizer"
EXCHANGED = "values in an exchange"
DERIVED = ("cost_per_million_tokens", "training_seconds", "training_cost")
HOUR = 3600
COLUMNS = 100  # the length of a line of text
TOGETHER = "\N{NO-BREAK SPACE}"  # keeps words in one line
# The rows of the memory in a text, and the owners in `Plan.memory` that each of them adds up. Other owners of the library are
# buffers.
ROWS = {
    "parameters": ("parameters", "frozen"),
    "gathered parameters": ("gathered",),
    "gradients": ("gradients", "reduced", "partial"),
    "optimizer state": ("state",),
    "parameters and state": ("blocks", "kept"),
}
RECORDS = ("records", "mirror")
BUFFERS = "buffers"
LEAST_SHOWN = 1e-4  # the least part of a tier
# The lanes of a step, in words.
WORK = {
    "compute": "the model's arithmetic",
    "gather": "gathers of parameters",
    "reduce": "sums of gradients",
    "upload": "copies to the device",
    "download": "copies to the host",
    "update": "updates on the device",
    "host": "updates on the host",
    "disk": "the drives",
    "fetch": "reads of parameters from drives",
    "exchange": "the exchange between hosts",
}


@dataclass(frozen=True)
class Plan:
    """A plan to train a model on a machine: its memory to the byte, and its simulated time.

    >>> import ballast
    >>> plan = ballast.plan({"h.0.weight": (512, 512)}, gpu_memory="8GiB")
    >>> plan.memory["device"]["state"] == 10 * 512 * 512
    True
    """

    model: str
    parameters: int
    ranks: int
    gpu: str  # "GPU" without a name
    stage: int
    state_format: str
    gradient_format: str
    placement: Mapping[str, Mapping[str, float]]  # fractions by tier, of parameters, gradients and state
    memory: Mapping[str, Mapping[str, int]]  # bytes of a rank, by tier and owner
    budget: Mapping[str, int]  # bytes that a rank has, by tier
    fits: bool
    seconds: float  # how long a step takes
    exposed: Mapping[str, float]  # seconds that the training waits, by phase
    critical: Mapping[str, float]  # seconds of the step, by the lane that it waits for
    tokens_per_second: float  # all ranks together
    assumed: Mapping[str, float]  # rates by name as `plan(rates=)` takes them, in bytes a second, and the flops of a GPU
    tokens: int  # what a rank has in a micro-step
    micro_steps: int
    activations: int | str  # bytes, "checkpointed", "selective" or "kept"
    efficiency: float  # the fraction of the peak that `assumed["flops"]` is
    headroom: float = 0.0  # the fraction of the device's and of the host's memory that is left free
    sequence: int = 0  # tokens that attend to each other; 0 where attention is not counted
    price: float | None = None  # what a GPU costs for an hour
    train_tokens: int | None = None  # what the whole training has
    active_parameters: int | None = None  # those that a token passes through, in a mixture of experts
    activation_tier: str = "device"  # the tier of activations until backward
    optimizer: str = "adamw"
    replicas: int = 1  # copies of the parameters
    expert_parallel: int = 1  # ranks that divide the experts of each layer
    prefetch: int = 1  # units that are gathered ahead in stage 3
    keep_gathered: bool | int | None = None  # whether parameters stay from forward to backward in stage 3, or bytes of them
    outer: DiLoCo | None = None  # hosts train on their own
    wire: Mapping[str, str] = field(default_factory=dict)  # formats of what ranks send, by kind, that are not exact
    notes: tuple[str, ...] = ()
    _question: _core.Question | None = field(default=None, repr=False, compare=False)
    _placement: _core.Placement | None = field(default=None, repr=False, compare=False)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """The cost of a million tokens on all ranks, in the currency of `price`; None without a price.

        >>> import ballast
        >>> plan = ballast.plan("llama-8b", ranks=8, gpu="h100", price=2.5)
        >>> plan.cost_per_million_tokens == 2.5 * 8 / 3600 * 1e6 / plan.tokens_per_second
        True
        """
        return None if self.price is None else self.price * self.ranks / HOUR * 1e6 / self.tokens_per_second

    @property
    def training_seconds(self) -> float | None:
        """The time of the whole training, at the speed of the simulated step; None without `train_tokens`."""
        return None if self.train_tokens is None else self.train_tokens / self.tokens_per_second

    @property
    def training_cost(self) -> float | None:
        """The cost of the whole training on all ranks; None without a price or without `train_tokens`."""
        if self.price is None or self.training_seconds is None:
            return None
        return self.price * self.ranks / HOUR * self.training_seconds

    def bytes_in(self, tier: str) -> int:
        """Return the bytes of a rank in "device", "host" or "nvme"."""
        return sum(self.memory[tier].values())

    def limit_of(self, tier: str) -> int:
        """Return the bytes of a tier that the plan may use: all that a rank has there, without the headroom."""
        return self.budget[tier] - (int(self.budget[tier] * self.headroom) if tier != "nvme" else 0)

    def rows_of(self, tier: str) -> dict[str, int]:
        """Return the bytes of a rank in a tier in the rows of the text, which add up owners of `memory`. Buffers that change no
        digit of the sum have no row.

        >>> import ballast
        >>> list(ballast.plan("gpt2", offload={"state": "host"}, stage=2, host_memory="64GiB").rows_of("host"))
        ['parameters and state', 'buffers', 'reserved (system, torch)']
        """
        in_records = "nvme" in self.placement["parameters"] or (self._question is not None and self._question.full_records)
        names = {owner: row for row, owners in ROWS.items() for owner in owners}
        names |= dict.fromkeys(RECORDS, "parameters and state" if in_records else "optimizer state")
        names |= {owner: owner for owner in (ESTIMATED, OF_CODES, RESERVED, RESERVED_ON_HOST, OUTER_STATE)}
        rows: dict[str, int] = {}
        for owner, size in self.memory[tier].items():
            row = names.get(owner, BUFFERS)
            rows[row] = rows.get(row, 0) + size
        if rows.get(BUFFERS, 0) < LEAST_SHOWN * self.bytes_in(tier):
            rows.pop(BUFFERS, None)
        last = (BUFFERS, ESTIMATED, OF_CODES, RESERVED, RESERVED_ON_HOST)
        return dict(sorted(rows.items(), key=lambda row: (last.index(row[0]) + 1 if row[0] in last else 0, -row[1])))

    def program(self, *, rank: int = 0) -> str:
        """Return the step as the engine runs it: one slot or operation on each line."""
        question, placement = self._simulated("program")
        return question.program(placement, rank=rank)

    def timeline(self) -> list[_core.TimelineEntry]:
        """Return the operations that run during the simulated step of rank 0, in the order of issue.

        Each has `lane`, `phase`, `kind`, `unit`, and `begin` and `end` in seconds from the beginning of the step. An operation
        with `of_earlier_step` belongs to the step before; it may begin before 0.

        >>> import ballast
        >>> plan = ballast.plan({"h.0.weight": (512, 512)}, gpu_memory="8GiB")
        >>> [(op.phase.name, op.kind, op.unit) for op in plan.timeline() if op.lane.name == "compute"]
        [('forward', 'use', 'h.0'), ('backward', 'use', 'h.0')]
        """
        question, placement = self._simulated("timeline")
        return question.timeline(placement)

    def _simulated(self, what: str) -> tuple[_core.Question, _core.Placement]:
        if self._question is None or self._placement is None:
            raise RuntimeError(f"a plan that is copied field by field has no {what}")
        return self._question, self._placement

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, the costs, and the call that trains with the plan if it fits. A GPU without a name is
        None."""
        values = vars(self) | {name: getattr(self, name) for name in DERIVED}
        values["gpu"] = None if self.gpu == UNNAMED else self.gpu
        values["wrap_call"] = self.wrap_call() if self.fits else ""
        values["outer"] = None if self.outer is None else asdict(self.outer)
        return {
            key: dict(value) if isinstance(value, Mapping) else value
            for key, value in values.items()
            if not key.startswith("_")
        }

    def text(self) -> str:
        """Return the plan as text, in lines of at most 100 columns."""
        return "\n".join([*self._head(), "", *self._memory_lines(), "", *self._time_lines()])

    def __str__(self) -> str:
        return self.text()

    def wrap_call(self) -> str:
        """Return the call that trains with this plan; fill in DIRECTORY and NAME. It is empty where only a C++ trainer can:
        torch's parameters cannot be updated in the backward pass below stage 3.

        >>> import ballast
        >>> ballast.plan("gpt2", offload={"state": "host"}, stage=2, host_memory="64GiB").wrap_call()
        'ballast.wrap(optimizer, model, stage=2, offload={"state": "host"})'
        """
        in_backward = self._question is not None and self._question.update_in_backward
        if in_backward and self.stage < 3:
            return ""
        offload = {kind: _wrap_tiers(tiers) for kind, tiers in self._given_tiers().items() if tiers.get("device") != 1}
        options = [f"stage={self.stage}"]
        options += [f"offload={json.dumps(offload)}"] if offload else []
        options += [f'state_format="{self.state_format}"'] if self.state_format != "split" else []
        options += [f'gradient_format="{self.gradient_format}"'] if self.gradient_format != "fp32" else []
        options += [f"wire={json.dumps(dict(self.wire))}"] if self.wire else []
        options += [f"replicas={self.replicas}"] if self.replicas > 1 else []
        options += [f"outer={self.outer.call()}"] if self.outer else []
        away = {"host": "host", "nvme": "nvme:DIRECTORY"}.get(self.activation_tier)
        options += [f'activations="{away}"'] if away else []
        options += ['run="NAME"'] if self._question is not None and self._question.full_records else []
        if self.stage == 3:
            tuning = Tuning(prefetch=self.prefetch, keep_gathered=self.keep_gathered, update_in_backward=in_backward)
            options += [f"tuning={tuning}"] if tuning != Tuning() else []
        wrapped = "[muon, adamw]" if self.optimizer == "muon" else "optimizer"
        return f"ballast.wrap({wrapped}, model, {', '.join(options)})"

    def _given_tiers(self) -> Mapping[str, Mapping[str, float]]:
        """Return the tiers as wrap() takes them, which moves state to the tier of its parameters by itself."""
        if self._placement is None:
            return self.placement
        return {kind: fractions_in(getattr(self._placement, kind)) for kind in KINDS}

    def is_as(self, other: Plan) -> bool:
        """Return whether the two differ in no choice of the planner."""
        chosen = ("stage", "placement", "state_format", "gradient_format")
        return all(getattr(self, name) == getattr(other, name) for name in chosen)

    def formats(self) -> str:
        """Return the formats in a few words, such as "state format compact, gradients in bf16"."""
        return Formats(self.state_format, self.gradient_format).in_words()

    def where(self) -> str:
        """Return the placement in a few words, such as "stage 3, state on the host"."""
        return in_words(self.stage, self.placement, device="the GPU" if self.rank_device == "GPU" else "the host")

    @property
    def rank_device(self) -> str:
        """What a rank computes on: a "GPU", or a "CPU" whose rates were measured."""
        return "CPU" if self.gpu == CPU else "GPU"

    def _head(self) -> list[str]:
        active = f", {human_parameters(self.active_parameters)} active for each token," if self.active_parameters else ""
        on_cpus = "1 CPU rank" if self.ranks == 1 else f"{self.ranks} CPU ranks"
        gpus = on_cpus if self.rank_device == "CPU" else f"{self.ranks} x {self.gpu.upper()}"
        how = f"{self.where()}; {self.formats()}" + (f"; on the wire {formats_in_words(self.wire)}" if self.wire else "")
        how += f"; {self.replicas} copies of the parameters" if self.replicas > 1 else ""
        how += f"; {self.expert_parallel} ranks divide the experts of each layer" if self.expert_parallel > 1 else ""
        how += f"; hosts exchange parameters every {self.outer.every} steps" if self.outer else ""
        return [
            f"fits: {'yes' if self.fits else 'no'}",
            *wrapped(f"{self.model}: {human_parameters(self.parameters)} parameters{active} on {gpus}"),
            *wrapped(how),
        ]

    def _memory_lines(self) -> list[str]:
        whose = f"the {self.rank_device}'s memory" + (" and of the host" if self.memory["host"] else "")
        lines = ["memory of one rank" + (f", with {100 * self.headroom:g}% of {whose} left free" if self.headroom else "")]
        for tier in (tier for tier, owners in self.memory.items() if owners):
            limit = human_size(self.limit_of(tier))
            whole = f" ({human_size(self.budget[tier])} in all)" if self.limit_of(tier) < self.budget[tier] else ""
            lines.append(f"  {tier:<8}{human_size(self.bytes_in(tier))} of {limit}{whole}")
            lines += [f"    {row:<26}{human_size(size):>12}" for row, size in self.rows_of(tier).items()]
        return lines

    def _time_lines(self) -> list[str]:
        waits = ", ".join(f"{phase} {human_time(seconds)}" for phase, seconds in self.exposed.items())
        lane, share = max(self.critical.items(), key=lambda item: item[1])
        sequences = f", sequences of {self.sequence:,} tokens" if self.sequence else ""
        steps = f"{self.micro_steps:,} micro-step{'' if self.micro_steps == 1 else 's'}"
        pace = f"{_teras(self.assumed['flops'])} Tflop/s and {self.tokens:,} tokens x {steps} per {self.rank_device}{sequences}"
        lines = [
            f"step      {human_time(self.seconds)}, {self.tokens_per_second:,.0f} tokens/s on all ranks",
            *self._cost_lines(),
            f"waiting   {waits}",
            f"limited   by {WORK[lane]} for {share / self.seconds:.0%} of the step",
            *_labelled("assumed", pace),
            *(line for rates in self._rates() for line in _labelled("", rates)),
        ]
        call = self.wrap_call() or "in C++: wrap() updates in the backward pass in stage 3 only"
        lines += _labelled("train", call) if self.fits else []
        return lines + [line for note in self.notes for line in _labelled("note", note)]

    def _rates(self) -> list[str]:
        """Return the rates of a GPU, and those of a machine, each as the caller may give it."""
        each = "GPU" if self.rank_device == "GPU" else "rank"
        machine_rates = {name: rate for name, rate in self.assumed.items() if name in SHARED_RATES}
        others = (*SHARED_RATES, "flops", *(("peers",) if self.ranks == 1 else ()))
        rank_rates = {name: rate for name, rate in self.assumed.items() if name not in others}
        return [f"GB/s of a {each}: {_gigas(rank_rates)}", f"GB/s of a machine: {_gigas(machine_rates)}"]

    def _cost_lines(self) -> list[str]:
        lines = []
        if self.price is not None and self.cost_per_million_tokens is not None:
            each = f"{human_amount(self.price)} an hour for each {self.rank_device}"
            lines.append(f"cost      {human_amount(self.cost_per_million_tokens)} per million tokens, at {each}")
        if self.train_tokens is not None and self.training_seconds is not None:
            cost = "" if self.training_cost is None else f", which cost {human_amount(self.training_cost)}"
            lines.append(f"training  {human_count(self.train_tokens)} tokens: {human_time(self.training_seconds)}{cost}")
        return lines


def wrapped(text: str, *, first: str = "", indent: str = "  ") -> list[str]:
    """Return text in lines of at most 100 columns. No word is broken."""
    pairs = text.replace('": ', f'":{TOGETHER}')  # a key of a dict and its value
    lines = textwrap.wrap(
        pairs, COLUMNS, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(TOGETHER, " ") for line in lines]


def _labelled(label: str, text: str) -> list[str]:
    return wrapped(text, first=f"{label:<10}", indent=" " * 10)


def _teras(flops: float) -> str:
    """Format flops a second. CPUs have less than a teraflop.

    >>> _teras(494.5e12), _teras(1.25e10)
    ('494', '0.0125')
    """
    return f"{flops / 1e12:.0f}" if flops >= 1e13 else f"{flops / 1e12:.3g}"


def _gigas(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {rate / 1e9:.4g}" for name, rate in rates.items())


def differences(plans: Sequence[Plan]) -> list[str]:
    """Return the placement of each plan in a few words, with its formats if these differ."""
    varies = len({plan.formats() for plan in plans}) > 1
    return [f"{plan.where()}; {plan.formats()}" if varies else plan.where() for plan in plans]


def _wrap_tiers(tiers: Mapping[str, float]) -> str | dict[str, float]:
    """Return the tiers of one kind in the form of wrap(). The fractions add up to 1 after they are rounded."""
    words = {tier if tier != "nvme" else "nvme:DIRECTORY": round(part, 4) for tier, part in tiers.items()}
    if len(words) == 1:
        return next(iter(words))
    last = list(words)[-1]
    words[last] = round(1 - sum(part for word, part in words.items() if word != last), 4)
    return words
