"""Turn a module, a configuration or shapes into units of tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ballast.checks import refuse
from ballast.models.config import from_config
from ballast.models.description import Description, from_shapes
from ballast.models.known import KNOWN, is_config, known_name, read_model

# A torch.nn.Module, a Hugging Face configuration, the name of a known model, shapes, or the path of a JSON file.
ModelLike = str | Mapping[str, Any] | Sequence[Sequence[int]] | Any


def describe(model: ModelLike, *, dtype: str | None = None) -> Description:
    """Describe a model as units. `dtype` replaces the model's own format, which is bf16 if it names none.

    >>> describe({"h.0.weight": (4, 4), "h.1.weight": (4, 4), "norm.weight": (4,)}).unit_names
    ['h.0', 'h.1', 'norm']
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from ballast.models.modules import from_module
        from ballast.models.transformers import from_model, is_of_transformers

        return (from_model if is_of_transformers(model) else from_module)(model, dtype=dtype)
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if hasattr(model, "to_dict"):  # a configuration object of transformers
        model = model.to_dict()
    if isinstance(model, str):
        model = known_name(model)
        return _from_mapping(KNOWN[model] if model in KNOWN else read_model(model), name=model, dtype=dtype)
    if isinstance(model, Mapping):
        return _from_mapping(model, name=str(model.get("_name_or_path") or "model"), dtype=dtype)
    if isinstance(model, Sequence):
        return from_shapes({f"{i}.weight": shape for i, shape in enumerate(model)}, dtype=dtype)
    refuse(
        f"cannot plan for a {type(model).__name__}: it is no model",
        needed="a torch.nn.Module, a configuration (dict, path of its JSON file, known name), or shapes by name",
    )


def _from_mapping(model: Mapping[str, Any], *, name: str, dtype: str | None) -> Description:
    if is_config(model):
        return from_config(model, name=name, dtype=dtype)
    return replace(from_shapes(model, dtype=dtype), name=name)
