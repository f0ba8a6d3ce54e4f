"""Describe a model of transformers, or of a configuration, which its own class builds on the meta device, without weights and
without the network: its parameters, its attention, and an estimate of its activations."""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ballast.checks import refuse
from ballast.models.description import (
    Activations,
    Attention,
    Block,
    Description,
    attention_elements,
    bytes_of_element,
    longest_sequence,
    mlp_elements,
)
from ballast.models.modules import CHOSEN, EXPERTS, NO_ATTENTION, WIDTH, Part, experts_of, first_size, from_module, parts_of

if TYPE_CHECKING:
    import torch

OUTPUTS = ("o_proj", "out_proj", "dense", "proj", "o")  # names of the last projection of an attention
QUERIES = ("q_proj", "query", "q", "q_lin")

# Names of layers that say what a block keeps, and of sizes in configurations.
FUSED = ("query_key_value", "qkv_proj")
GATES = ("gate_proj", "gate_up_proj", "wi_1", "w3", "Wi")
HEAD_NORMS = ("q_norm",)
MORE_NORMS = ("pre_feedforward_layernorm",)  # norms in front of the attention and of the MLP, and after both
RMS_NORMS = ("RMSNorm", "T5LayerNorm")
INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "d_ff", "n_inner", "ffn_hidden_size")
ACTIVATIONS = ("dense_act_fn", "hidden_act", "hidden_activation", "activation_function")
SEVERAL_INPUTS = "the time is counted as if each token passed through all parts of the model"
ONLY_TEXT = "the activations of the language model are counted, those of other parts are not"
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


def attention_of(part: Part, *, decodes: bool) -> Attention | None:
    """Return the flops of one token's attention in a part; None where an attention cannot be read. `decodes` says whether
    an attention that does not say so is causal."""
    found = [_attention(module, decodes=decodes) for module in _innermost(part.modules())]
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return None
    if len({each[1:] for each in known}) == 1:
        return known[0]._replace(flops=sum(each.flops for each in known))
    # An attention with itself and one with the encoder: none of them has a window.
    return Attention(sum(each.flops / 2 if each.causal else each.flops for each in known))


def _innermost(modules: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    named = [module for module in modules if "Attention" in type(module).__name__]
    return [module for module in named if not any("Attention" in type(below).__name__ for below in list(module.modules())[1:])]


def _attention(module: Any, *, decodes: bool) -> Attention | None:
    """Return two products, of queries with keys and of scores with values."""
    values, query = _size_of(module, OUTPUTS, "in_features"), _size_of(module, QUERIES, "out_features")
    head = getattr(module, "qk_head_dim", None)  # latent attention has it, whose values have another width
    keys = head * module.num_heads if head else values or query
    if keys is None:
        return None
    causal = getattr(module, "is_causal", decodes)
    return Attention(2.0 * (keys + (values or keys)), _window(module), causal=bool(causal))


def _window(module: Any) -> int:
    """Return the window of an attention, 0 for none. Modules without an attribute for it use that of their configuration."""
    config = getattr(module, "config", None)
    is_used = getattr(config, "use_sliding_window", True)
    return getattr(module if hasattr(module, "sliding_window") else config, "sliding_window", None) or 0 if is_used else 0


def _size_of(module: Any, names: Iterable[str], size: str) -> int | None:
    """Return a size of the first of these layers that the module has."""
    sizes = (getattr(getattr(module, name, None), size, None) for name in names)
    return next((found for found in sizes if isinstance(found, int)), None)


def activations_of(module: Any, *, element: int) -> Activations | None:
    """Return the sizes of activations of a model of transformers, with so many bytes for each element; None where its
    configuration does not name them."""
    config = module.config
    text = config.get_text_config()
    stacks = ("encoder_layers", "decoder_layers") if config.is_encoder_decoder else ("num_hidden_layers",)
    layers = [getattr(text, name, None) or 0 for name in stacks]
    if config.is_encoder_decoder and 0 in layers:  # T5 names them otherwise
        layers = [text.num_hidden_layers, getattr(text, "num_decoder_layers", None) or text.num_hidden_layers]
    hidden = getattr(text, "hidden_size", None)
    if not hidden or not all(layers):
        return None
    # Many configurations have a vocabulary or labels, and the model has no head that turns them into logits.
    vocabulary = 0 if module.get_output_embeddings() is None else getattr(text, "vocab_size", None) or 0
    return Activations(sum(layers), hidden, vocabulary, _block(module, text, hidden).kept_bytes(element), element)


def _block(module: Any, text: Any, hidden: int) -> Block:
    """Return what a block keeps: its widths are those of the configuration, its kinds of layers those of the modules."""
    below = list(module.modules())
    heads = first_size(text, ("num_attention_heads",)) or 1
    width = first_size(text, ("qk_head_dim", "head_dim")) or hidden // heads
    queries, keys = heads * width, width * (first_size(text, ("num_key_value_heads",)) or heads)
    fused = next((size for each in below if (size := _size_of(each, FUSED, "out_features"))), None)
    if fused:
        keys = (fused - queries) // 2
    return Block(
        norms=hidden * (4 if _has(below, MORE_NORMS) else 2),
        attention=attention_elements(queries, keys, is_fused=bool(fused) and hasattr(text, "rope_parameters")),
        mlp=_mlp_elements(text, hidden, is_gated=_has(below, GATES)),
        head_norms=queries + keys if _has(below, HEAD_NORMS) else 0,
        has_rms_norms=any(kind in type(each).__name__ for each in below for kind in RMS_NORMS),
    )


def _mlp_elements(text: Any, hidden: int, *, is_gated: bool) -> int:
    """Return what an MLP keeps. Each expert that a token passes through also keeps its own input and result."""
    activation = next((getattr(text, name) for name in ACTIVATIONS if hasattr(text, name)), None)
    experts = experts_of(text)
    if experts is None:
        return mlp_elements(first_size(text, INNER) or 4 * hidden, activation, is_gated=is_gated)
    widths = experts.chosen * experts.width + experts.shared_width
    return 2 * experts.chosen * hidden + mlp_elements(widths, activation, is_gated=True)


def _has(modules: Iterable[torch.nn.Module], names: Iterable[str]) -> bool:
    return any(getattr(module, name, None) is not None for module in modules for name in names)


def notes_of(module: Any, *, attention_is_known: bool) -> list[str]:
    """Return what the time and the activations of a model of transformers leave out."""
    config = module.config
    parts = [part for part in config.sub_configs if getattr(config, part, None) is not None]
    notes = [] if attention_is_known else [NO_ATTENTION]
    notes += [SEVERAL_INPUTS] if config.is_encoder_decoder or len(parts) > 1 else []
    return notes + ([ONLY_TEXT] if len(parts) > 1 else [])
