"""What torch and Python call of a session, without keeping it alive."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from ballast._torch_compat import gradient_hooks_of
from ballast.connecting import Group
from ballast.leaving import begin_exit


class Trainer(Protocol):
    """What hooks call, and what is found by them: the session that trains a parameter."""

    @property
    def group(self) -> Group: ...
    @property
    def stage(self) -> int | None: ...
    def arrived(self, parameter: torch.nn.Parameter) -> None: ...
    def before_forward(self, module: torch.nn.Module) -> None: ...
    def before_module(self, module: torch.nn.Module) -> None: ...
    def gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]: ...
    def close(self, *, together: bool) -> None: ...


Known = weakref.ref[Trainer]


class OnGradient:
    """Of a parameter: its session's, by which it is found too."""

    def __init__(self, session: Known):
        self.session = session

    def __call__(self, parameter: torch.nn.Parameter) -> None:
        live = self.session()
        if live is not None:
            live.arrived(parameter)


def trainer_of(parameter: torch.Tensor) -> Trainer | None:
    """That trains it, if one does."""
    hooks = gradient_hooks_of(parameter)
    return next((hook.session() for hook in hooks.values() if isinstance(hook, OnGradient)), None)


class OfOneModule:
    """A hook that copies of the module have not, nor what is pickled of it: theirs does nothing. torch.compile() leaves it
    as it is."""

    def __init__(self, hook: Callable[[torch.nn.Module], None]):
        self._hook = torch.compiler.disable(hook)

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        self._hook(module)

    def __reduce__(self) -> tuple[type[Nothing], tuple[()]]:
        return Nothing, ()


class Nothing:
    """That is done."""

    def __call__(self, *_: Any) -> None:
        pass


def at_exit(session: Known) -> Callable[[], None]:
    """What is called while Python is still whole: torch fails where it is used by destructors after that."""
    return atexit.register(partial(_close_alone, session))


def _close_alone(session: Known) -> None:
    live = session()
    if live is not None:
        begin_exit()
        live.close(together=False)
