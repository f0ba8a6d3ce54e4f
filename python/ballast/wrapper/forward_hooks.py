"""Hooks on calls of the model. Parameters are partitioned before a call, because autograd saves some of them for backward
during the call."""

from __future__ import annotations

from typing import Any

import torch

from ballast.wrapper.ddp_compat import UnsyncedDataParallel
from ballast.wrapper.hooks import ModuleHook, SessionReference


class ForwardHooks:
    """Hooks the model, and in stage 3 its modules with parameters of their own, until these are partitioned: a user may
    call methods of the model instead of the model."""

    def __init__(self, model: torch.nn.Module | None, session: SessionReference):
        self._session = session
        self._of_model = before_forward(session)
        self._unsynced = None if model is None else UnsyncedDataParallel(model)
        self._hooks: list[Any] = [] if model is None else [self._unsynced, model.register_forward_pre_hook(self._of_model)]
        self._of_modules: list[Any] = []

    @property
    def has_data_parallel(self) -> bool:
        return self._unsynced is not None and self._unsynced.has_any

    def leave_graphs_whole(self) -> None:
        """Do nothing in calls of a compiled model, from now on: torch has its parameters, and the first gradient begins a
        step."""
        self._of_model.cuts_graphs = False

    def before_module(self, module: torch.nn.Module) -> None:
        live = self._session()
        if live is not None:
            live.before_module(module)

    def watch_modules(self, model: torch.nn.Module) -> None:
        hook = ModuleHook(self.before_module)
        self._of_modules = [
            module.register_forward_pre_hook(hook)
            for module in model.modules()
            if module is not model and any(True for _ in module.parameters(recurse=False))
        ]

    def remove_from_modules(self) -> None:
        """Remove the hooks of the modules, and keep those of the model."""
        for hook in self._of_modules:
            hook.remove()
        self._of_modules = []

    def remove(self) -> None:
        self.remove_from_modules()
        for hook in self._hooks:
            hook.remove()


def before_forward(session: SessionReference) -> ModuleHook:
    def called(model: torch.nn.Module) -> None:
        live = session()
        if live is not None:
            live.before_forward(model)

    def called_compiled(model: torch.nn.Module) -> None:
        live = session()
        if live is not None:
            live.before_compiled_forward(model)

    return ModuleHook(called, in_compiled=called_compiled)
