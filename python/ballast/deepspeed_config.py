"""Import a configuration of DeepSpeed.

`tests/python/test_deepspeed_keys.py` compares the keys and the defaults with those in DeepSpeed's source."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ballast.checks import is_number, refuse
from ballast.json_reader import object_in
from ballast.schema import options_of
from ballast.wrap_options import Tuning, WrapOptions

VERSION = "0.19.8"  # DeepSpeed's version, whose defaults these are


class Taken(NamedTuple):
    """A key that becomes an option of `wrap()`, or an item of `to_do`."""

    default: Any = None
    if_auto: str = ""  # what the user does if the value is "auto"; empty: the import is refused
    unused: str = "this configuration does not use it"  # the reason, if other keys switch it off


TRAINER = "the Trainer's is TrainingArguments."
SCALER = Taken(unused="it is for torch.amp.GradScaler, if parameters are float16")
ARGUMENT = Taken(if_auto="pass a value to the optimizer", unused="this optimizer does not have the argument")
ARGUMENTS = {"lr": "learning_rate", "betas": "adam_beta1 and adam_beta2", "eps": "adam_epsilon", "weight_decay": "weight_decay"}
CAST = "choose whether to cast the model's parameters to "
BF16 = Taken(False, f"{CAST}bfloat16; {TRAINER}bf16")
OFFLOADED = Taken(unused="the device is not nvme")

TAKEN: dict[str, Taken] = {
    "train_batch_size": Taken(if_auto="choose the batch of all ranks together"),
    "train_micro_batch_size_per_gpu": Taken(if_auto=f"choose the batch of each rank; {TRAINER}per_device_train_batch_size"),
    "gradient_accumulation_steps": Taken(
        if_auto=f"choose how many backward passes each step() takes; {TRAINER}gradient_accumulation_steps"
    ),
    "gradient_clipping": Taken(1.0, f"pass max_grad_norm=... to wrap(); {TRAINER}max_grad_norm"),
    "zero_optimization.stage": Taken(0),
    "zero_optimization.cpu_offload": Taken(unused="offload_optimizer sets it"),  # older names of the sections below
    "zero_optimization.cpu_offload_param": Taken(unused="offload_param sets it, or the stage is below 3"),
    "zero_optimization.offload_optimizer.device": Taken("none", unused="stage 0 does not partition state"),
    "zero_optimization.offload_optimizer.nvme_path": OFFLOADED,
    "zero_optimization.offload_param.device": Taken("none", unused="parameters are partitioned in stage 3 only"),
    "zero_optimization.offload_param.nvme_path": OFFLOADED,
    "bf16.enabled": BF16,
    "bfloat16.enabled": BF16,  # the older name
    "fp16.enabled": Taken(False, f"{CAST}float16, with torch.amp.GradScaler; {TRAINER}fp16"),
    "fp16.loss_scale": SCALER._replace(default=0, if_auto="choose init_scale of torch.amp.GradScaler"),
    "fp16.initial_scale_power": SCALER._replace(default=16, if_auto="choose init_scale of torch.amp.GradScaler"),
    "fp16.loss_scale_window": SCALER._replace(default=1000, if_auto="choose growth_interval of torch.amp.GradScaler"),
    "optimizer.type": Taken(if_auto="choose the optimizer"),
    "optimizer.params": ARGUMENT,
    **{
        f"optimizer.params.{key}": ARGUMENT._replace(if_auto=f"pass {key}=... to the optimizer; {TRAINER}{name}")
        for key, name in ARGUMENTS.items()
    },
    "optimizer.params.adam_w_mode": ARGUMENT._replace(default=True, if_auto="choose torch.optim.AdamW or torch.optim.Adam"),
    "optimizer.params.torch_adam": ARGUMENT._replace(
        default=False, if_auto="choose weight_decay: torch's AdamW has 0.01, DeepSpeed's 0"
    ),
    "scheduler.type": Taken(if_auto="choose the learning rate scheduler"),
    "scheduler.params": Taken(if_auto="choose it; the Trainer computes it", unused="the scheduler has no type"),
}

# Keys that something else here takes the place of, and the keys below each.
REPLACED = {
    **dict.fromkeys(
        [f"zero_optimization.{key}" for key in ("overlap_comm", "contiguous_gradients", "reduce_scatter")]
        + ["zero_optimization.allgather_partitions", "bf16.check_grad_overflow"],
        "always on in Ballast",
    ),
    "zero_optimization.offload_optimizer.ratio": 'wrap(offload={"state": {"device": 0.2, "host": 0.8}}) divides the state',
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "ballast.export(model, path) gathers them unit by unit",
    "managed_gradient_accumulation": "each step() updates: call it after the last backward pass",
    "gradient_allreduce_op": "gradients are averaged: for their sum multiply the loss by the number of ranks",
    "fp16.hysteresis": "GradScaler lowers its scale at every overflow",
    "optimizer.params.max_grad_norm": "DeepSpeed refuses it here: gradient_clipping sets it",
    "activation_checkpointing": "call torch.utils.checkpoint in the model yourself",
    "autotuning": '`ballast plan` and wrap(stage="auto") choose',
    **dict.fromkeys(
        ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads"),
        "wrap(state_format=...) sets the format of masters and optimizer state",
    ),
}
for where, kind in (("wrap", WrapOptions), ("ballast.Tuning", Tuning)):
    for name, option in options_of(kind).items():
        REPLACED |= dict.fromkeys(option.deepspeed, f"{where}({name}=...): {option.meaning}")
OTHER = "Ballast has no option for it: DeepSpeed's engine reads it, or the script, or it is no key of DeepSpeed"

# DeepSpeed's sections with a switch "enabled". Keys in one that is switched off are not reported, except unknown keys of number
# formats.
FORMATS = ("bf16", "bfloat16", "fp16")
SWITCHED = (
    *FORMATS,
    *("autotuning", "comet", "comms_logger", "csv_monitor", "data_efficiency", "expert_parallel", "flops_profiler"),
    *("hybrid_engine", "tensorboard", "timers.throughput", "torch_autocast", "wandb", "weight_quantization"),
)

AUTO = "auto"  # Hugging Face replaces it by a value before DeepSpeed reads it
OF_ALL = ("lr", "weight_decay", "foreach", "fused", "maximize", "differentiable")
ADAM = (*OF_ALL, "betas", "eps", "amsgrad", "capturable")
# The class of torch or of lion_pytorch, and its arguments, by DeepSpeed's name.
OPTIMIZERS = {
    "adam": ("Adam", ADAM),
    "adamw": ("AdamW", ADAM),
    "sgd": ("SGD", (*OF_ALL, "momentum", "dampening", "nesterov")),
    "adagrad": ("Adagrad", (*OF_ALL, "lr_decay", "initial_accumulator_value", "eps")),
    "lion": ("Lion", ("lr", "betas", "weight_decay")),
}
# DeepSpeed's defaults that differ from those of torch or lion_pytorch.
DEFAULTS: dict[str, dict[str, Any]] = {"AdamW": {"weight_decay": 0.0}, "Lion": {"lr": 1e-3, "betas": (0.9, 0.999)}}
NEVER = 10**9  # steps
TIERS = {"cpu": "host", "nvme": "nvme", "none": ""}


@dataclass(frozen=True)
class ImportedConfig:
    """Options for `ballast.wrap(optimizer, model, **imported.options)`, and the keys that do not become options."""

    options: dict[str, Any]
    to_do: list[str] = field(default_factory=list)  # what the training script does itself
    left_out: dict[str, str] = field(default_factory=dict)  # the reason for each key

    def text(self) -> str:
        """Return the import as text."""
        lines = ["ballast.wrap(optimizer, model, " + ", ".join(f"{k}={v!r}" for k, v in self.options.items()) + ")"]
        lines += [f"to do: {each}" for each in self.to_do]
        lines += [f"left out: {key}: {why}" for key, why in self.left_out.items()]
        return "\n".join(lines)


def import_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> ImportedConfig:
    """Turn a DeepSpeed configuration, a dictionary or a JSON file, into options of `ballast.wrap()`.

    A missing key has the default of DeepSpeed 0.19.8. Above all, gradients are clipped at a norm of 1.0 where
    `gradient_clipping` is missing; 0 switches clipping off. Each key that is there becomes an option, or an item of
    `to_do`, or is in `left_out` with the reason. Keys below a section that is switched off are not reported. "auto"
    stands for a value that Hugging Face fills in: it becomes an item of `to_do`; where the stage or a tier depends on
    it, the import is refused.

    >>> imported = import_deepspeed({
    ...     "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    ...     "gradient_clipping": "auto",
    ... })
    >>> imported.options
    {'stage': 3, 'offload': {'state': 'host', 'gradients': 'host'}}
    >>> imported.to_do
    ['gradient_clipping is "auto": pass max_grad_norm=... to wrap(); the Trainer\\'s is TrainingArguments.max_grad_norm']
    >>> imported.left_out
    {'zero_optimization.overlap_comm': 'always on in Ballast'}
    """
    needed = "a file of DeepSpeed's configuration, in JSON"
    return _Importing(config if isinstance(config, Mapping) else object_in(Path(config), needed)).run()


def _refuse(key: str, found: Any, *, needed: str) -> NoReturn:
    refuse(f"cannot import {key}: it is {json.dumps(found, default=repr)}", where=key, needed=needed)


class _Importing:
    """Imports one configuration. Keys that no method takes are left out in the end."""

    def __init__(self, config: Mapping[str, Any]):
        zero = config.get("zero_optimization")
        self._config = {**config, "zero_optimization": {"stage": int(zero)}} if isinstance(zero, bool) else config
        self._taken: set[str] = set()
        self._auto: set[str] = set()
        self._options: dict[str, Any] = {}
        self._to_do: list[str] = []

    def run(self) -> ImportedConfig:
        steps: list[Callable[[], None]] = [self._stage, self._offload, self._clipping, self._optimizer]
        for step in [*steps, self._number_formats, self._batches, self._scheduler]:
            step()
        left = {key: self._why_not(key, value, off) for key, value, off in _leaves(self._config)}
        return ImportedConfig(self._options, self._to_do, left_out={key: why for key, why in left.items() if why})

    def _at(self, key: str) -> Any:
        """Return the value at a path: None where there is none, "auto" where a section around it is."""
        found: Any = self._config
        path: list[str] = []
        for word in key.split("."):
            if found is None or found == AUTO:
                return found
            if not isinstance(found, Mapping):
                _refuse(".".join(path), found, needed="a section of keys")
            found = found.get(word)
            path.append(word)
        return found

    def _take(self, key: str) -> Any:
        """Return the value at a path, or DeepSpeed's default. None where it is "auto": then `to_do` names it."""
        row = TAKEN[_nearest(key, TAKEN)]
        self._taken.add(key)
        found = self._at(key)
        if found != AUTO:
            return row.default if found is None else found
        if not row.if_auto:
            _refuse(key, AUTO, needed="the value itself, which Hugging Face knows")
        self._auto.add(key)
        self._to_do.append(f'{key} is "auto": {row.if_auto}')
        return None

    def _switch(self, key: str) -> bool:
        """Take a value that is true or false, or 1 or 0. Return False where it is "auto"."""
        found = self._take(key)
        if found not in (None, True, False):
            _refuse(key, found, needed="true or false")
        return bool(found)

    def _number(self, key: str, *, integer_from: int | None = None) -> Any:
        found = self._take(key)
        is_in_range = integer_from is None or (isinstance(found, int) and found >= integer_from)
        if found is not None and not (is_number(found) and is_in_range):
            _refuse(key, found, needed="a number" if integer_from is None else f"a whole number from {integer_from} on")
        return found

    # --- Options of wrap() ---

    def _stage(self) -> None:
        stage = self._take("zero_optimization.stage")
        if not is_number(stage) or stage not in (0, 1, 2, 3):
            _refuse("zero_optimization.stage", stage, needed="0, 1, 2 or 3")
        self._options["stage"] = int(stage)

    def _offload(self) -> None:
        if self._options["stage"] == 0:
            return
        state = self._tier("offload_optimizer", "cpu_offload")
        parameters = self._tier("offload_param", "cpu_offload_param") if self._options["stage"] == 3 else ""
        if parameters and parameters != state:
            self._to_do.append(
                f"DeepSpeed keeps parameters on {parameters.partition(':')[0]}, and their state "
                f"{'on ' + state.partition(':')[0] if state else 'on the device'}: here both are on the first"
            )
            state = parameters
        if state:
            self._options["offload"] = {"state": state, "gradients": "host"}
        if parameters:
            self._options["offload"]["parameters"] = parameters

    def _tier(self, section: str, older_name: str) -> str:
        path = f"zero_optimization.{section}"
        device = self._take(f"{path}.device")
        if not isinstance(device, str) or device not in TIERS:
            _refuse(f"{path}.device", device, needed=f"one of {', '.join(TIERS)}")
        if device == "none" and self._switch(f"zero_optimization.{older_name}"):
            device = "cpu"
        if device != "nvme":
            return TIERS[device]
        directory = self._take(f"{path}.nvme_path")
        if not isinstance(directory, str | os.PathLike) or not str(directory):
            _refuse(f"{path}.nvme_path", directory, needed="a directory on a drive")
        return f"nvme:{directory}"

    def _clipping(self) -> None:
        if self._config.get("gradient_clipping", 0) is None:  # DeepSpeed fails with it in the first step
            _refuse("gradient_clipping", None, needed="a number; 0 for no clipping")
        norm = self._number("gradient_clipping")
        if norm is not None and norm > 0:
            self._options["max_grad_norm"] = float(norm)

    # --- Tasks of the script ---

    def _optimizer(self) -> None:
        kind = self._take("optimizer.type")
        if kind is None:
            return
        if str(kind).lower() not in OPTIMIZERS:
            _refuse("optimizer.type", kind, needed=f"one of {', '.join(OPTIMIZERS)}")
        name, arguments = OPTIMIZERS[kind.lower()]
        by_torch = arguments is ADAM and self._switch("optimizer.params.torch_adam")
        if arguments is ADAM and self._switch("optimizer.params.adam_w_mode"):
            name = "AdamW"  # Adam becomes AdamW too, unless the key says otherwise
        shown = {key: repr(value) for key, value in DEFAULTS.get(name, {}).items() if not by_torch}
        given = self._given("optimizer.params", arguments)
        shown = {**given, **{key: value for key, value in shown.items() if key not in given}}
        where = "a Lion, such as lion_pytorch's: Lion" if name == "Lion" else f"torch.optim.{name}"
        called = ", ".join(["model.parameters()", *(f"{key}={value}" for key, value in shown.items())])
        self._to_do.append(f"make the optimizer: {where}({called})")

    def _given(self, section: str, arguments: tuple[str, ...] | None = None) -> dict[str, str]:
        """Return the arguments in a section as Python writes them, "..." for those that are "auto"."""
        found = self._at(section)
        if found is None or found == AUTO:
            self._take(section)
            return {}
        values = {key: self._take(f"{section}.{key}") for key in found if arguments is None or key in arguments}
        shown = {key: "..." if f"{section}.{key}" in self._auto else repr(value) for key, value in values.items()}
        return {key: value for key, value in shown.items() if found[key] is not None}

    def _number_formats(self) -> None:
        bf16 = self._switch("bf16.enabled" if self._config.get("bf16") is not None else "bfloat16.enabled")
        fp16 = self._switch("fp16.enabled")
        if bf16 and fp16:
            refuse("cannot import bf16 and fp16: both are enabled", needed="one of them")
        if bf16:
            self._to_do.append(_cast_to("bfloat16"))
        if fp16:
            self._to_do.append(f"{_cast_to('float16')}; scale losses with {self._scaler()}")

    def _scaler(self) -> str:
        fixed, power = self._number("fp16.loss_scale"), self._number("fp16.initial_scale_power")
        window = self._number("fp16.loss_scale_window")
        scale = None if fixed is None or power is None else 2.0**power
        if fixed:  # 0 means a dynamic scale
            scale, window = float(fixed), NEVER
        shown = ["..." if value is None else value for value in (scale, window)]
        made = f"torch.amp.GradScaler(init_scale={shown[0]}, growth_interval={shown[1]})"
        instead = "keeps it" if fixed else "waits for as many as fp16.hysteresis says, or 2"
        return f"{made}, which halves its scale at each overflow, where DeepSpeed {instead}"

    def _batches(self) -> None:
        keys = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
        micro, total, passes = (self._number(key, integer_from=1) for key in keys)
        if self._auto.intersection(keys):  # the others do not determine it
            if total is not None:
                self._to_do.append(f"load {total} samples for each step, over all ranks and backward passes")
        elif micro is None and total is not None:
            self._to_do.append(f"load batches of {total} / ranks{f' / {passes}' if passes else ''} on each rank")
        elif passes is None and total is not None:
            passes = f"{total // micro if total % micro == 0 else f'{total} / {micro}'} / ranks"
        if micro is not None:
            self._to_do.append(f"load batches of {micro} on each rank")
        if passes not in (None, 1):
            self._to_do.append(f"call backward() {passes} times before each step(), of losses divided by that number")

    def _scheduler(self) -> None:
        kind = self._take("scheduler.type")
        if kind is not None:
            called = ", ".join(f"{key}={value}" for key, value in self._given("scheduler.params").items())
            self._to_do.append(
                f"make the learning rate scheduler yourself, from torch.optim.lr_scheduler: DeepSpeed's is {kind}({called})"
            )

    def _why_not(self, key: str, value: Any, off: bool) -> str:
        """Return why a key is left out; nothing if it is taken, or if leaving it out changes nothing."""
        row = TAKEN.get(_nearest(key, TAKEN))
        why = REPLACED.get(_nearest(key, REPLACED)) or (row.unused if row else "")
        if not why and any(known.startswith(f"{key}.") for known in TAKEN):  # a section that is empty or "auto"
            why = Taken().unused
        if why:
            is_taken = key in self._taken or any(auto.startswith(f"{key}.") for auto in self._auto)
            return "" if off or value is None or value == {} or is_taken else why
        return "" if off and not key.startswith(FORMATS) else OTHER


def _cast_to(dtype: str) -> str:
    """Say how to cast parameters. DeepSpeed leaves buffers as they are; `model.to(dtype)` would cast them too."""
    return f"cast parameters, but not buffers, to {dtype}: for p in model.parameters(): p.data = p.data.to(torch.{dtype})"


def _leaves(config: Mapping[str, Any], prefix: str = "", off: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """Yield the path and the value of each key that is no section, and whether the section around it is switched
    off."""
    off = off or (config.get("enabled") is False and bool(_nearest(prefix.removesuffix("."), SWITCHED)))
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.", off)
        else:
            yield f"{prefix}{key}", value, off


def _nearest(key: str, known: Collection[str]) -> str:
    """Return the key itself or the nearest one above it that is known; nothing if none is.

    >>> _nearest("optimizer.params.momentum", TAKEN), _nearest("zero_optimization.stages", TAKEN)
    ('optimizer.params', '')
    """
    while key and key not in known:
        key = key.rpartition(".")[0]
    return key
