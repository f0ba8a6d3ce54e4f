"""PEFT's adapters of a model that ranks share."""

from __future__ import annotations

import os
from typing import Any

import peft
import torch
from torch.overrides import TorchFunctionMode

from ballast._torch_compat import without_torch_function
from ballast.checkpoint.full_model import visit_units
from ballast.checks import refuse


class NamesOnly(TorchFunctionMode):
    """Lets PEFT call state_dict() of modules without the values of their parameters: it looks for the names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            with without_torch_function():
                return func(*args)
        return func(*args, **(kwargs or {}))


def save_adapters(model: Any, directory: str | os.PathLike[str], **options: Any) -> None:
    """Write the adapters as `model.save_pretrained(directory, **options)` does, and gather no other parameters.

    All ranks call this together, between steps. The first rank writes. It holds all adapters in full, with modules_to_save,
    and never more than one unit of the rest of the model.
    """
    if not isinstance(model, peft.PeftModel):
        refuse(f"cannot save adapters of a {type(model).__name__}", needed="a model of peft.get_peft_model()")
    adapters, found = parameters_of(model, options.get("selected_adapters") or list(model.peft_config)), {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        found[name] = tensor.detach().to("cpu", copy=True)

    visit_units(adapters, keep, "saving adapters", on_all=False)
    if found:
        with NamesOnly():
            model.save_pretrained(os.fspath(directory), state_dict=found, **options)


def parameters_of(model: Any, adapters: list[str]) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers that PEFT saves for these adapters, by name."""
    everything = model.state_dict(keep_vars=True)
    with NamesOnly():
        wanted = {
            id(tensor)
            for adapter in adapters
            for tensor in peft.get_peft_model_state_dict(model, state_dict=everything, adapter_name=adapter).values()
        }
    return {name: tensor for name, tensor in everything.items() if id(tensor) in wanted}
