"""Trainings of torchtitan's Trainer, which needs a GPU and Triton: here CPUs stand for GPUs, and an empty module for Triton."""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

RANKS, STEPS, WORDS, BATCH, LENGTH = 2, 4, 32, 2, 8
CLIP = 0.5


def import_on_cpu() -> None:
    """Import torchtitan for the CPU. Its kernels for expert parallelism are Triton's, and are not called."""
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401  # looks for Triton

    class Nothing(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return mock.MagicMock()

    for name in ("triton", "triton.language"):
        if name not in sys.modules:
            sys.modules[name] = Nothing(name)
    with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
        import torchtitan.distributed.fsdp
        import torchtitan.trainer

    divide = torchtitan.distributed.fsdp.disable_fsdp_gradient_division

    def add(model: torch.nn.Module) -> None:
        divide(model)
        for module in model.modules():
            if isinstance(module, torchtitan.distributed.fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no sums of products

    torchtitan.distributed.fsdp.disable_fsdp_gradient_division = add
    torchtitan.trainer.dist_utils.set_pg_timeouts = lambda **_: None  # names the GPU of each rank
    monitor = mock.MagicMock(device_name="cpu")
    monitor.get_peak_stats.return_value = mock.MagicMock(max_reserved_gib=0.0, max_reserved_pct=0.0)
    torchtitan.components.metrics.build_device_memory_monitor = lambda: monitor


def _parts() -> tuple[Any, Any]:
    """Return the configurations of a loader that gives each rank other words, and of a tokenizer that it does not need."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class Words(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, **_: Any):
            self._words = torch.Generator().manual_seed(dp_rank)

        def __iter__(self) -> Any:
            while True:
                row = torch.randint(WORDS, (BATCH, LENGTH + 1), generator=self._words)
                yield {"input": row[:, :-1].clone()}, row[:, 1:].clone()

        def state_dict(self) -> Any:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any):
            pass

        def encode(self, *_: Any, **__: Any) -> Any:
            return []

        decode = get_vocab_size = encode

    return Words.Config(), NoTokenizer.Config()


def _config(folder: str) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    words, tokenizer = _parts()
    spec = llama3.model_registry("debugmodel")
    for _, _, parent, name in list(spec.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        tokenizer=tokenizer,
        dataloader=words,
        loss=CrossEntropyLoss.Config(),
        activation_checkpoint=FullAC.Config(),
        optimizer=default_adamw(lr=1e-2),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=BATCH,
            seq_len=LENGTH,
            steps=STEPS,
            max_norm=CLIP,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
    )


def _with_equal_values(kind: Any) -> Any:
    """Replace the values that a model begins with, which depend on how it is divided."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    begin = kind.init_weights

    def init_weights(model: torch.nn.Module, **options: Any) -> None:
        begin(model, **options)
        for number, parameter in enumerate(model.parameters()):
            values = 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            if isinstance(parameter, DTensor):
                values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(values)

    return mock.patch.object(kind, "init_weights", init_weights)


def train(rank: int, folder: str, how: dict[str, Any] | None, change: Callable[[Any], object] = id) -> Any:
    """Return the losses, the norms and the parameters of a training, with Ballast or with fully_shard()."""
    import ballast

    os.environ["LOCAL_RANK"] = str(rank)
    import_on_cpu()
    from torchtitan.models.llama3 import Llama3Model
    from torchtitan.trainer import Trainer

    config = _config(folder)
    if how is not None:
        from ballast.integrations.torchtitan import BallastOptimizers, parallelize

        config.model_spec.parallelize_fn = parallelize
        config.optimizer = BallastOptimizers.Config(param_groups=config.optimizer.param_groups, ballast=how)
    change(config)
    with _with_equal_values(Llama3Model):
        trainer = Trainer(config)
    losses, norms = [], []

    def log(step: int, loss: float, most: float, norm: float, extra_metrics: Any = None) -> None:
        losses.append(loss)
        norms.append(norm)

    trainer.metrics_processor.log, trainer.metrics_processor.should_log = log, lambda step: True
    trainer.train()
    (model,) = trainer.model_parts
    with ballast.gather(model) if how is not None else contextlib.nullcontext():
        full = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
        return losses, norms, [each.detach().clone() for each in full]


def select(config: Any) -> None:
    """Recompute activations except for those of some operators."""
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    config.activation_checkpoint = SelectiveAC.Config()


def train_each(rank: int, folder: str, hows: Sequence[dict[str, Any] | None]) -> list[Any]:
    """Train in each way, with Ballast in stage 3 with other activation checkpointing."""
    return [train(rank, folder, how, select if how == {"stage": 3} else id) for how in hows]
