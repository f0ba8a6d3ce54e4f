"""Trainings with Megatron's distributed optimizer, which names torch's GPU: here its names stand for the CPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

STEPS = 5
CLIP = 0.05


class _OnCpu(TorchFunctionMode):
    """Makes tensors of "cuda" on the CPU, and tells the types of tensors as of a GPU's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        answer = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(answer).replace("torch.", "torch.cuda.")
        return answer


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    with mock.patch("torch.cuda.current_device", lambda: "cpu"), _OnCpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _model(dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a model in Megatron's data parallelism, and its distributed optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    torch.manual_seed(3)
    layers = torch.nn.Sequential(torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Linear(40, 7)).to(dtype)
    config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=1, use_cpu_initialization=True)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, layers)
    rule = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": CLIP}
    options = OptimizerConfig(**rule, use_distributed_optimizer=True, bf16=dtype == torch.bfloat16)
    return model, get_megatron_optimizer(options, [model])


def _train(rank: int, dtype: torch.dtype, stream: Callable[[Any], None], saved: str, loads: Any = None) -> dict[str, Any]:
    model, optimizer = _model(dtype)
    stream(optimizer)
    [part] = optimizer.chained_optimizers
    if loads is not None:
        state, saved, values = loads
        for each, value in zip(model.module.parameters(), values):
            each.data.copy_(value)
        part.load_state_dict(state)
        with torch.no_grad():
            part.load_parameter_state(saved)
    norms, values = _steps(rank, model, optimizer, dtype)
    part.save_parameter_state(saved)
    loads = part.state_dict(), saved, values
    later = _steps(rank, model, optimizer, dtype)
    return {"first": (norms, values), "later": later, "loads": loads, "inner": part.optimizer}


def _steps(rank: int, model: Any, optimizer: Any, dtype: torch.dtype) -> tuple[list[float], list[torch.Tensor]]:
    norms = []
    torch.manual_seed(rank)
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(torch.randn(8, 12, dtype=dtype)).square().mean().backward()
        model.finish_grad_sync()
        norms.append(optimizer.step()[1])
    return norms, [each.detach().clone() for each in model.module.parameters()]


def everything(rank: int, folder: str) -> dict[str, Any]:
    from ballast.integrations.megatron import stream_state

    found: dict[str, Any] = {}
    with on_cpu():
        for dtype in (torch.float32, torch.bfloat16):
            run = partial(_train, rank, dtype)
            plain, here = run(lambda each: None, f"{folder}/plain"), run(stream_state, f"{folder}/here")
            drive = run(lambda each: stream_state(each, offload=f"nvme:{folder}"), f"{folder}/drive")
            resumed = run(stream_state, f"{folder}/resumed", drive["loads"])
            found[str(dtype)] = {
                "plain": plain["later"],
                "here": here["later"],
                "drive": drive["later"],
                "resumed": resumed["first"],
                "kept": drive["inner"].metrics()["memory_bytes/nvme"],
            }
    return found
