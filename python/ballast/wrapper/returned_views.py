"""Views of its own parameters that a module returns: its caller may use them when other values are in their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ballast._torch_compat import compiler_of_calls, tree_flatten, tree_unflatten
from ballast.wrapper.hooks import ModuleHook
from ballast.wrapper.unit_gather import UnitGather


class EndOfCall(ModuleHook):
    """The hook at the end of a module's call. In the place of views of gathered memory, the module returns views of copies."""

    def __init__(self, hook: Callable[[torch.nn.Module], None], gather: UnitGather):
        super().__init__(hook)
        self._gather = gather

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> Any:
        compiles = is_dynamo_compiling() or compiler_of_calls() is not None
        output = None if compiles or not arguments else self._apart(arguments[-1])
        super().__call__(module)
        return output

    def _apart(self, output: Any) -> Any:
        """Return the output without views of gathered memory; None if it has none."""
        if isinstance(output, torch.Tensor):
            return self._gather.copy_of_view(output)
        if not isinstance(output, (tuple, list, dict)):
            return None
        values, structure = tree_flatten(output)
        copies = [self._gather.copy_of_view(each) if isinstance(each, torch.Tensor) else None for each in values]
        if all(each is None for each in copies):
            return None
        return tree_unflatten([value if copy is None else copy for value, copy in zip(values, copies)], structure)
