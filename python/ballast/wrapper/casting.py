"""Refuse to cast or move a model after training has begun: the optimizer keeps its values in the format that they
had."""

from __future__ import annotations

from typing import NoReturn

import torch

from ballast import _core
from ballast.checks import fail
from ballast.wrapper.gpu import GPU

CASTS = {"to", "type", "half", "bfloat16", "float", "double", "cpu", GPU}  # methods of tensors


def refuse_cast(what: str, name: str, *, code: str = "unsupported", to_look: str = "", available: str = "") -> NoReturn:
    """Raise the error. `to_look` says how to get a copy in another format."""
    needed = "a model that is cast and moved before ballast.wrap(), or before its first step"
    problem = _core.Problem(
        what=what,
        where=f"parameter {name}",
        needed=f"{needed}; to look at a copy: {to_look}" if to_look else needed,
        available=available,
        remedy="To cast a model that was trained: optimizer.close(), cast the model, and wrap a new optimizer.",
    )
    fail(code, problem)


def require_no_cast(use: str, name: str, *, why: str) -> None:
    """Refuse the function `use` of a parameter whose values are elsewhere, if it is a cast or a move."""
    if use in CASTS:
        what = f"cannot cast or move a parameter with {use}(): {why}"
        refuse_cast(what, name, code="out_of_order", to_look="with ballast.gather(model): ...")


def require_same_kind(name: str, *, kept: torch.Tensor, found: torch.Tensor) -> None:
    """Refuse a parameter that cannot be copied back."""
    if (kept.dtype, kept.device) != (found.dtype, found.device):
        what = f"cannot continue: the model was cast or moved from {kept.dtype} on {kept.device} after training began"
        refuse_cast(what, name, available=f"{found.dtype} on {found.device}")
    if kept.shape != found.shape:
        problem = _core.Problem(
            what="cannot continue: a parameter changed its shape after training began",
            where=f"parameter {name}",
            needed=f"shape {tuple(kept.shape)}, or a new parameter in the model and in param_groups",
            available=f"shape {tuple(found.shape)}",
        )
        fail("unsupported", problem)
