"""Trainings as users of frameworks write them, with and without ballast.wrap()."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.loops import Loop


def as_launched(rank: int) -> None:
    """Set the environment variables in which frameworks look for the rank, and for the number of threads."""
    ranks = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # one rank alone would use all cores, and wait in a loop


def tiny_model(hidden: int = 16, words: int = 64) -> Any:
    """Return a model, whose matrices are large enough to be deferred with a hidden size of 64."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def trained(rank: int, configuration: dict[str, Any]) -> dict[str, float]:
    run = Loop(rank=rank, ranks=dist.get_world_size()).run(**configuration)
    with ballast.gather(run.model):
        return {"loss": run.losses[-1], "sum": sum(float(each.double().sum()) for each in run.parameters)}


def without_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep bitsandbytes from compiling its functions on CPUs, again for each shape, which takes seconds."""
    decorated: Callable[..., Any] = torch.compiler.set_stance("force_eager")(function)
    return decorated
