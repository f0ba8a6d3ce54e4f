"""Ballast trains models far larger than GPU memory.

>>> import ballast
>>> plan = ballast.plan("llama-8b", ranks=4, gpu="h100", host_memory="1TiB")
>>> plan.fits
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ballast._core import version as __version__
from ballast.api import (
    chunked_loss,
    deferred,
    export,
    gather,
    load,
    load_checkpoint,
    offload_activations,
    receive_weights,
    save,
    sync_weights,
    tiled,
    wrap,
)
from ballast.deepspeed_config import ImportedConfig, import_deepspeed
from ballast.errors import Error, FailureError, OutOfMemoryError, ResourceError, UsageError
from ballast.outer.options import DiLoCo
from ballast.planning.hardware import this_machine
from ballast.planning.planner import pareto_front, plan
from ballast.planning.result import Plan
from ballast.ranks import Group, Store, connect
from ballast.sizes import human_size, parse_rate, parse_size
from ballast.step_reports import StepLine, StepLog
from ballast.wrap_options import Run, Tuning

if TYPE_CHECKING:
    from ballast.checkpoint.saving import PendingSave as PendingSave
    from ballast.torch.optimizer import WrappedOptimizer as WrappedOptimizer

__all__ = [
    "DiLoCo",
    "Error",
    "FailureError",
    "Group",
    "ImportedConfig",
    "OutOfMemoryError",
    "Plan",
    "ResourceError",
    "Run",
    "StepLine",
    "StepLog",
    "Store",
    "Tuning",
    "UsageError",
    "__version__",
    "chunked_loss",
    "connect",
    "deferred",
    "export",
    "gather",
    "human_size",
    "import_deepspeed",
    "load",
    "load_checkpoint",
    "offload_activations",
    "pareto_front",
    "parse_rate",
    "parse_size",
    "plan",
    "receive_weights",
    "save",
    "sync_weights",
    "this_machine",
    "tiled",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Import the classes of what wrap() and save() return when they are first used: they need torch."""
    homes = {"WrappedOptimizer": "ballast.torch.optimizer", "PendingSave": "ballast.checkpoint.saving"}
    if name in homes:
        return getattr(import_module(homes[name]), name)
    raise AttributeError(f"module 'ballast' has no attribute {name!r}")
