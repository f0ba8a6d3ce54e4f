"""Count the parameters of a model as transformers builds it: its own class, on the meta device, without weights and
without the network."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ballast.checks import refuse
from ballast.models.description import Activations, Description

if TYPE_CHECKING:
    import torch

Config = Mapping[str, Any]

OTHER_INPUT = "Plan from the model itself (a torch.nn.Module, on the meta device if it is large), or from its shapes by name."
SIZES = ("hidden_size", "hidden_sizes", "embed_dim", "num_hidden_layers", "vocab_size")


def from_transformers(config: Config, *, name: str, dtype: str) -> Description:
    """Return the units of the class that the configuration names. Raises UsageError where transformers cannot build
    it."""
    _require_packages(config)
    from ballast.models.modules import from_module

    module = _built(config)
    described = from_module(module, dtype=dtype)
    return replace(described, name=name, activations=_activations(module))


def _require_packages(config: Config) -> None:
    try:
        for package in ("torch", "transformers"):
            importlib.import_module(package)
    except ImportError as problem:
        _refuse(
            config,
            "transformers and torch cannot be imported",
            where=str(problem),
            needed="transformers and torch, which build the model without its weights",
            remedy=f"pip install transformers torch. {OTHER_INPUT}",
        )


def _settings_of(config: Config) -> Any:
    """Read the configuration with transformers, and refuse it if it leaves out a size."""
    import transformers

    if config["model_type"] not in transformers.CONFIG_MAPPING:
        _refuse(config, f"transformers {transformers.__version__} does not know this model_type")
    with _refusing(config, "transformers cannot read its configuration"):
        given = copy.deepcopy(dict(config))
        settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(given, attn_implementation="eager")
    missing = _missing_size(config, settings)
    if missing:
        _refuse(config, f"{missing} is missing in its configuration")
    return settings


def _missing_size(config: Config, settings: Any) -> str | None:
    """Return a size that the configuration leaves out, which would silently be that of transformers' default model."""
    sizes = {settings.attribute_map.get(key, key) for key in SIZES} & {field.name for field in fields(settings)}
    if not sizes:
        parts = (part for part in settings.sub_configs if getattr(settings, part) is not None)
        return next((part for part in parts if part not in config), None)
    if any(config.get(part) for part in settings.sub_configs):
        return None
    own_names = {written: key for key, written in settings.attribute_map.items()}
    left_out = (size for size in sorted(sizes) if size not in config and own_names.get(size) not in config)
    return next((size for size in left_out if getattr(settings, size) == getattr(type(settings)(), size)), None)


def _class_of(config: Config, settings: Any) -> Any:
    import transformers

    architectures = config.get("architectures") or []
    if len(architectures) != 1:
        _refuse(
            config,
            f"its configuration names {len(architectures)} architectures",
            needed=f"the class to count in architectures: one of {', '.join(_classes_for(config['model_type']))}",
        )
    found: Any = getattr(transformers, architectures[0], None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        _refuse(config, f"transformers {transformers.__version__} has no model {architectures[0]}")
    wanted: Any = found.config_class
    if not isinstance(settings, wanted):
        _refuse(config, f"{architectures[0]} is a model of {wanted.model_type}")
    return found


def _classes_for(kind: str) -> list[str]:
    """Return the classes of this model_type that the automatic classes of transformers list."""
    from transformers.models.auto import modeling_auto

    tables = [table for name, table in vars(modeling_auto).items() if re.fullmatch("MODEL_.*_MAPPING_NAMES", name)]
    named = [table[kind] for table in tables if kind in table]
    return sorted({name for names in named for name in ([names] if isinstance(names, str) else names)})


def _built(config: Config) -> torch.nn.Module:
    import torch

    settings = _settings_of(config)
    architecture = _class_of(config, settings)
    with _refusing(config, f"transformers cannot build {architecture.__name__} from its configuration"):
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            module: torch.nn.Module = architecture(settings)
    return module


@contextmanager
def _refusing(config: Config, why: str) -> Iterator[None]:
    """Turn any error of transformers into a refusal: configurations fail there in many ways."""
    try:
        yield
    except Exception as problem:
        _refuse(config, why, where=f"{type(problem).__name__}: {problem}")


def _activations(module: Any) -> Activations | None:
    """Return the sizes of activations, or None for models of several parts or with experts: not all tokens pass through
    all their layers."""
    config = module.config
    is_plain = module.main_input_name == "input_ids" and not config.is_encoder_decoder and not config.sub_configs
    if not is_plain or any(".experts." in name for name, _ in module.named_parameters()):
        return None
    layers, hidden, vocabulary = (getattr(config, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    return Activations(layers, hidden, vocabulary) if layers and hidden and vocabulary else None


def _refuse(config: Config, why: str, *, where: str = "", needed: str = "", remedy: str = OTHER_INPUT) -> NoReturn:
    what = f"cannot count the parameters of {config['model_type']}: {why}"
    refuse(what, where=where, needed=needed, remedy=remedy)
