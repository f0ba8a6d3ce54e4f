"""What a configuration of DeepSpeed means here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ballast.checks import refuse

SIZED_BY_THE_PLAN = "sizes come from the plan, which knows what is used when"
ALWAYS_ON = "always so here"
# Why a key of DeepSpeed is not carried over, where that is more to say than that it is unknown here.
REASONS = {
    "zero_optimization.allgather_bucket_size": SIZED_BY_THE_PLAN,
    "zero_optimization.reduce_bucket_size": SIZED_BY_THE_PLAN,
    "zero_optimization.stage3_prefetch_bucket_size": SIZED_BY_THE_PLAN,
    "zero_optimization.stage3_param_persistence_threshold": SIZED_BY_THE_PLAN,
    "zero_optimization.stage3_max_live_parameters": SIZED_BY_THE_PLAN,
    "zero_optimization.stage3_max_reuse_distance": SIZED_BY_THE_PLAN,
    "zero_optimization.sub_group_size": SIZED_BY_THE_PLAN,
    "zero_optimization.overlap_comm": ALWAYS_ON,
    "zero_optimization.contiguous_gradients": ALWAYS_ON,
    "zero_optimization.reduce_scatter": ALWAYS_ON,
    "zero_optimization.allgather_partitions": ALWAYS_ON,
    "zero_optimization.round_robin_gradients": "gradients are reduced as they come",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "ballast.export(model, path) gathers them unit by unit",
    "zero_optimization.zero_hpz_partition_size": "parameters have one partition, over all ranks",
    "aio": "drives are read and written through io_uring; `ballast doctor --drive` measures them",
    "activation_checkpointing": "torch.utils.checkpoint does it, of both kinds",
    "steps_per_print": "print optimizer.metrics() when you like",
    "wall_clock_breakdown": "wrap(timeline=True) and optimizer.write_timeline(path) show what ran when",
    "communication_data_type": "gradients are summed in fp32",
    "prescale_gradients": "gradients are averaged after they are summed in fp32",
    "gradient_predivide_factor": "gradients are averaged after they are summed in fp32",
    "zero_allow_untested_optimizer": "optimizers that are not known are refused",
    "zero_force_ds_cpu_optimizer": "the same update runs wherever the state is",
    "optimizer.params.bias_correction": "torch's optimizers always do",
    "optimizer.params.fp32_optimizer_states": "wrap(state_format=...) says what state is kept in",
    "bf16.check_grad_overflow": ALWAYS_ON,
    "fp16.hysteresis": "GradScaler lowers its scale at every overflow",
    "fp16.consecutive_hysteresis": "GradScaler lowers its scale at every overflow",
    "fp16.min_loss_scale": "GradScaler has no least scale",
    "fp16.auto_cast": "cast inputs yourself, as the parameters are",
    "fp16.fp16_master_weights_and_grads": "wrap(state_format=...) says what masters are kept in",
    "fp16": "it is for torch.amp.GradScaler, if parameters are float16",
}
# What is switched off has nothing to carry over, unless it is on here.
ON_HERE = {"optimizer.params.bias_correction", *(key for key, reason in REASONS.items() if reason == ALWAYS_ON)}
OFFLOAD_KEYS = {"pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "fast_init", "pipeline_read", "pipeline_write"}
OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "lion": "Lion"}
# DeepSpeed's, where they are not those of torch, or of lion_pytorch.
DEFAULTS: dict[str, dict[str, Any]] = {"AdamW": {"weight_decay": 0.0}, "Lion": {"lr": 1e-3, "betas": (0.9, 0.999)}}
NO_ARGUMENTS = {"bias_correction", "fp32_optimizer_states", "set_grad_none"}  # of torch's optimizers
NO_ARGUMENTS |= {"freeze_step", "cuda_aware", "comm_backend_name"}
NEVER = 10**9  # steps
TIERS = {"cpu": "host", "nvme": "nvme", "none": ""}


@dataclass(frozen=True)
class ImportedConfig:
    """`ballast.wrap(optimizer, model, **imported.options)`; and what it cannot say."""

    options: dict[str, Any]
    to_do: list[str] = field(default_factory=list)  # by the training script
    left_out: dict[str, str] = field(default_factory=dict)  # by key: why

    def text(self) -> str:
        """For people."""
        lines = ["ballast.wrap(optimizer, model, " + ", ".join(f"{k}={v!r}" for k, v in self.options.items()) + ")"]
        lines += [f"to do: {each}" for each in self.to_do]
        lines += [f"left out: {key}: {why}" for key, why in self.left_out.items()]
        return "\n".join(lines)


def import_deepspeed(config: Mapping[str, Any] | str | os.PathLike[str]) -> ImportedConfig:
    """From a configuration of DeepSpeed, as a dictionary or a JSON file, to the options of `ballast.wrap()`.

    >>> imported = import_deepspeed({
    ...     "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
    ...     "gradient_clipping": 1.0,
    ... })
    >>> imported.options
    {'stage': 3, 'offload': {'state': 'host', 'gradients': 'host'}, 'max_grad_norm': 1.0}
    >>> imported.left_out
    {'zero_optimization.overlap_comm': 'always so here'}
    """
    return _Importing(config if isinstance(config, Mapping) else _read(Path(config))).run()


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        refuse(f"a configuration of DeepSpeed cannot be read: {error}", where=str(path))
    if not isinstance(found, dict):
        refuse("a configuration of DeepSpeed is no JSON object", where=str(path))
    return found


class _Importing:
    """Takes key after key; what nobody has taken is left out."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = config
        self._taken: set[str] = set()
        self._options: dict[str, Any] = {}
        self._to_do: list[str] = []

    def run(self) -> ImportedConfig:
        steps: list[Callable[[], None]] = [self._stage, self._offload, self._clipping, self._optimizer]
        for step in [*steps, self._number_formats, self._batches]:
            step()
        left = {key: why_not(key) for key in _leaves(self._config) if not self._is_taken(key)}
        return ImportedConfig(self._options, self._to_do, left)

    def _take(self, key: str, default: Any = None) -> Any:
        """A value by its path; "auto" is as good as none."""
        self._taken.add(key)
        found: Any = self._config
        for word in key.split("."):
            if not isinstance(found, Mapping) or word not in found:
                return default
            found = found[word]
        return default if found == "auto" else found

    def _is_taken(self, key: str) -> bool:
        return any(key == taken or key.startswith(f"{taken}.") for taken in self._taken)

    # --- What wrap() can be told ---

    def _stage(self) -> None:
        stage = self._take("zero_optimization.stage", 0)
        if stage not in (0, 1, 2, 3):
            refuse(f"the stage {stage!r} was configured", where="zero_optimization.stage", needed="0, 1, 2 or 3")
        self._options["stage"] = stage

    def _offload(self) -> None:
        if self._options["stage"] == 0:
            return
        state = self._place("offload_optimizer") or ("host" if self._take("zero_optimization.cpu_offload", False) else "")
        parameters = self._place("offload_param") if self._options["stage"] == 3 else ""
        if parameters and parameters != state:
            self._to_do.append(
                f"parameters were to be on {parameters.partition(':')[0]}, and the state that makes them "
                f"{'on ' + state.partition(':')[0] if state else 'on the device'}: here both are on the first"
            )
            state = parameters
        if state:
            self._options["offload"] = {"state": state, "gradients": "host"}
        if parameters:
            self._options["offload"]["parameters"] = parameters

    def _place(self, section: str) -> str:
        path = f"zero_optimization.{section}"
        device = self._take(f"{path}.device", "none")
        if device not in TIERS:
            refuse(f'the device "{device}" was configured', where=path, needed=f"one of {', '.join(TIERS)}")
        if device != "nvme":
            return TIERS[device]
        return f"nvme:{self._take(f'{path}.nvme_path') or refuse('no nvme_path was configured', where=path)}"

    def _clipping(self) -> None:
        norm = self._take("gradient_clipping", 0.0)
        if norm:
            self._options["max_grad_norm"] = float(norm)

    # --- What the script does ---

    def _optimizer(self) -> None:
        kind = self._take("optimizer.type")
        if kind is None:
            return
        name = OPTIMIZERS.get(kind.lower())
        if name is None:
            refuse(f"the optimizer {kind} was configured", where="optimizer.type", needed=f"one of {', '.join(OPTIMIZERS)}")
        decoupled = self._take("optimizer.params.adam_w_mode", True)  # of Adam too, if nothing is said
        if name == "Adam" and decoupled:
            name = "AdamW"
        self._take("optimizer.params.torch_adam")  # the same update
        params = self._config["optimizer"].get("params") or {}
        given = [key for key in params if key not in NO_ARGUMENTS | {"adam_w_mode", "torch_adam"}]
        shown = {key: value for key in given if (value := self._take(f"optimizer.params.{key}")) is not None}
        shown = {**shown, **{key: value for key, value in DEFAULTS.get(name, {}).items() if key not in shown}}
        arguments = ", ".join(["model.parameters()", *(f"{key}={value!r}" for key, value in shown.items())])
        where = "a Lion, such as lion_pytorch's: Lion" if name == "Lion" else f"torch.optim.{name}"
        self._to_do.append(f"make the optimizer: {where}({arguments})")

    def _number_formats(self) -> None:
        if self._take("bf16.enabled", self._take("bfloat16.enabled", False)):
            self._to_do.append("make the model's parameters bfloat16: model.to(torch.bfloat16)")
        if self._take("fp16.enabled", False) is True:
            self._to_do.append(f"make the model's parameters float16, and scale losses with {self._scaler()}")

    def _scaler(self) -> str:
        fixed = float(self._take("fp16.loss_scale", 0))  # 0: it changes
        scale, interval = 2.0 ** self._take("fp16.initial_scale_power", 16), self._take("fp16.loss_scale_window", 1000)
        if fixed:
            scale, interval = fixed, NEVER
        made = f"torch.amp.GradScaler(init_scale={scale}, growth_interval={interval})"
        return f"{made}, which halves it at an overflow" if fixed else made

    def _batches(self) -> None:
        micro = self._take("train_micro_batch_size_per_gpu")
        total = self._take("train_batch_size")
        passes = self._take("gradient_accumulation_steps")
        if micro is not None:
            self._to_do.append(f"load batches of {micro} on each rank")
        elif total is not None:
            self._to_do.append(f"load batches of {total} / ranks{f' / {passes}' if passes else ''} on each rank")
        if passes is None and micro is not None and total is not None:
            passes = f"{total // micro if total % micro == 0 else f'{total} / {micro}'} / ranks"
        if passes not in (None, 1):
            self._to_do.append(f"call backward() {passes} times before each step(), of losses divided by that number")
        if "scheduler" in self._config:
            kind = self._take("scheduler", {}).get("type", "")
            self._to_do.append(f"make the learning rate scheduler yourself, from torch.optim.lr_scheduler ({kind})")


def why_not(key: str) -> str:
    for known, reason in REASONS.items():
        if key == known or key.startswith(f"{known}."):
            return reason
    if key.rpartition(".")[2] in OFFLOAD_KEYS:
        return SIZED_BY_THE_PLAN
    return "nothing here does this"


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of all values. What is switched off is left out in silence, if it is not on here."""
    if config.get("enabled") is False:
        return
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        elif value != "auto" and not path.endswith(".enabled") and (value is not False or path in ON_HERE):
            yield path
