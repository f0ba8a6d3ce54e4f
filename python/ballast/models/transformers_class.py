"""Count the parameters of a model as transformers builds it: its own class, on the meta device, without weights and
without the network."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ballast.checks import refuse
from ballast.models.description import Description, bytes_of_element, longest_sequence
from ballast.models.experts import CHOSEN, EXPERTS, WIDTH
from ballast.models.modules import from_module, parts_of
from ballast.models.transformers_sizes import activations_of, attention_of, notes_of

if TYPE_CHECKING:
    import torch

Config = Mapping[str, Any]

OTHER_INPUT = "Plan from the model itself (a torch.nn.Module, on the meta device if it is large), or from its shapes by name."
TASKS = (
    *("IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM"),
    *("IMAGE_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION"),
)
SIZES = (
    *("hidden_size", "hidden_sizes", "embed_dim", "num_hidden_layers", "vocab_size", "num_attention_heads"),
    *("ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "shared_expert_intermediate_size"),
    *(*WIDTH, *EXPERTS, *CHOSEN),
)
WRITTEN_FLAT = ("hidden_size", "num_hidden_layers", "vocab_size")


def from_transformers(config: Config, *, name: str, dtype: str) -> Description:
    """Return the units of the class that the configuration names. Raises UsageError where transformers cannot build
    it."""
    _require_packages(config)
    module = built(config)
    named = list(config.get("architectures") or [])
    notes = [] if named else [f"counted as {type(module).__name__}: the configuration names no architecture"]
    described = from_model(module, dtype=dtype)
    return replace(described, name=name, notes=[*notes, *described.notes])


def is_of_transformers(module: torch.nn.Module) -> bool:
    """Return whether a class of transformers built this module, or the model inside of PEFT's adapters."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(_without_adapters(module), transformers.PreTrainedModel)


def _without_adapters(module: Any) -> Any:
    """Return the model that PEFT wraps. Adapters in its layers stay there."""
    peft = sys.modules.get("peft")
    return module.get_base_model() if peft is not None and isinstance(module, peft.PeftModel) else module


def from_model(module: Any, *, dtype: str | None = None) -> Description:
    """Describe a model of transformers: as any module, with its attention and its activations. With PEFT, the parameters are
    those of the model and of its adapters."""
    model = _without_adapters(module)
    decodes = "CausalLM" in type(model).__name__
    attention = [attention_of(part, decodes=decodes) for part in parts_of(module)]
    known = [each for each in attention if each is not None]
    is_known = len(known) == len(attention)
    described = from_module(module, dtype=dtype)
    elements = [bytes_of_element(unit.dtype) for unit in described.model.units]
    return replace(
        described,
        attention=known if is_known else (),
        activations=activations_of(model, element=max(elements, key=elements.count)),
        longest=longest_sequence(model.config.get_text_config().to_dict()),
        notes=notes_of(model, attention_is_known=is_known),
    )


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
    own = {field.name for field in fields(settings)}
    sizes = [name for name in (settings.attribute_map.get(key, key) for key in SIZES) if name in own]
    if not sizes:
        parts = (part for part in settings.sub_configs if getattr(settings, part) is not None)
        return next((part for part in parts if part not in config and not _is_written_flat(config, settings, part)), None)
    if any(config.get(part) for part in settings.sub_configs):
        return None
    own_names = {written: key for key, written in settings.attribute_map.items()}
    left_out = (size for size in sizes if size not in config and own_names.get(size) not in config)
    assumed = (size for size in left_out if getattr(settings, size) is not None)  # else it follows from others
    return next((size for size in assumed if getattr(settings, size) == getattr(type(settings)(), size)), None)


def _is_written_flat(config: Config, settings: Any, part: str) -> bool:
    """Return whether the configuration has the sizes of a part in itself, as those of Qwen2-VL have the language model's."""
    own = getattr(settings, part)
    return hasattr(own, "num_hidden_layers") and all(config.get(key) == getattr(own, key, None) for key in WRITTEN_FLAT)


def _class_of(config: Config, settings: Any) -> Any:
    import transformers

    architectures = config.get("architectures") or usual_class(config["model_type"])
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


def usual_class(kind: str) -> list[str]:
    """Return the class that transformers trains for this model_type, from the most specific task to the most general."""
    from transformers.models.auto import modeling_auto

    tables = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS)
    return [table[kind] for table in tables if kind in table][:1]


def built(config: Config, *, device: str = "meta") -> torch.nn.Module:
    """Return the model of a configuration. On the meta device its parameters have no values."""
    import torch

    settings = _settings_of(config)
    architecture = _class_of(config, settings)
    with _refusing(config, f"transformers cannot build {architecture.__name__} from its configuration"):
        with torch.device(device), torch.random.fork_rng(devices=[]):
            module: torch.nn.Module = architecture(settings)
    return module


@contextmanager
def _refusing(config: Config, why: str) -> Iterator[None]:
    """Turn any error of transformers into a refusal: configurations fail there in many ways."""
    try:
        yield
    except Exception as problem:
        _refuse(config, why, where=f"{type(problem).__name__}: {problem}")


def _refuse(config: Config, why: str, *, where: str = "", needed: str = "", remedy: str = OTHER_INPUT) -> NoReturn:
    what = f"cannot count the parameters of {config['model_type']}: {why}"
    refuse(what, where=where, needed=needed, remedy=remedy)
