"""The hooks of a training: on gradients, on calls of the model and of its modules, and at exit. They do not keep it alive. One
thread at a time runs what they call: a call of a training is several calls of the library, which all ranks make in one order.

Parameters are partitioned before a call of the model, because autograd saves some of them for backward during the call.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from ballast._torch_compat import active_data_parallel, compiler_of_calls, gradient_hooks_of
from ballast.checks import refuse_order, refuse_unsupported
from ballast.ranks import Group, begin_exit
from ballast.torch.process_groups import ProcessGroups

# --- One thread at a time ---


class OneThread:
    """Lets one thread at a time make calls. The thread may make others inside of its call."""

    def __init__(self) -> None:
        lock = threading.RLock()
        self.try_begin = partial(lock.acquire, False)  # begins a call that comes with each gradient, and is not named
        self.end = lock.release
        self.running: Call | None = None


class Call:
    """A block in which a thread makes a call. Generators of contextlib take longer than what a call of a small model does."""

    def __init__(self, calls: OneThread, what: str):
        self._calls, self._what = calls, what

    def __enter__(self) -> None:
        if not self._calls.try_begin():
            refuse_other_thread(self._what, self._calls.running)
        self._thread = threading.current_thread()
        self._outer, self._calls.running = self._calls.running, self

    def __exit__(self, *_: object) -> None:
        self._calls.running = self._outer
        self._calls.end()

    def __str__(self) -> str:
        return f"thread {self._thread.name}, in {self._what}"


def refuse_other_thread(what: str, running: Call | None = None) -> NoReturn:
    refuse_order(
        f"cannot make a call of {what}: another thread is in a call of the optimizer or the model",
        where="" if running is None else str(running),
        needed="calls of one thread at a time",
        remedy="Make all calls of an optimizer and its model from one thread, or hold a lock around them.",
    )


# --- Gradients ---


class CallReceiver(Protocol):
    """The training of an optimizer, as hooks see it."""

    @property
    def group(self) -> Group: ...
    @property
    def ranks(self) -> ProcessGroups: ...
    @property
    def stage(self) -> int | None: ...
    def arrived(self, parameter: torch.nn.Parameter) -> None: ...
    def before_forward(self, module: torch.nn.Module) -> None: ...
    def on_module_call(self, module: torch.nn.Module) -> None: ...
    def partition_now(self) -> object: ...
    def gathered(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[None]: ...
    def has_room(self, needed: int) -> bool: ...
    def close(self, *, together: bool) -> None: ...


class OnGradient:
    """Tells the training that a gradient has come. receiver_of() finds the training of a parameter through it."""

    def __init__(self, training: weakref.ref[CallReceiver]):
        self.training = training

    def __call__(self, parameter: torch.nn.Parameter) -> None:
        live = self.training()
        if live is not None:
            live.arrived(parameter)


def receiver_of(parameter: torch.Tensor) -> CallReceiver | None:
    hooks = gradient_hooks_of(parameter)
    return next((hook.training() for hook in hooks.values() if isinstance(hook, OnGradient)), None)


def late_hook_of(parameter: torch.Tensor) -> str:
    """Name a hook that is called after the parameter's gradient was taken; empty if there is none."""
    hooks = [*gradient_hooks_of(parameter).values()]
    number = next((number for number, hook in enumerate(hooks) if isinstance(hook, OnGradient)), len(hooks))
    late = hooks[number + 1 :]
    return getattr(late[0], "__qualname__", type(late[0]).__qualname__) if late else ""


def refuse_late_hook(what: str, name: str) -> NoReturn:
    needed = "a register_hook(), which gets the gradient itself, or the same hook registered before ballast.wrap()"
    refuse_unsupported(what, where=f"parameter {name}", needed=needed)


# --- Hooks of modules ---


class Nothing:
    """What pickles of models have in the place of hooks: it does nothing when a module is called."""

    def __call__(self, *_: Any) -> None:
        pass


