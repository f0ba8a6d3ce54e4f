"""Hooks on calls of the model. Parameters are partitioned before a call, because autograd saves some of them for backward
during the call."""

from __future__ import annotations

from typing import Any

import torch

from ballast.wrapper.ddp_compat import UnsyncedDataParallel
from ballast.wrapper.hooks import BeforeStep, ModuleHook, SessionReference


class ForwardHooks:
    """Hooks the model, and in stage 3 its modules with parameters of their own: a user may call methods of the model
    instead of the model."""

    def __init__(self, model: torch.nn.Module | None, session: SessionReference, *, of_modules: bool):
        self._hooks: list[Any] = []
        self._of_modules: list[Any] = []
        if model is None:
            return
        self._hooks = [UnsyncedDataParallel(model), _before_call(model, session)]
        if of_modules:
            inner = [module for module in model.modules() if module is not model and _has_own_parameters(module)]
            self._of_modules = [_before_call(module, session, is_inner=True) for module in inner]

    def remove_from_modules(self) -> None:
        """Remove the hooks of the modules, and keep those of the model."""
        for hook in self._of_modules:
            hook.remove()
        self._of_modules = []

    def remove(self) -> None:
        self.remove_from_modules()
        for hook in self._hooks:
            hook.remove()


def _before_call(module: torch.nn.Module, session: SessionReference, *, is_inner: bool = False) -> Any:
    def called(module: torch.nn.Module) -> None:
        live = session()
        if live is not None:
            live.before_forward(module)

    def called_inside(module: torch.nn.Module) -> None:
        live = session()
        if live is not None:
            live.before_module(module)

    return module.register_forward_pre_hook(BeforeStep(called_inside, session) if is_inner else ModuleHook(called))


def _has_own_parameters(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))
