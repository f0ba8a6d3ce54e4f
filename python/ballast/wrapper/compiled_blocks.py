"""Blocks that torch has compiled, in stage 3: their parameters are gathered before the call of the compiled code, which has no
hooks then, and is one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ballast._torch_compat import call_around, compiled_modules
from ballast.wrapper.hooks import ModuleHook
from ballast.wrapper.units import Member

Begin = Callable[[torch.nn.Module], None]


class CompiledBlocks:
    """The compiled modules inside a model with parameters of one unit. Others keep their hooks, which cut graphs. `members` are
    those of one optimizer."""

    def __init__(self, model: torch.nn.Module, members: Mapping[int, Member]):
        self._blocks: dict[torch.nn.Module, tuple[torch.nn.Module, int]] = {}  # by the module that is called: inside, and unit
        for inside, called in compiled_modules(model):
            units = {members[id(each)].unit for each in inside.parameters() if id(each) in members}
            if inside is not model and called is not model and len(units) == 1:
                self._blocks[called] = (inside, units.pop())
        self._inside = {id(module) for inside, _ in self._blocks.values() for module in inside.modules()}
        self._handles: list[Callable[[], None]] = []

    def has(self, module: torch.nn.Module) -> bool:
        """Return whether the module is in a block, whose unit is gathered already when compiled code calls the module."""
        return id(module) in self._inside

    def watch(self, beginning_with: Callable[[int], Begin], end: Begin) -> None:
        """Let each block begin with its unit, outside of the compiled code."""
        for called, (inside, unit) in self._blocks.items():
            begin = beginning_with(unit)
            if called is inside:
                self._handles.append(call_around(called, begin, end))
            else:
                before = called.register_forward_pre_hook(ModuleHook(begin))
                after = called.register_forward_hook(ModuleHook(end), always_call=True)
                self._handles += [before.remove, after.remove]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop()()
