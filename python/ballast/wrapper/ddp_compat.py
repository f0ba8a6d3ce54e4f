"""Compatibility with DistributedDataParallel around a model whose gradients Ballast reduces."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from ballast._torch_compat import active_data_parallel
from ballast.wrapper.hooks import ModuleHook


class DataParallelHook(ModuleHook):
    """A hook that does nothing in compiled code where there is no DistributedDataParallel, so that it does not cut a graph."""

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        if not is_dynamo_compiling() or isinstance(module, DistributedDataParallel) or active_data_parallel() is not None:
            super().__call__(module, *arguments)


class UnsyncedDataParallel:
    """Keep DistributedDataParallel from reducing gradients a second time, until this is removed.

    DistributedDataParallel then works as inside its no_sync(). It may be the model itself, or be made around the model
    later, as Accelerate and Trainer do.
    """

    def __init__(self, model: torch.nn.Module):
        self._unsynced: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook = model.register_forward_pre_hook(DataParallelHook(self._before_forward))

    def _before_forward(self, model: torch.nn.Module) -> None:
        for around in (model, active_data_parallel()):
            if isinstance(around, DistributedDataParallel) and model in (around, around.module):
                around.require_backward_grad_sync = False
                self._unsynced.add(around)

    @property
    def has_any(self) -> bool:
        """Whether there is one around the model, and it was called."""
        return len(self._unsynced) > 0

    def remove(self) -> None:
        self._hook.remove()
        for around in self._unsynced:
            around.require_backward_grad_sync = True
        self._unsynced.clear()
