"""Torch's own data parallelism, where it is around a model whose gradients are reduced here."""

from __future__ import annotations

import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from ballast._torch_compat import active_data_parallel
from ballast.wrapper.hooks import OfOneModule


class UnsyncedDataParallel:
    """Nothing is reduced a second time by a DistributedDataParallel that is the model, or is made of it later, as Accelerate
    and Trainer do: it works as in its no_sync(), until this is removed."""

    def __init__(self, model: torch.nn.Module):
        self._quiet: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook = model.register_forward_pre_hook(OfOneModule(self._before_forward))

    def _before_forward(self, model: torch.nn.Module) -> None:
        for around in (model, active_data_parallel()):
            if isinstance(around, DistributedDataParallel) and model in (around, around.module):
                around.require_backward_grad_sync = False
                self._quiet.add(around)

    def remove(self) -> None:
        self._hook.remove()
        for around in self._quiet:
            around.require_backward_grad_sync = True
        self._quiet.clear()
