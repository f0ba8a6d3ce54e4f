"""The options of several optimizers that are wrapped in one call."""

from __future__ import annotations

from ballast.checks import refuse
from ballast.wrapper.options import WrapOptions

ONE_BY_ONE = "Or wrap them one after the other, each with options of its own."


def for_several(options: WrapOptions) -> WrapOptions:
    """Return the options for all of them, and refuse those that have another meaning for several optimizers than for one."""
    if options.stage is None:
        refuse('stage="auto" chooses for one optimizer alone', needed="a stage for all of them")
    if options.memory is not None:
        refuse("memory= limits what is kept for one optimizer", needed="no limit for a list of them", remedy=ONE_BY_ONE)
    if options.max_grad_norm is not None:
        refuse(
            "max_grad_norm= clips the gradients of one optimizer",
            needed="torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which clips those of all",
            remedy=ONE_BY_ONE,
        )
    if options.outer is not None:
        refuse("outer= exchanges the parameters of one optimizer", needed="one optimizer for all of a model's parameters")
    return options
