"""Megatron-LM's distributed optimizer, whose state Ballast keeps on the device, on the host or on drives."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from ballast.api import wrap
from ballast.checks import refuse
from ballast.integrations import read_options
from ballast.torch.optimizer import WrappedOptimizer

# Megatron divides parameters, clips gradients and connects ranks.
GIVEN = ("stage", "mesh", "max_grad_norm", "memory", "outer", "replicas")


def stream_state(optimizer: Any, **options: Any) -> None:
    """Keep the moments of Megatron's distributed optimizer as `ballast.wrap()` keeps them, with its options, such as
    `offload="nvme:/scratch"`. They are 8 of the 12 bytes of a parameter; the fp32 copies of parameters stay where they are.

    `optimizer` comes from `get_megatron_optimizer()`, and has made no step. Megatron divides parameters, reduces and clips
    gradients, and saves and loads checkpoints as before. All ranks call this together.
    """
    read_options(options)
    for name in GIVEN:
        if name in options:
            refuse(f"cannot stream the state of Megatron's optimizer with {name}", needed="Megatron's own options for that")
    parts = [each for each in getattr(optimizer, "chained_optimizers", [optimizer]) if not each.is_stub_optimizer]
    for part in parts:
        if not hasattr(part, "shard_fp32_from_float16_groups") or part.config.use_precision_aware_optimizer:
            refuse(
                f"cannot stream the state of {type(part).__name__}: it divides no fp32 copies of parameters among ranks",
                needed="OptimizerConfig(use_distributed_optimizer=True, use_precision_aware_optimizer=False)",
            )
        part.shard_fp32_groups = [[_leaf(each) for each in group] for group in part.shard_fp32_groups]
        copies = part.shard_fp32_from_float16_groups
        for group, *shards in zip(part.optimizer.param_groups, part.shard_fp32_groups, copies):
            group["params"] = [each.requires_grad_() for each in (*shards[0], *shards[1])]
        part.optimizer = _wrapped(part.optimizer, options)
        part._set_main_param_and_optimizer_states = partial(_set_states, part)


def _leaf(shard: torch.Tensor) -> torch.Tensor:
    """Return a parameter that shares the memory of a shard of a model's parameter, with what Megatron has noted there."""
    leaf = shard.detach()
    leaf.__dict__.update(shard.__dict__)
    return leaf


def _wrapped(inner: torch.optim.Optimizer, options: dict[str, Any]) -> WrappedOptimizer:
    """Wrap the optimizer of this rank's shards, which no other rank has."""
    groups = inner.param_groups
    if not isinstance(inner, (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)):  # FusedAdam of Transformer Engine or Apex
        if not hasattr(inner, "adam_w_mode"):
            refuse(f"cannot stream the state of {type(inner).__name__}", needed="Adam or SGD")
        if inner.state:
            refuse("cannot stream the state of an optimizer that has made a step", needed="stream_state() before it")
        groups = [{name: value for name, value in group.items() if name != "bias_correction"} for group in groups]
        inner = (torch.optim.AdamW if inner.adam_w_mode else torch.optim.Adam)(groups)
    first = groups[0]["params"][0]
    ranks = torch.distributed.get_world_size()
    alone = init_device_mesh(first.device.type, (1, ranks), mesh_dim_names=("data", "tensor"))
    wrapped: WrappedOptimizer = wrap(inner, stage=0, mesh=alone, **options)
    return wrapped


def _set_states(part: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Set what Megatron has loaded. What is read after a step is a copy, and a write to it alone would be lost."""
    group, place = part.model_param_group_index_map[model_param]
    main = part.optimizer.param_groups[group]["params"][place]
    state = dict(part.optimizer.state[main])
    with torch.no_grad():
        for name, kept in {"param": main, **state}.items():
            if name in tensors:
                kept.copy_(tensors[name])
    part.optimizer.state[main] = state
