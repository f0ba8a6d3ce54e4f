"""Conditions for several optimizers of one model: each parameter has one, and all of them keep parameters in the same way."""

from __future__ import annotations

import gc
from collections.abc import Collection

import torch

from ballast.checks import refuse
from ballast.errors import UsageError
from ballast.torch.calls.hooks import Trainer, trainer_of
from ballast.torch.tensor_names import named_parameters
from ballast.torch.training.model_and_optimizer import Sibling, Wrapped
from ballast.wrap_options import WrapOptions


def require_shareable(wrapped: Wrapped, session: Trainer) -> None:
    """Refuse to wrap an optimizer with parameters that another one has, or with another optimizer of the model that it cannot
    train with."""
    what = "cannot wrap the optimizer"

    def require() -> None:
        for sibling in wrapped.siblings():
            _require_same_kind(what, wrapped.options, sibling.options)
            _require_joint_runs(what, wrapped, sibling)
        require_own(what, wrapped, session, [parameter for _, parameter in wrapped.parameters()])
        _require_no_other_model(what, wrapped, session)

    try:
        require()
        return
    except UsageError:
        gc.collect()  # a cycle of references may be all that keeps the other one
    require()


def require_own(what: str, wrapped: Wrapped, session: Trainer, mine: Collection[torch.nn.Parameter]) -> None:
    """Refuse parameters that another optimizer has, or keeps."""
    names = wrapped.names()
    of_siblings = {id(each) for sibling in wrapped.siblings() for _, each in sibling.parameters()}
    for parameter in mine:
        if id(parameter) in of_siblings or trainer_of(parameter) not in (None, session):
            refuse(
                f"{what}: another wrapped optimizer trains its parameters",
                where=f"parameter {names[id(parameter)]}",
                needed="one optimizer for each parameter",
                remedy="Call close() of the other one before.",
            )
    held = {number for sibling in wrapped.siblings() for number in sibling.sharded_ids}
    for parameter in mine:
        if id(parameter) in held:
            refuse(
                f"{what}: training has begun, and another optimizer of the model keeps shards of its parameters",
                where=f"parameter {names[id(parameter)]}",
                needed="all optimizers of a model before training begins, such as ballast.wrap([one, other], model, stage=3)",
                remedy="Or call ballast.save() and close() of the other one, and wrap() both.",
            )


def _require_same_kind(what: str, mine: WrapOptions, theirs: WrapOptions) -> None:
    """Refuse options with which two optimizers cannot train one model."""
    what = f"{what}: another wrapped optimizer trains its model"
    if None in (mine.stage, theirs.stage):
        refuse(f'{what}, and stage="auto" chooses for one alone', needed="the same stage for both")
    if (mine.stage == 3) != (theirs.stage == 3):
        refuse(
            f"{what} in stage {theirs.stage}, and not in stage {mine.stage}",
            needed="stage 3 for all optimizers of a model, or for none",
            remedy="Or call close() of the other one before.",
        )
    if mine.outer is not None or theirs.outer is not None:
        refuse(f"{what}, and outer= exchanges the parameters of one", needed="one optimizer for all of a model's parameters")
    if mine.activations is not None:
        refuse(f"{what}, and activations= is of the one that is wrapped first", needed="activations= there, or a list of both")


def _require_joint_runs(what: str, wrapped: Wrapped, sibling: Sibling) -> None:
    """Refuse runs that are not resumed together: those of optimizers that are not wrapped in one call."""
    if (wrapped.options.run.name or sibling.options.run.name) and wrapped.call is not sibling.call:
        refuse(
            f"{what}: another wrapped optimizer trains its model, and drives commit the steps of each on its own: after a "
            "failure, run= could resume between two of them",
            needed="all optimizers in one call, such as ballast.wrap([one, other], model, run=...)",
        )


def _require_no_other_model(what: str, wrapped: Wrapped, session: Trainer) -> None:
    """Refuse an optimizer that trains a part of this model, or a model that this one is a part of, if one of them is in stage
    3, which gathers whole models."""
    of_siblings = {id(each) for sibling in wrapped.siblings() for _, each in sibling.parameters()}
    model = wrapped.model
    for name, parameter in () if model is None else named_parameters(model):
        other = None if id(parameter) in of_siblings else trainer_of(parameter)
        if other not in (None, session) and 3 in (session.stage, other.stage):
            refuse(
                f"{what}: another wrapped optimizer trains its model, as a part of another one",
                where=f"parameter {name}",
                needed="the same model in each wrap()",
                remedy="Or call close() of the other one before.",
            )
