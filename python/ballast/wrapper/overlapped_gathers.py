"""Below stage 3, with `overlap_gathers=True`: step() returns while parameters are gathered, and modules wait for theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ballast import _core
from ballast.checks import refuse_order
from ballast.wrapper.gpu import require_stream
from ballast.wrapper.hooks import ModuleHook
from ballast.wrapper.units import UnitOfMembers


class OverlappedGathers:
    """Waits for a module's own parameters before each call. Those that the first step used outside such calls are waited for
    when the model is called. If a later step uses others so, it is refused."""

    def __init__(
        self, model: torch.nn.Module, options: _core.TrainingOptions, core: _core.Training, units: Sequence[UnitOfMembers]
    ):
        self._core = core
        self._gpu, self._stream = options.gpu, options.stream
        self._units = range(len(units))
        self._unit_of = {id(member.parameter): member.unit for unit in units for member in unit.members}
        self._under_way: set[int] = set()  # units
        self._used: set[int] = set()  # ids of parameters whose modules were called since the last step
        self._with_model: set[int] = set()  # units with parameters that are used outside of their modules' calls
        self._is_first_step = True
        self._hooks = [hook for module in model.modules() for hook in self._watch(module, is_model=module is model)]

    def begin(self) -> None:
        """Note that a step has returned."""
        self._under_way = set(self._units)
        self._used, self._is_first_step = set(), False

    def finish(self) -> None:
        """Wait for all parameters."""
        if self._under_way:
            self._core.finish()
            self._under_way = set()

    def require_used_in_call(self, parameter: torch.nn.Parameter, name: str) -> None:
        """Refuse a gradient of a parameter that may have been used before it was gathered."""
        if id(parameter) in self._used or self._unit_of[id(parameter)] in self._with_model:
            return
        if not self._is_first_step:
            refuse_order(
                "cannot train a parameter: it was used outside the calls of its module, perhaps before it was gathered",
                where=f"parameter {name}",
                needed="a call of the module that has it, in each step; or overlap_gathers=False",
            )
        self._with_model.add(self._unit_of[id(parameter)])

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _watch(self, module: torch.nn.Module, *, is_model: bool) -> list[Any]:
        own = {id(each) for each in module.parameters(recurse=False)} & self._unit_of.keys()
        if not own and not is_model:
            return []
        units = sorted({self._unit_of[each] for each in own})
        return [
            module.register_forward_pre_hook(ModuleHook(self._before_call(own, units, is_model))),
            module.register_state_dict_pre_hook(self._before_state_dict),
        ]

    def _before_call(self, own: set[int], units: list[int], is_model: bool) -> Callable[[torch.nn.Module], None]:
        def wait(_: torch.nn.Module) -> None:
            self._used |= own
            if self._under_way:
                self._wait_for(units)
                if is_model:
                    self._wait_for(self._with_model)

        return wait

    def _wait_for(self, units: Iterable[int]) -> None:
        for unit in self._under_way.intersection(units):
            require_stream(self._gpu, self._stream)
            self._core.wait_for_parameters(unit)
            self._under_way.remove(unit)

    def _before_state_dict(self, *_: Any) -> None:
        self.finish()
