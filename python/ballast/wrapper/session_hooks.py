"""All hooks of a session: on gradients, before calls of the model, and at exit."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ballast.wrapper.forward_hooks import ForwardHooks
from ballast.wrapper.hooks import OnGradient, SessionReference, at_exit
from ballast.wrapper.units import require_known


class SessionHooks:
    """Registers the hook at exit at once, and the others when they are needed. remove() removes all of them."""

    def __init__(self, session: SessionReference):
        self._session = session
        self._tell = OnGradient(session)
        self._on_gradient: dict[int, Any] = {}  # by id of the parameter
        self._calls: ForwardHooks | None = None
        self._at_exit = at_exit(session)

    def watch(self, parameters: Iterable[torch.nn.Parameter], read_names: Callable[[], Mapping[int, str]]) -> None:
        """Hook these parameters, so that each reports when its gradient has come."""
        names: Mapping[int, str] = {}
        for parameter in parameters:
            if id(parameter) not in self._on_gradient:
                names = names or read_names()  # most calls find nothing new
                require_known(parameter, names[id(parameter)])
                self._on_gradient[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._tell)

    def watch_calls(self, model: torch.nn.Module | None, *, of_modules: bool) -> None:
        """Hook calls of the model, or of its modules too."""
        self._calls = ForwardHooks(model, self._session)
        if model is not None and of_modules:
            self._calls.watch_modules(model)

    def watch_modules(self, model: torch.nn.Module) -> None:
        """Hook the modules inside the model again."""
        if self._calls is not None:
            self._calls.watch_modules(model)

    @property
    def has_data_parallel(self) -> bool:
        """Whether DistributedDataParallel around the model was kept from reducing gradients."""
        return self._calls is not None and self._calls.has_data_parallel

    def leave_graphs_whole(self) -> None:
        """Do nothing in calls of a compiled model, from now on."""
        if self._calls is not None:
            self._calls.leave_graphs_whole()

    def remove_from_modules(self) -> None:
        """Remove the hooks of modules inside the model."""
        if self._calls is not None:
            self._calls.remove_from_modules()

    def before_module(self, module: torch.nn.Module) -> None:
        """Tell the session that a module inside the model is called."""
        if self._calls is not None:
            self._calls.before_module(module)

    def remove(self) -> None:
        atexit.unregister(self._at_exit)
        while self._on_gradient:
            self._on_gradient.popitem()[1].remove()
        if self._calls is not None:
            self._calls.remove()
            self._calls = None
