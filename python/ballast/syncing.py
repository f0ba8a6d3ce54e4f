"""Hand the weights of a model that is trained to another program, such as an inference engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def sync_weights(
    model: torch.nn.Module, callback: Callable[[str, torch.Tensor], object], *, only_first_rank: bool = False
) -> None:
    """Call `callback(name, tensor)` with each parameter and buffer of the model in full, one unit at a time.

    >>> import torch
    >>> sync_weights(torch.nn.Linear(4, 2), lambda name, tensor: print(name, tuple(tensor.shape)))
    weight (2, 4)
    bias (2,)

    All ranks call this together, between steps, and `callback` runs on all of them, or on the first one. The names are those
    of `model.state_dict()`, with the first name of a tensor that several modules share. A tensor is valid until `callback`
    returns: it may be copied or sent, and must not be written to. In stage 3 no rank holds more than one unit in full. An
    error of `callback` on one rank is raised on all.
    """
    from ballast.checkpoint.unit_by_unit import tensors_of, visit_units

    visit_units(tensors_of(model), callback, "handing over weights", on_all=not only_first_rank)
