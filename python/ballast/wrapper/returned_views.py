"""Views of its own parameters that a module returns: its caller may use them when other values are in their memory."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from ballast._torch_compat import compiler_of_calls
from ballast.wrapper.hooks import ModuleHook


class EndOfCall(ModuleHook):
    """The hook at the end of a module's call. Where the module returns views of parameters, it returns views of copies."""

    def __init__(self, hook: Callable[[torch.nn.Module], None], members: Container[int]):
        """`members` has the ids of the parameters."""
        super().__init__(hook)
        self._members = members

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> Any:
        super().__call__(module)
        if is_dynamo_compiling() or compiler_of_calls() is not None:
            return None
        output = arguments[-1]
        if type(output) is torch.Tensor:
            return self._apart(output) if self._is_view(output) else None
        if type(output) in (tuple, list) and any(map(self._is_view, output)):
            return type(output)(self._apart(each) if self._is_view(each) else each for each in output)
        return None

    def _is_view(self, value: Any) -> bool:
        return type(value) is torch.Tensor and value._base is not None and id(value._base) in self._members

    def _apart(self, view: torch.Tensor) -> torch.Tensor:
        """Return the same view of a copy: a copy of the view may be larger than the parameter."""
        base: Any = view._base
        return base.clone().as_strided(view.size(), view.stride(), view.storage_offset() - base.storage_offset())
