"""What torch and Python call of a session, without keeping it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ballast.wrapper.session import Session

Known = weakref.ref["Session"]


def on_gradient(session: Known) -> Callable[[torch.nn.Parameter], None]:
    def arrived(parameter: torch.nn.Parameter) -> None:
        live = session()
        if live is not None:
            live.arrived(parameter)

    return arrived


def on_forward(session: Known) -> Callable[..., None]:
    def called(*_: Any) -> None:
        live = session()
        if live is not None:
            live.before_forward()

    return called


def at_exit(session: Known) -> Callable[[], None]:
    """While Python is still whole: torch fails where it is used by destructors after that."""
    return partial(_close_alone, session)


def _close_alone(session: Known) -> None:
    live = session()
    if live is not None:
        live.close(together=False)
