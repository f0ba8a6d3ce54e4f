"""Hooks of modules that stay with their module, and are not compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ballast._torch_compat import compiler_of_calls


class ModuleHook:
    """A hook that stays with its module: in a copy or a pickle of the module it does nothing. torch.compile() does not
    compile it. The function that ensures this takes longer than most hooks, so it is called where something compiles only.
    There it calls `in_compiled`, if there is one, instead of the hook. The call cuts a graph, unless `cuts_graphs` is cleared:
    then the hook does nothing there."""

    def __init__(self, hook: Callable[[torch.nn.Module], None], in_compiled: Callable[[torch.nn.Module], None] | None = None):
        self._hook = hook
        self._uncompiled = torch.compiler.disable(in_compiled or hook)
        self.cuts_graphs = True

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if is_dynamo_compiling() or compiler_of_calls() is not None:
            if self.cuts_graphs:
                self._uncompiled(module)
        else:
            self._hook(module)

    def __reduce__(self) -> tuple[type[Nothing], tuple[()]]:
        return Nothing, ()


class EagerHook(ModuleHook):
    """A hook that does nothing where something compiles, so that it does not cut a graph."""

    def __init__(self, hook: Callable[[torch.nn.Module], None]):
        super().__init__(hook)
        self.cuts_graphs = False


class Nothing:
    """Does nothing. Pickles of models name this class."""

    def __call__(self, *_: Any) -> None:
        pass
