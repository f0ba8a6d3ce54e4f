"""Trainers of transformers and TRL that train with Ballast."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ballast.api import export, gather, load, load_checkpoint, save, wrap
from ballast.checkpoint.full_model import fits_in_full, full_tensors, gathered_to_read
from ballast.checkpoint.weight_sync import full_weights
from ballast.checks import refuse
from ballast.integrations import (
    FOLDER,
    is_deferred,
    is_wrapped,
    let_place,
    place,
    read_options,
    refuse_options_of_wrapped,
    refuse_other_backend,
    require_framework,
    require_unprepared,
    shard_frozen,
)
from ballast.torch.optimizer import WrappedOptimizer, wrapped_in

require_framework("transformers")

import transformers  # noqa: E402
from transformers.trainer import SCHEDULER_NAME  # noqa: E402
from transformers.utils import SAFE_WEIGHTS_NAME  # noqa: E402

Base: Any = transformers.Trainer if TYPE_CHECKING else object  # the class that the mixin is put before

SHARD_SIZE = "50GB"  # the largest file of a model, as in save_pretrained()
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")


class BallastTrainerMixin(Base):
    """Lets a Trainer train with Ballast: `class MyTrainer(BallastTrainerMixin, trl.SFTTrainer): pass`.

    `ballast` has the keywords of `ballast.wrap()`. The model may be deferred. Without `optimizers=`, the Trainer creates the
    optimizer that its arguments name.

    The methods with an underscore replace those of `transformers.Trainer`, which offers no public ones for the same purpose.
    """

    def __init__(self, *args: Any, ballast: Mapping[str, Any] | None = None, **kwargs: Any):
        self.ballast_options = None if ballast is None else read_options(ballast)
        self._wrapped_here = False
        self._owners: list[WrappedOptimizer] = []  # they own the values of models that are not trained
        super().__init__(*args, **kwargs)
        if (engine := getattr(self, "vllm_generation", None)) is not None:  # of TRL's GRPO and the like: it would read shards
            engine._iter_named_params = functools.partial(full_weights, engine.model)

    # --- The training ---

    def create_accelerator_and_postprocess(self) -> None:
        require_possible(self.args, self.ballast_options or {})
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # the launcher's configuration says so
            refuse_other_backend("FSDP" if self.is_fsdp_enabled else "DeepSpeed", "Choose no backend in `accelerate config`.")
        self.accelerator.prepare_model = functools.partial(prepare_model, weakref.ref(self))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer as the Trainer does, and wrap it."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if wrapped_in(optimizer) is None:
            require_unprepared(self.model)
            wrap(optimizer, self.model, **(self.ballast_options or {}))
            self._wrapped_here = True
        elif self.ballast_options is not None and not self._wrapped_here:
            refuse_options_of_wrapped()
        return optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with gathering_to_generate(self.model):
            return super().train(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_deferred()
        with gathering_to_generate(self.model):
            return super().evaluation_loop(*args, **kwargs)

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        if is_deferred(model):
            place(model, device)
        else:
            super()._move_model_to_device(model, device)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if (tuning := (self.ballast_options or {}).get("tuning")) is not None and tuning.update_in_backward:
            return grad_norm  # None, without max_grad_norm: gradients are gone
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _shard_reference(self, model: torch.nn.Module) -> None:
        """Partition a model that is only evaluated, in stage 3, unless it shares parameters with the trained one."""
        options = self.ballast_options or {}
        trained = {id(parameter) for parameter in self.model.parameters()}
        if options.get("stage") == 3 and not any(id(parameter) in trained for parameter in model.parameters()):
            self._owners.append(shard_frozen(model, options))

    def _begin_deferred(self) -> None:
        """Wrap a deferred model that is used before train(): only then it has values."""
        if is_deferred(self.model):
            self.create_optimizer()

    def _required_wrapped(self) -> WrappedOptimizer:
        wrapped = wrapped_in(self.optimizer)
        assert wrapped is not None  # train() has created it
        return wrapped

    # --- Its checkpoints ---

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the model as a folder for from_pretrained(). All ranks call it together."""
        folder = self.args.output_dir if output_dir is None else output_dir
        self._begin_deferred()
        if has_adapters(self.model):
            from ballast.integrations.peft import NamesOnly, parameters_of

            adapters = full_tensors(parameters_of(self.model, list(self.model.peft_config)), keeps=self.args.should_save)
            with NamesOnly():
                super()._save(folder, state_dict=adapters)
        else:
            super()._save(folder, state_dict={})  # the configuration and the tokenizer
            export(self.model, Path(folder) / SAFE_WEIGHTS_NAME, max_shard_size=SHARD_SIZE)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / FOLDER, self.model, self._required_wrapped())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not is_saved_with_ballast(resume_from_checkpoint):  # else the optimizer is loaded together with the model
            load_adapters = functools.partial(super()._load_from_checkpoint, resume_from_checkpoint, model)
            self._load_weights(resume_from_checkpoint, load_adapters)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # this is for a training without Ballast
        if checkpoint is not None and is_saved_with_ballast(checkpoint):
            load_checkpoint(Path(checkpoint) / FOLDER, self.model, self._required_wrapped())
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if has_adapters(self.model) and is_saved_with_ballast(best):
            load_checkpoint(Path(best) / FOLDER, self.model, self._required_wrapped())
        else:
            self._load_weights(best, super()._load_best_model)

    def _load_weights(self, folder: str, load_adapters: Callable[[], None]) -> None:
        if has_adapters(self.model):
            self._begin_deferred()
            with gather(self.model):  # PEFT reads its state_dict()
                load_adapters()
        else:
            load(self.model, folder)


