"""Ballast as a strategy of Lightning.

import lightning as L
from ballast.integrations.lightning import BallastStrategy

L.Trainer(strategy=BallastStrategy(stage=3)).fit(module)
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ballast.api import gather, load_checkpoint, save, wrap
from ballast.checks import fail, refuse
from ballast.integrations import is_deferred, read_options, require_framework
from ballast.torch.optimizer import WrappedOptimizer
from ballast.torch.parameters.managed_parameter import Lifecycle, owner_of

require_framework("lightning")

from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

log = logging.getLogger("ballast")

STATE = "lightning"  # begins the name of the file with Lightning's part of a checkpoint
BESIDE_AVERAGES = "current_model_state"  # Lightning's WeightAveraging keeps the parameters that it averages here


class ThroughForward(torch.nn.Module):
    """Calls a module. Lightning calls training_step() through it as the module's forward(), so that hooks of the module run,
    and parameters of the module itself can be gathered."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class BallastStrategy(DDPStrategy):
    """Trains a LightningModule with `ballast.wrap()` around the optimizer of its configure_optimizers().

    It starts processes as Lightning's "ddp" does. `options` are those of `ballast.wrap()`: `BallastStrategy(stage=3,
    offload="host")`. A checkpoint is a directory, which any number of ranks resumes, at any stage. After fit() each rank has
    the full parameters, in memory of torch.
    """

    optimizers: list[Any]  # a property of Lightning's

    def __init__(self, *, process_group_backend: str | None = None, start_method: Any = "popen", **options: Any):
        self._options = read_options(options)
        super().__init__(process_group_backend=process_group_backend, start_method=start_method)
        self._is_restored = False  # whether a directory with the optimizer was loaded
        self._has_failed = False

    # --- The beginning ---

    def setup_environment(self) -> None:
        self._is_restored, self._has_failed = False, False
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move the model, unless it is deferred: then it is made on its device."""
        if not is_deferred(self.lightning_module):
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Leave out DistributedDataParallel: Ballast reduces the gradients."""
        self.model = ThroughForward(self.lightning_module)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        found = len(self.optimizers)
        if found != 1 or not self.optimizers[0].param_groups:
            refuse(
                f"cannot train with {found} optimizers" if found > 1 else "cannot train without an optimizer",
                where="configure_optimizers()",
                needed="one optimizer; several learning rates are parameter groups of it",
            )
        wrapped = wrap(self.optimizers[0], self.lightning_module, **self._options)
        wrapped._step_supports_amp_scaling = False  # else Lightning refuses to clip with precision="bf16-mixed" or "16-mixed"
        self.optimizers = [wrapped]

    @property
    def _wrapped(self) -> WrappedOptimizer | None:
        """The optimizer, until it is closed."""
        found = self.optimizers[0] if self.optimizers else None
        return found if isinstance(found, WrappedOptimizer) and found._ballast.lifecycle is not Lifecycle.CLOSED else None

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Make a step. StochasticWeightAveraging ends with an epoch without backward passes, which renews the averages of batch
        normalization: Lightning would make a step of it with gradients that the last step has used."""
        if self.lightning_module.trainer.fit_loop._skip_backward:
            return closure()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    # --- Checkpoints ---

    @property
    def _is_fitting(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read after the optimizer is wrapped: always, because its shards go to their ranks."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing while the model is trained: save_checkpoint() writes its shards."""
        return {} if self._wrapped is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: save_checkpoint() writes the state."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Save a directory with `ballast.save()`, and Lightning's part in a file there. After fit(), save the model alone."""
        if storage_options is not None:
            refuse(
                "cannot save with storage_options: ranks write to a directory that all of them see",
                needed="save_checkpoint() of a path without storage_options",
            )
        if self._wrapped is None:
            log.warning("%s has the model alone: the state of the optimizer has gone with the end of fit()", filepath)
            super().save_checkpoint(checkpoint, filepath)
            return
        folder = Path(self.broadcast(os.fspath(filepath)))
        name = self.broadcast(f"{STATE}-{uuid.uuid4().hex[:8]}.ckpt")
        if self.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            self.checkpoint_io.save_checkpoint(checkpoint, folder / name)
        self.barrier()
        save(folder, self.lightning_module, self._wrapped, extra={STATE: name})
        if self.is_global_zero:
            for other in folder.glob(f"{STATE}-*.ckpt"):
                if other.name != name:  # a file of the checkpoint that was here before
                    other.unlink()

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        """Load a directory of save_checkpoint(), or read a file of another strategy."""
        folder = Path(checkpoint_path)
        if not folder.is_dir():
            return dict(super().load_checkpoint(checkpoint_path, weights_only=weights_only))
        if self._wrapped is None:  # an evaluation
            self.setup_optimizers(self.lightning_module.trainer)
        extra = load_checkpoint(folder, self.lightning_module, self._wrapped)
        if not isinstance(extra, dict) or STATE not in extra:
            refuse(
                "cannot resume a training of Lightning: the checkpoint was saved without it",
                where=str(folder),
                needed="one of this strategy; or ballast.load_checkpoint() in on_fit_start()",
            )
        self._is_restored = True
        checkpoint = dict(self.checkpoint_io.load_checkpoint(folder / extra[STATE], weights_only=weights_only))
        if self._is_fitting and checkpoint.get(BESIDE_AVERAGES) == {}:
            checkpoint[BESIDE_AVERAGES] = self.lightning_module.state_dict()  # loaded above; the callback loads it again
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the parameters of a file of another strategy. Of a directory, load for an evaluation what a callback has put in
        their place, such as averages."""
        if self._is_restored and (self._is_fitting or not checkpoint["state_dict"]):
            return
        with gather(self.lightning_module):
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._is_restored or self._wrapped is None:
            return
        [state] = checkpoint["optimizer_states"]
        if not state:
            fail(
                "bad_record",
                "cannot resume: the checkpoint has no state of the optimizer",
                needed="one that was saved during fit()",
                remedy="To begin with its weights, load them into the module before fit().",
            )
        self._wrapped.load_state_dict(state)

    # --- The end ---

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True  # perhaps on this rank alone
        super().on_exception(exception)

    def teardown(self) -> None:
        """Close the optimizer, and move the model to the CPU. A rank that has failed does so alone."""
        self.model = module = self.lightning_module
        if (wrapped := self._wrapped) is not None:
            if self._has_failed and self.world_size > 1:
                wrapped._ballast.close(together=False)
            else:
                wrapped.close()
        if module is None or all(owner_of(each) is None for each in module.parameters()):
            super().teardown()
            return
        self.precision_plugin.teardown()  # the model has lost its values, so it stays where it is
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
