"""An Accelerator that trains with Ballast."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook

from ballast.api import export, load_checkpoint, save, wrap
from ballast.checkpoint.full_model import full_state
from ballast.checks import refuse
from ballast.integrations import (
    FOLDER,
    let_place,
    place,
    read_options,
    refuse_options_of_wrapped,
    refuse_other_backend,
    require_framework,
    require_unprepared,
)
from ballast.sizes import Size
from ballast.torch.optimizer import WrappedOptimizer, wrapped_in
from ballast.torch.parameters.units import unwrapped

require_framework("accelerate")

import accelerate  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DDPCommunicationHookType, DistributedType  # noqa: E402

ONE_PLAIN_MODEL = {DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}


class Accelerator(accelerate.Accelerator):
    """An `accelerate.Accelerator` that shards each optimizer with `ballast.wrap()` when it prepares it.

    `Accelerator(ballast=dict(stage=3, offload="host"))` is the one changed line of a script. `ballast` has the keywords of
    `ballast.wrap()`. Models may be deferred. All ranks call the methods that save, load or return a model.
    """

    def __init__(self, *args: Any, ballast: Mapping[str, Any] | None = None, **kwargs: Any):
        self.ballast_options = read_options(ballast)
        self._models_to_train: list[torch.nn.Module] = []
        self._trained: list[tuple[torch.nn.Module, WrappedOptimizer]] = []
        self._wrapped_here: list[WrappedOptimizer] = []
        self._is_saving = False
        for name in ("fsdp_plugin", "deepspeed_plugin", "megatron_lm_plugin"):
            if kwargs.get(name) is not None:
                refuse_other_backend(f"{name}=", f"Remove {name}=, or use accelerate.Accelerator.")
        super().__init__(*args, **kwargs)
        if self.distributed_type in ONE_PLAIN_MODEL:
            refuse_other_backend(self.distributed_type.value, "Choose no backend in `accelerate config`.")
        if self.ddp_handler is not None and self.ddp_handler.comm_hook != DDPCommunicationHookType.NO:
            warnings.warn(
                f"comm_hook={self.ddp_handler.comm_hook.value!r} has no effect: no DistributedDataParallel is around the "
                "model; wire= in ballast= sends fewer bytes of gradients",
                stacklevel=2,
            )

    # --- The training ---

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        self._models_to_train += [each for each in args if isinstance(each, torch.nn.Module)]
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare a model without DistributedDataParallel: the optimizer reduces its gradients."""
        require_unprepared(model)
        placement = let_place(model, self.device, device_placement)
        prepared: torch.nn.Module = super().prepare_model(model, placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Wrap an optimizer, unless it is wrapped already, and prepare it."""
        model = model_of(optimizer, self._models_to_train)
        wrapped = wrapped_in(optimizer)
        if wrapped is None:
            require_unprepared(model)
            if self.device_placement and getattr(model, "hf_device_map", None) is None:
                place(model, self.device)
            wrapped = wrap(optimizer, model, **self.ballast_options)
            self._wrapped_here.append(wrapped)
        elif self.ballast_options and all(each is not wrapped for each in self._wrapped_here):
            refuse_options_of_wrapped()
        if all(each is not wrapped for _, each in self._trained):
            self._trained.append((unwrapped(model), wrapped))
        return super().prepare_optimizer(optimizer, device_placement=False)

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Give all ranks as many batches. Uneven ones are refused once an optimizer is prepared: no rank makes a step of a
        wrapped optimizer alone."""
        is_even = self.even_batches if even_batches is None else even_batches
        if self.num_processes > 1 and self._trained and not is_even:
            refuse(
                "cannot join uneven inputs: all ranks make each step of a wrapped optimizer together",
                needed="as many batches on each rank",
                remedy="Use even_batches=True, or drop_last=True of the data loader.",
            )
        with super().join_uneven_inputs([EvenInputs(self.device)], even_batches):
            yield

    def free_memory(self, *objects: Any) -> Any:
        self._models_to_train, self._trained, self._wrapped_here = [], [], []
        return super().free_memory(*objects)

    # --- Saving and loading ---

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        hook = self.register_save_state_pre_hook(self._save_trained)
        self._is_saving = True
        try:
            with no_optimizers(self):
                return super().save_state(output_dir, *args, **kwargs)
        finally:
            self._is_saving = False
            hook.remove()

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        hook = self.register_load_state_pre_hook(self._load_trained)
        try:
            with no_optimizers(self):
                return super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the full state_dict() on the main process, in host memory, and an empty one on others. All ranks call it
        together."""
        if not self._trains(model):
            state: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
            return state
        if self._is_saving:
            return {}
        return full_state(self.unwrap_model(model) if unwrap else model, keeps=self.is_main_process)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: Size = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model to safetensors files, unit by unit. All ranks call it together."""
        if not (safe_serialization and self._trains(model)):
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        os.makedirs(save_directory, exist_ok=True)
        export(self.unwrap_model(model), Path(save_directory) / "model.safetensors", max_shard_size=max_shard_size)

    def _trains(self, model: torch.nn.Module) -> bool:
        return any(each is unwrapped(model) for each, _ in self._trained)

    def _save_trained(self, models: list[torch.nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        for number, (model, optimizer) in enumerate(self._trained):
            save(numbered(output_dir, number), model, optimizer)
        weights[:] = [each for model, each in zip(models, weights) if not self._trains(model)]

    def _load_trained(self, models: list[torch.nn.Module], input_dir: str) -> None:
        for number, (model, optimizer) in enumerate(self._trained):
            load_checkpoint(numbered(input_dir, number), model, optimizer)
        models[:] = [model for model in models if not self._trains(model)]


class EvenInputs(Joinable):
    """Stands for models that Ballast trains in torch's Join, which has nothing to do where inputs are even."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return torch.distributed.group.WORLD


def numbered(folder: str, number: int) -> Path:
    """Return the folder of the checkpoint of an optimizer, with the numbers that Accelerate gives to its files."""
    return Path(folder) / (FOLDER if number == 0 else f"{FOLDER}_{number}")


def model_of(optimizer: torch.optim.Optimizer, models: list[torch.nn.Module]) -> torch.nn.Module:
    """Return the model with the optimizer's parameters."""
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in models:
        if any(id(parameter) in mine for parameter in model.parameters()):
            return model
    refuse(
        "cannot prepare an optimizer without its model",
        needed="accelerator.prepare(model, optimizer, ...)",
    )


@contextmanager
def no_optimizers(accelerator: accelerate.Accelerator) -> Iterator[None]:
    """Let the Accelerator save and load all but its optimizers, which has no public hook. `_optimizers` is the one private
    name of Accelerate that is used."""
    kept, accelerator._optimizers = accelerator._optimizers, []
    try:
        yield
    finally:
        accelerator._optimizers = kept
