"""Below stage 3, if gathers overlap: step() returns while parameters are gathered, and each use waits for them."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsIndex

import torch

from ballast import _core
from ballast._torch_compat import call_before_compiling, has_compiled, has_scripted, tree_leaves, without_torch_function
from ballast.checks import refuse_order
from ballast.torch.calls.hooks import ModuleHook
from ballast.torch.gpu import current_stream, is_capturing
from ballast.torch.parameters.managed_parameter import needs_no_values
from ballast.torch.parameters.units import ParameterUnit, repeated_blocks

log = logging.getLogger("ballast")


class AwaitedParameter(torch.nn.Parameter):
    """A change of its class makes a parameter one, and an ordinary one again."""

    ballast_wait: Callable[[], None]  # returns when this is an ordinary parameter again

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.ballast_wait()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        self.ballast_wait()
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if needs_no_values(func):
            with without_torch_function():
                return func(*args, **options)
        for each in tree_leaves((args, options)):
            if type(each) is AwaitedParameter:
                each.ballast_wait()
        return func(*args, **options)


class OverlappedGathers:
    """Lets uses of parameters wait when a step returns: those of a unit are awaited until the first use of one.

    Functions that torch does not dispatch, such as those of C++ extensions, cannot wait. So a module waits for its own
    parameters before it runs, and a block of a list of blocks for all that are inside of it. What torch compiles, scripts,
    traces or captures as a CUDA graph cannot wait either: from then on steps do.
    """

    def __init__(
        self, model: torch.nn.Module, options: _core.TrainingOptions, core: _core.Training, units: Sequence[ParameterUnit]
    ):
        self._core = core
        self._model = weakref.ref(model)
        self._gpu, self._stream = options.gpu, options.stream
        self._parameters = [[member.parameter for member in unit.trained] for unit in units]
        self._unit_of = {id(each): unit for unit, members in enumerate(self._parameters) for each in members}
        self._awaited: dict[int, list[type[torch.nn.Parameter]]] = {}  # classes of the parameters, by unit
        self._always_waits = has_compiled()
        overlapped = weakref.WeakMethod(self._stop)
        self._ignore_compiling = call_before_compiling(lambda: (stop := overlapped()) and stop("torch compiles code"))
        blocks = {*repeated_blocks(model)}
        self._hooks = [
            module.register_forward_pre_hook(ModuleHook(self._before_call(units_of_it), cuts_graphs=False), prepend=True)
            for module in model.modules()
            if (units_of_it := self._units_of(module, recurse=module in blocks))
        ]

    def begin(self) -> None:
        """Note that a step has returned."""
        self._always_waits = self._always_waits or has_scripted()
        if self._always_waits or self._model() is None:
            self._core.finish()
            self._make_all_ordinary()
            return
        for unit, parameters in enumerate(self._parameters):
            if unit not in self._awaited:
                self._awaited[unit] = [type(each) for each in parameters]
                for each in parameters:  # the next use of one waits for all, which are ordinary again after that
                    vars(each)["ballast_wait"] = partial(self.wait_for, unit)
                    each.__class__ = AwaitedParameter

    def finish(self) -> None:
        if self._awaited:
            self._core.finish()
            self._make_all_ordinary()

    def wait_for(self, unit: int) -> None:
        """Wait for the parameters of a unit, in the order of the training's stream. Work in another stream has no such order,
        so this waits for all of them there."""
        if unit not in self._awaited:
            return
        if current_stream(self._gpu) != self._stream:
            self.finish()
            return
        self._core.wait_for_parameters(unit)
        self._make_ordinary(unit)

    def _stop(self, why: str) -> None:
        """Wait for all parameters, and let later steps wait for theirs."""
        if not self._always_waits:
            self._always_waits = True
            log.info("%s, which cannot wait for parameters: from now on step() returns when they are complete", why)
        self.finish()

    def end(self) -> None:
        """Wait for all parameters, and remove the hooks. If the training has failed, raise its error after that."""
        self._ignore_compiling()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            self.finish()
        finally:
            self._make_all_ordinary()

    def _make_all_ordinary(self) -> None:
        for unit in [*self._awaited]:
            self._make_ordinary(unit)

    def _make_ordinary(self, unit: int) -> None:
        for parameter, kind in zip(self._parameters[unit], self._awaited.pop(unit)):
            parameter.__class__ = kind
            del vars(parameter)["ballast_wait"]

    def _units_of(self, module: torch.nn.Module, *, recurse: bool) -> list[int]:
        found = (self._unit_of.get(id(each)) for each in module.parameters(recurse))
        return sorted({unit for unit in found if unit is not None})

    def _before_call(self, units: list[int]) -> Callable[[torch.nn.Module], None]:
        def wait(_: torch.nn.Module) -> None:
            if is_capturing(self._gpu):
                self._begin_capture()
            if torch.jit.is_tracing():
                self._stop("torch.jit traces a module")
            if self._awaited:
                for unit in units:
                    self.wait_for(unit)

        return wait

    def _begin_capture(self) -> None:
        """Let later steps wait, because replays of the graph do not. A wait within a capture would end it."""
        if self._awaited:
            refuse_order(
                "cannot capture a CUDA graph: parameters of the last step may still be gathered",
                needed="`with ballast.gather(model):` around the capture; or tuning=ballast.Tuning(overlap_gathers=False)",
            )
        self._stop("a CUDA graph is captured")