class BallastTrainer(BallastTrainerMixin, transformers.Trainer):
    """A `transformers.Trainer` that trains with Ballast.

    `BallastTrainer(model, args, ballast=dict(stage=3, offload="host"), ...)` is the one changed line of a script.
    """


def from_pretrained(kind: Any, name: str | os.PathLike[str], **options: Any) -> Any:
    """Return a deferred model whose values are read from the files of a folder, or of a model of the Hub, when training begins:
    each rank reads what it keeps. `kind` is a class of transformers, such as `AutoModelForCausalLM`. `options` are for its
    configuration and for the Hub (`revision`, `token`), and `dtype`, whose default is the format in the configuration.
    """
    from huggingface_hub import snapshot_download

    from ballast.api import deferred

    dtype = options.pop("dtype", None)
    config, unknown = transformers.AutoConfig.from_pretrained(name, return_unused_kwargs=True, **options)
    if unknown:
        refuse(
            f"cannot read a deferred model with {', '.join(f'{each}=' for each in unknown)}",
            needed="dtype, and options of the configuration or of the Hub: each rank reads the files as they are",
        )
    folder = name
    if not os.path.isdir(name):
        hub_options = {each: options[each] for each in HUB_OPTIONS if each in options}
        folder = snapshot_download(str(name), allow_patterns=["*.safetensors", "*.json"], **hub_options)
    folder = Path(folder, options.get("subfolder", ""))
    create = getattr(kind, "from_config", None) or kind._from_config
    with torch.random.fork_rng(devices=[]), deferred():  # from_pretrained() of transformers draws no random numbers either
        model = create(config, dtype=config.dtype if dtype is None else dtype)
    if model.can_generate():
        with suppress(OSError):  # the file may be missing
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    load(model, folder)
    return model.eval()


@contextmanager
def gathering_to_generate(model: torch.nn.Module) -> Iterator[None]:
    """Hold full parameters inside of calls of model.generate(), where each rank has memory for them. Otherwise, or with
    `synced_gpus=True`, ranks gather each unit for each token of the batch together, up to the longest answer of all."""
    generate = getattr(model, "generate", None)
    if generate is None or "generate" in vars(model):
        yield
        return

    @functools.wraps(generate)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("synced_gpus") or not fits_in_full(model):
            return generate(*args, **{**kwargs, "synced_gpus": torch.distributed.is_initialized()})
        with gathered_to_read(model):
            return generate(*args, **kwargs)

    vars(model)["generate"] = gathered
    try:
        yield
    finally:
        del vars(model)["generate"]


def prepare_model(
    trainer: weakref.ref[Any], model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> torch.nn.Module:
    """Prepare a model as the Trainer's Accelerator does, without DistributedDataParallel, which would keep all gradients. In
    stage 3, a model that is only evaluated, such as the reference model of DPO, is partitioned. The Accelerator has this
    function in place of its own, and must not keep itself alive with it: the Trainer has the Accelerator."""
    mine = trainer()
    assert mine is not None  # its Accelerator makes this call
    accelerator = mine.accelerator
    is_new = not is_wrapped(model)
    placement = let_place(model, accelerator.device, device_placement)
    prepared: torch.nn.Module = type(accelerator).prepare_model(accelerator, model, placement, evaluation_mode=True)
    if evaluation_mode and is_new:
        mine._shard_reference(model)
    return prepared


def require_possible(args: transformers.TrainingArguments, options: Mapping[str, Any]) -> None:
    """Refuse arguments that choose another backend, or threads instead of ranks; that write to the reference model, whose
    parameters stage 3 partitions; or that cast the model for evaluations, which would fail after the training."""
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            refuse_other_backend(f"{name}=", f"Remove {name}= from the TrainingArguments, or use another Trainer.")
    if args.n_gpu > 1:
        refuse(
            f"cannot train with Ballast: this process would use {args.n_gpu} GPUs",
            needed="a process for each GPU: torchrun --nproc-per-node=gpu script.py",
        )
    if getattr(args, "sync_ref_model", False) and options.get("stage") in (3, "auto"):
        refuse(
            "cannot train with sync_ref_model=True in stage 3: it writes to parameters that are partitioned over ranks",
            needed="ballast=dict(stage=2); or sync_ref_model=False",
        )
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name):
            refuse(
                f"cannot evaluate with {name}=True: it casts the model after training has begun, and ranks keep shards of it",
                needed=f"{name[:4]}=True, which casts inside of the model's calls; or a model in that format",
            )


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether the model has adapters of PEFT, which are saved without the model."""
    return bool(getattr(model, "peft_config", None))


def is_saved_with_ballast(checkpoint: str) -> bool:
    return (Path(checkpoint) / FOLDER).is_dir()
