"""Objects through which torch and Python call a session. They do not keep it alive."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from ballast import _core
from ballast._torch_compat import compiler_of_calls, gradient_hooks_of
from ballast.checks import fail
from ballast.connecting import Group
from ballast.leaving import begin_exit


class Trainer(Protocol):
    """The session that trains a parameter, as hooks see it."""

    @property
    def group(self) -> Group: ...
    @property
    def stage(self) -> int | None: ...
    def arrived(self, parameter: torch.nn.Parameter) -> None: ...
    def before_forward(self, module: torch.nn.Module) -> None: ...
    def before_compiled_forward(self, module: torch.nn.Module) -> None: ...
    def before_module(self, module: torch.nn.Module) -> None: ...
    def partition_now(self) -> object: ...
    def gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]: ...
    def close(self, *, together: bool) -> None: ...


SessionReference = weakref.ref[Trainer]


class OnGradient:
    """Tells the session that a gradient has come. trainer_of() finds the session of a parameter through it."""

    def __init__(self, session: SessionReference):
        self.session = session

    def __call__(self, parameter: torch.nn.Parameter) -> None:
        live = self.session()
        if live is not None:
            live.arrived(parameter)


def trainer_of(parameter: torch.Tensor) -> Trainer | None:
    """Return the session that trains the parameter, if there is one."""
    hooks = gradient_hooks_of(parameter)
    return next((hook.session() for hook in hooks.values() if isinstance(hook, OnGradient)), None)


def late_hook_of(parameter: torch.Tensor) -> str:
    """Name a hook that is called after the parameter's gradient was taken; empty if there is none."""
    hooks = [*gradient_hooks_of(parameter).values()]
    number = next((number for number, hook in enumerate(hooks) if isinstance(hook, OnGradient)), len(hooks))
    late = hooks[number + 1 :]
    return getattr(late[0], "__qualname__", type(late[0]).__qualname__) if late else ""


def refuse_late_hook(what: str, name: str) -> NoReturn:
    needed = "a register_hook(), which gets the gradient itself, or the same hook registered before ballast.wrap()"
    fail("unsupported", _core.Problem(what=what, where=f"parameter {name}", needed=needed))


class ModuleHook:
    """A hook that stays with its module: in a copy or a pickle of the module it does nothing. torch.compile() does not
    compile it. The function that ensures this takes longer than most hooks, so it is called where something compiles only.
    There it calls `in_compiled`, if there is one, instead of the hook. The call cuts a graph, unless `cuts_graphs` is cleared:
    then the hook does nothing there."""

    def __init__(
        self, hook: Callable[[torch.nn.Module], None], in_compiled: Callable[[torch.nn.Module], None] | None = None
    ):
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


def at_exit(session: SessionReference) -> Callable[[], None]:
    """Close the session at exit, while Python is still complete: destructors that use torch later fail."""
    return atexit.register(partial(_close_alone, session))


def _close_alone(session: SessionReference) -> None:
    live = session()
    if live is not None:
        begin_exit()
        live.close(together=False)
