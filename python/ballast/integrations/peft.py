"""PEFT's adapters of a model that ranks share."""

from __future__ import annotations

import os
from typing import Any

import peft
import torch

from ballast.checkpoint.unit_by_unit import visit_units
from ballast.checks import refuse


def save_adapters(model: Any, directory: str | os.PathLike[str], **options: Any) -> None:
    """Write the adapters as `model.save_pretrained(directory, **options)` does, and gather no other parameters.

    All ranks call this together, between steps. The first rank writes. It holds all adapters in full, with modules_to_save,
    and never more than one unit of the rest of the model.
    """
    if not isinstance(model, peft.PeftModel):
        refuse(f"cannot save adapters of a {type(model).__name__}", needed="a model of peft.get_peft_model()")
    names = options.get("selected_adapters") or list(model.peft_config)
    everything = model.state_dict(keep_vars=True)  # without values, which are gathered next
    wanted = {
        id(tensor)
        for name in names
        for tensor in peft.get_peft_model_state_dict(model, state_dict=everything, adapter_name=name).values()
    }
    adapters = {name: tensor for name, tensor in everything.items() if id(tensor) in wanted}
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, tensor: torch.Tensor) -> None:
        found[name] = tensor.detach().to("cpu", copy=True)

    visit_units(adapters, keep, "saving adapters", on_all=False)
    if found:
        model.save_pretrained(os.fspath(directory), state_dict=found, **options)