class ModuleHook:
    """A hook that stays with its module: in a copy or a pickle of the module it does nothing. torch.compile() does not
    compile it. The function that ensures this takes longer than most hooks, so it is called where something compiles only.
    There the call cuts a graph, unless `cuts_graphs` is cleared: then the hook does nothing there."""

    def __init__(self, hook: Callable[[torch.nn.Module], None], *, cuts_graphs: bool = True):
        self._hook = hook
        self._uncompiled = torch.compiler.disable(hook)
        self.cuts_graphs = cuts_graphs

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if is_dynamo_compiling() or compiler_of_calls() is not None:
            if self.cuts_graphs:
                self._uncompiled(module)
        else:
            self._hook(module)

    def __reduce__(self) -> tuple[type[Nothing], tuple[()]]:
        return Nothing, ()


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
        self.found: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # those around the model that were called
        self._hook = model.register_forward_pre_hook(DataParallelHook(self._before_forward))

    def _before_forward(self, model: torch.nn.Module) -> None:
        for around in (model, active_data_parallel()):
            if isinstance(around, DistributedDataParallel) and model in (around, around.module):
                around.require_backward_grad_sync = False
                self.found.add(around)

    def remove(self) -> None:
        self._hook.remove()
        for around in self.found:
            around.require_backward_grad_sync = True
        self.found.clear()


class TrainingHooks:
    """Registers the hook at exit at once, and the others when they are needed. remove() removes all of them."""

    def __init__(self, training: weakref.ref[CallReceiver]):
        self._training = training
        self._tell = OnGradient(training)
        self.on_gradients: dict[int, Any] = {}  # hooks by id of the parameter
        self._on_model: ModuleHook | None = None  # the hook on the model; None while calls are not watched
        self._unsynced: UnsyncedDataParallel | None = None
        self._model_hooks: list[Any] = []
        self._module_hooks: list[Any] = []
        # atexit runs while Python is still complete: destructors that use torch fail later.
        self._at_exit = atexit.register(partial(_close_alone, training))

    # --- Gradients ---

    def watch(self, parameter: torch.nn.Parameter) -> None:
        """Hook a parameter, so that it reports when its gradient has come."""
        self.on_gradients[id(parameter)] = parameter.register_post_accumulate_grad_hook(self._tell)

    # --- Calls ---

    def watch_calls(self, model: torch.nn.Module | None, *, with_modules: bool) -> None:
        """Hook calls of the model, and in stage 3 of its modules with parameters of their own, until these are partitioned: a
        user may call methods of the model instead of the model."""
        self._on_model = ModuleHook(self._before_forward)
        if model is not None:
            self._unsynced = UnsyncedDataParallel(model)
            self._model_hooks = [self._unsynced, model.register_forward_pre_hook(self._on_model)]
            if with_modules:
                self.watch_modules(model)

    def watch_modules(self, model: torch.nn.Module) -> None:
        hook = ModuleHook(self.on_module_call)
        self._module_hooks = [
            module.register_forward_pre_hook(hook)
            for module in model.modules()
            if module is not model and any(True for _ in module.parameters(recurse=False))
        ]

    def _before_forward(self, model: torch.nn.Module) -> None:
        live = self._training()
        if live is not None:
            live.before_forward(model)

    def on_module_call(self, module: torch.nn.Module) -> None:
        """Tell the training that a module inside the model is called, as long as calls are watched."""
        live = self._training()
        if live is not None and self._on_model is not None:
            live.on_module_call(module)

    @property
    def has_data_parallel(self) -> bool:
        """Whether DistributedDataParallel around the model was kept from reducing gradients."""
        return self._unsynced is not None and len(self._unsynced.found) > 0

    def leave_graphs_whole(self) -> None:
        """Do nothing in calls of a compiled model, from now on: torch has its parameters, and the first gradient begins a
        step."""
        if self._on_model is not None:
            self._on_model.cuts_graphs = False

    def remove_from_modules(self) -> None:
        """Remove the hooks of the modules, and keep those of the model."""
        while self._module_hooks:
            self._module_hooks.pop().remove()

    def remove(self) -> None:
        atexit.unregister(self._at_exit)
        while self.on_gradients:
            self.on_gradients.popitem()[1].remove()
        self.remove_from_modules()
        while self._model_hooks:
            self._model_hooks.pop().remove()
        self._on_model = self._unsynced = None


def _close_alone(training: weakref.ref[CallReceiver]) -> None:
    live = training()
    if live is not None:
        begin_exit()
        live.close(together=False)
