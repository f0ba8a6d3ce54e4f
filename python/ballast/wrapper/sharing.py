"""Conditions for several optimizers of one model: each parameter has one, and all of them keep parameters in the same way."""

from __future__ import annotations

import gc
from collections.abc import Collection

import torch

from ballast.checks import refuse
from ballast.errors import UsageError
from ballast.wrapper.hooks import Trainer, trainer_of
from ballast.wrapper.unwrap import named_parameters
from ballast.wrapper.wrapped import Wrapped


def require_shareable(wrapped: Wrapped, session: Trainer, mine: Collection[torch.nn.Parameter]) -> None:
    """Refuse parameters that another optimizer has, and another optimizer of the model that this one cannot train with. `mine`
    are the parameters that become those of the session."""
    try:
        _require(wrapped, session, mine)
    except UsageError:
        gc.collect()  # a cycle of references may be all that keeps the other one
        _require(wrapped, session, mine)


def _require(wrapped: Wrapped, session: Trainer, mine: Collection[torch.nn.Parameter]) -> None:
    names = wrapped.names()
    _require_stages(wrapped, session.stage)
    of_siblings = {id(each) for sibling in wrapped.siblings() for _, each in sibling.parameters()}
    for parameter in mine:
        if id(parameter) in of_siblings or trainer_of(parameter) not in (None, session):
            refuse(
                "cannot wrap the optimizer: another wrapped optimizer trains its parameters",
                where=f"parameter {names[id(parameter)]}",
                needed="one optimizer for each parameter",
                remedy="Call close() of the other one before.",
            )
    held = {number for sibling in wrapped.siblings() for number in sibling.holds}
    for parameter in mine:
        if id(parameter) in held:
            refuse(
                "cannot wrap the optimizer: training has begun, and another one of the model keeps shards of its parameters",
                where=f"parameter {names[id(parameter)]}",
                needed="all optimizers of a model before training begins, such as ballast.wrap([one, other], model, stage=3)",
                remedy="Or call ballast.save() and close() of the other one, and wrap() both.",
            )
    if session.stage == 3:
        _require_no_other_model(wrapped, session, of_siblings)


def _require_stages(wrapped: Wrapped, stage: int | None) -> None:
    """Refuse optimizers of one model of which one shards parameters, and another one does not."""
    for sibling in wrapped.siblings():
        if None in (stage, sibling.options.stage):
            refuse(
                'cannot wrap the optimizer: another wrapped optimizer trains its model, and stage="auto" chooses for one alone',
                needed="the same stage for both",
            )
        if (stage == 3) != (sibling.options.stage == 3):
            refuse(
                f"cannot wrap the optimizer in stage {stage}: another wrapped optimizer trains its model in stage "
                f"{sibling.options.stage}",
                needed="stage 3 for all optimizers of a model, or for none",
                remedy="Or call close() of the other one before.",
            )
        if wrapped.options.outer is not None or sibling.options.outer is not None:
            refuse(
                "cannot wrap the optimizer: outer= exchanges the parameters of one optimizer, and the model has another one",
                needed="one optimizer for all of a model's parameters",
            )


def _require_no_other_model(wrapped: Wrapped, session: Trainer, of_siblings: Collection[int]) -> None:
    """Refuse an optimizer that trains a part of this model, or a model that this one is a part of: stage 3 gathers whole
    models."""
    for name, parameter in named_parameters(wrapped.required_model):
        if id(parameter) not in of_siblings and trainer_of(parameter) not in (None, session):
            refuse(
                "cannot wrap the optimizer: another wrapped optimizer trains its model, as a part of another one",
                where=f"parameter {name}",
                needed="the same model in each wrap()",
                remedy="Or call close() of the other one before.",
            )
