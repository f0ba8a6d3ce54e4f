"""Torch's own data parallelism, where it is around a model whose gradients are reduced here."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ballast.wrapper.hooks import OfOneModule


def quiet_data_parallel(model: torch.nn.Module) -> Any:
    """Nothing is reduced a second time by a DistributedDataParallel that is the model, or is made of it later, as Accelerate
    and Trainer do: it goes on as in its no_sync(). What comes back removes this."""

    def before_forward(_: torch.nn.Module) -> None:
        for around in (model, DistributedDataParallel._get_active_ddp_module()):
            if isinstance(around, DistributedDataParallel) and model in (around, around.module):
                around.require_backward_grad_sync = False

    return model.register_forward_pre_hook(OfOneModule(before_forward))
