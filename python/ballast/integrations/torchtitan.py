"""torchtitan's models, whose parameters, gradients and state Ballast divides among ranks in place of `fully_shard()`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ballast.api import wrap
from ballast.checks import refuse
from ballast.integrations import read_options, require_framework
from ballast.torch.gpu import NO_GRAPHS

require_framework("torchtitan")

from torchtitan.components.optimizer import OptimizersContainer  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402


class BallastOptimizers(OptimizersContainer):
    """torchtitan's optimizers, wrapped with `ballast.wrap()`: `ballast` has its keywords, such as `dict(stage=3)`.

    torchtitan sums gradients over ranks, because it divides the loss by the tokens of all of them. Ballast averages.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        ballast: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]):
        (model,) = model_parts  # parallelize() has refused pipelines
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(torch.mul, other=torch.distributed.get_world_size()))
        super().__init__(config, model_parts=model_parts)
        self.optimizers: list[Any] = [wrap(each, model, **read_options(config.ballast)) for each in self.optimizers]

    def state_dict(self) -> dict[str, Any]:
        return refuse("cannot save a checkpoint of torchtitan", needed="checkpoint.enable=False, and ballast.save()")


def parallelize(model: torch.nn.Module, *, parallel_dims: Any, training: Any, **options: Any) -> torch.nn.Module:
    """Recompute activations and compile as torchtitan does, and leave parameters whole for BallastOptimizers."""
    for name in ("tp", "cp", "pp", "ep"):
        if getattr(parallel_dims, name) > 1:
            refuse(f"cannot train a model of torchtitan with Ballast and {name}", needed="data parallelism alone")
    if training.dtype != training.mixed_precision_param:
        needed = "the same training.dtype and training.mixed_precision_param: the state has fp32 masters of bf16 parameters"
        refuse(f"cannot compute in {training.mixed_precision_param} with parameters in {training.dtype}", needed=needed)
    if training.enable_cpu_offload or not getattr(training, NO_GRAPHS):
        refuse("cannot train with enable_cpu_offload or CUDA graphs", needed=f"training.{NO_GRAPHS}, and offload=")
    if options["ac_config"] is not None:
        options["ac_config"].build(dump_folder=options["dump_folder"]).apply(model)
    if options["compile_config"].enable and "model" in options["compile_config"].components:
        apply_compile(model, compile_config=options["compile_config"], parallel_dims=parallel_dims)
    return model
