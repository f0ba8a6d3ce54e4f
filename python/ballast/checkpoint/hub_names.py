"""Models of transformers whose files on the Hub have other tensors than the model has parameters, such as each expert alone.
Conversions of transformers make one from the other. The adapters of PEFT's models are merged into the weights."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from ballast.checkpoint.tensors import tensors_of
from ballast.checks import refuse
from ballast.torch.memory import tensor_at
from ballast.torch.parameters.stored_tensors import Latest, StoredTensor
from ballast.torch.parameters.units import unwrapped

Tensors = dict[str, torch.Tensor]


def is_of_transformers(model: torch.nn.Module) -> bool:
    known: Any = sys.modules.get("transformers.modeling_utils")  # no program has its models without this module
    return known is not None and isinstance(model, known.PreTrainedModel)


@dataclass
class Sources:
    """The tensors in files that become one or several of the model, and the conversion."""

    name: str  # that of the first tensor of the model
    model: torch.nn.Module
    converter: Any
    stored: list[tuple[str, str, StoredTensor]] = field(default_factory=list)  # each with its name and its pattern

    @property
    def are_experts(self) -> bool:
        """Whether each row of the first dimension is converted from the tensors of one expert."""
        first, *others = self.converter.operations
        dims = [getattr(each, key, 0) for each in others for key in vars(each) if key in ("dim", "dim0", "dim1")]
        is_known = all(type(each).__name__ in ("Concatenate", "Transpose") for each in others)
        return type(first).__name__ == "MergeModulelist" and first.dim == 0 and is_known and 0 not in dims

    def of_expert(self, number: int) -> list[tuple[str, str, StoredTensor]]:
        by_pattern: dict[str, list[tuple[str, str, StoredTensor]]] = {}
        for each in self.stored:
            by_pattern.setdefault(each[1], []).append(each)
        return [experts[number] for experts in by_pattern.values()]

    def convert(self, read: Callable[[StoredTensor], torch.Tensor], expert: int | None = None) -> Tensors:
        """Return the tensors of the model, or of one expert, from what `read` returns of each stored one."""
        converter = deepcopy(self.converter)
        for name, pattern, stored in self.stored if expert is None else self.of_expert(expert):
            converter.add_tensor(self.name, name, pattern, read(stored))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class ConvertedTensor(StoredTensor):
    """A tensor of the model that is made of others where it is read: one expert at a time, or all of it."""

    def __init__(self, sources: Sources, name: str, like: torch.Tensor, latest: Latest):
        first, _, stored = sources.stored[0]
        super().__init__(like.dtype, tuple(like.shape), f"{stored.where}, from {first} and others", stored.source)
        self._sources, self._name, self._latest = sources, name, latest

    def read(self, first: int, count: int, into: int) -> None:
        pieces = self.shape[0] if self._sources.are_experts else 1
        size = self.elements // max(pieces, 1)
        for piece in range(first // max(size, 1), math.ceil((first + count) / max(size, 1))):
            convert = partial(self._sources.convert, StoredTensor.read_all, piece if self._sources.are_experts else None)
            made = self._latest.get((self._sources.name, piece), convert)
            begin, end = max(first, piece * size), min(first + count, (piece + 1) * size)
            values = made[self._name].reshape(-1)[begin - piece * size : end - piece * size]
            tensor_at(into + (begin - first) * self.dtype.itemsize, end - begin, self.dtype).copy_(values)


def converted(
    model: torch.nn.Module, stored: Mapping[str, StoredTensor], known: Mapping[str, torch.Tensor]
) -> Mapping[str, StoredTensor]:
    """Return the stored tensors by their names in the model; those with other names are converted as transformers does. Values
    are read later."""
    if not is_of_transformers(model) or not stored.keys() - known.keys():
        return stored
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    found: dict[str, StoredTensor] = {}
    sources: dict[str, Sources] = {}
    for name, each in sorted(stored.items(), key=lambda item: dot_natural_key(item[0])):
        own, pattern = name, None
        if name not in known:
            own, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if pattern is None:
            found[own if own in known else name] = each
            continue
        converter = next(each for each in converters if pattern in each.source_patterns)
        sources.setdefault(own, Sources(own, model, converter)).stored.append((name, pattern, each))
    latest = Latest()
    for own_sources in sources.values():
        for name, like in made_of(own_sources).items():
            found[name] = ConvertedTensor(own_sources, name, like, latest)
    return found


def made_of(sources: Sources) -> Tensors:
    """Return the tensors that a conversion makes, without values. Refuse one that fails."""
    try:
        return sources.convert(lambda stored: torch.empty(stored.shape, dtype=stored.dtype, device="meta"))
    except Exception as error:
        refuse(
            "cannot load a tensor: transformers cannot convert what the files have of it",
            where=f"{sources.name} in {sources.stored[0][2].where}",
            needed="the tensors of all experts, or of all other parts of the tensor",
            available=f"{len(sources.stored)} tensors, such as {sources.stored[0][0]}; {type(error).__name__}: {error}",
        )


class HubNames:
    """Converts the tensors of a model back to those of the Hub."""

    def __init__(self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]):
        self._model = model
        self._groups: dict[str, str] = {}  # the group of each tensor: those of one are converted together
        self._left: dict[str, int] = {}  # tensors of a group that have not come
        self._kept: dict[str, Tensors] = {}
        self._renamed: dict[str, str] = {}
        if not is_of_transformers(model):
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion

        mapping = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
        back = [each.reverse_transform() for each in mapping[::-1] if isinstance(each, WeightConverter)]
        alone: Tensors = {}  # these are renamed at most. Some renamings need the names of all
        for name in tensors if mapping else ():
            group, pattern = apply_converters(name, back)
            if pattern is None:
                alone[name] = torch.empty(0, device="meta")
            else:
                self._groups[name] = group
                self._left[group] = self._left.get(group, 0) + 1
        renamed = {id(like): name for name, like in revert_weight_conversion(model, dict(alone)).items()}
        self._renamed = {name: renamed[id(like)] for name, like in alone.items()}

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the Hub that are complete with this one, which is valid now only."""
        if name not in self._groups:
            yield self._renamed.get(name, name), tensor
            return
        from transformers.core_model_loading import revert_weight_conversion

        group = self._groups[name]
        self._left[group] -= 1
        kept = self._kept.setdefault(group, {})
        kept[name] = tensor if self._left[group] == 0 else tensor.clone()
        if self._left[group] == 0:
            yield from revert_weight_conversion(self._model, self._kept.pop(group)).items()


# Tuners of PEFT whose layers add get_delta_weight() to their weights. Others multiply, or change other tensors as well.
ADDING = ("adalora", "loha", "lokr", "lora", "randlora")
OUTSIDE = "Merge in full: with ballast.gather(model): model.merge_and_unload().save_pretrained(folder)"


class MergedAdapters:
    """The parameters and buffers of a model without adapters of PEFT, which are added to them where they are read. An adapter
    that cannot be added is refused: a part of it would be lost."""

    def __init__(self, model: torch.nn.Module):
        model = unwrapped(model)
        tuner: Any = getattr(model, "base_model", None)
        self.model: torch.nn.Module = tuner.model if hasattr(tuner, "inject_adapter") else model
        self.adapters: dict[int, list[torch.Tensor]] = {}  # the parameters of adapters, by id of the weight that they change
        self._layers: dict[str, Any] = {}
        layers = {path: each for path, each in self.model.named_modules() if is_tuner_layer(each)}
        self.tensors: dict[str, torch.Tensor] = {}
        for name, tensor in tensors_of(self.model).items():
            path = next((path for path in reversed(layers) if name.startswith(f"{path}.")), None)  # the innermost layer
            if path is None:
                self.tensors[name] = tensor
            elif name.startswith(f"{path}.base_layer."):
                own = re.sub(r"\.(base_layer\.)+", ".", name)
                self.tensors[own] = tensor
                if name == f"{path}.base_layer.weight" and unmerged(layers[path]):
                    self._layers[own] = layers[path]
                    self.adapters[id(tensor)] = [
                        each for key, each in layers[path].named_parameters() if not key.startswith("base_layer.")
                    ]
        self._check(layers)
        for name, config in getattr(model, "peft_config", {}).items():  # those without layers, such as trained prompts
            if config.peft_type.value.lower() not in ADDING:
                refuse_merging(f"{config.peft_type.value} does not add to weights", f"adapter {name}")

    def _check(self, layers: Mapping[str, Any]) -> None:
        """Refuse what value() would not write in full."""
        if saved := next((name for name in self.tensors if ".modules_to_save." in name), None):
            refuse("cannot merge adapters: modules_to_save replaces modules", where=saved, needed="adapters of layers alone")
        packed = next((own for own in self._layers if not self.tensors[own].is_floating_point()), None)
        if packed is not None:
            refuse("cannot merge adapters into packed weights", where=packed, needed="a model whose weights are numbers")
        users = Counter(id(each) for module in self.model.modules() for each in module.parameters(recurse=False))
        for path, layer in layers.items():
            if unmerged(layer):
                weight = layer.get_base_layer()._parameters.get("weight")
                if weight is not None and users[id(weight)] > 1:
                    refuse(
                        "cannot merge adapters: another module has the same weight, and would change too",
                        where=path,
                        needed="adapters of weights that are not tied",
                        remedy="Adapt a model whose config has tie_word_embeddings=False, or publish the adapters alone.",
                    )
                if reason := why_not_added(layer):
                    refuse_merging(reason, path)
        added = {id(layer) for layer in self._layers.values()}
        left = next((path for path, layer in layers.items() if unmerged(layer) and id(layer) not in added), None)
        left = left or next((name for name in self.tensors if ".token_adapter." in name), None)
        if left is not None:
            refuse_merging("they change another tensor than the weight of a layer", left)

    def value(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the merged values of a tensor. Its adapters are gathered."""
        layer = self._layers.get(name)
        if layer is None:
            return tensor
        with torch.no_grad():
            deltas = [layer.get_delta_weight(each) for each in unmerged(layer)]
            return sum(deltas, start=tensor.float()).to(tensor.dtype)


def is_tuner_layer(module: torch.nn.Module) -> bool:
    return "base_layer" in module._modules and hasattr(module, "adapter_layer_names")


def unmerged(layer: Any) -> list[str]:
    """Return the active adapters of a layer that its weights do not contain yet."""
    adapters = {name for key in layer.adapter_layer_names for name in getattr(layer, key)}
    return [each for each in layer.active_adapters if each in adapters and each not in layer.merged_adapters]


def why_not_added(layer: Any) -> str:
    """Return why the active adapters of a layer are not what get_delta_weight() adds to its weight, or nothing."""
    kind = next(each.__module__ for each in type(layer).__mro__ if each.__module__.startswith("peft.")).split(".")[2]
    if kind not in ADDING:
        return f"{type(layer).__name__} of {kind} does not add to weights"
    if layer.merged:
        return "some adapters of the layer are merged into it, and others are not"
    names = unmerged(layer)
    if any(getattr(layer, "use_dora", {}).get(each) for each in names):
        return "DoRA scales the sum of the weight and the adapter"
    if any(each in getattr(layer, "lora_variant", {}) for each in names):
        return "the adapter is a variant of LoRA, which does more than add to the weight"
    if any(getattr(layer, "lora_bias", {}).get(each) for each in names):
        return "lora_bias changes the bias of the layer too"
    if getattr(layer, "parameter_name", "weight") != "weight":
        return "target_parameters changes another parameter than the weight of a layer"
    return ""


def refuse_merging(reason: str, where: str) -> NoReturn:
    refuse(f"cannot merge adapters unit by unit: {reason}", where=where, needed="adapters that add to weights", remedy=OUTSIDE)
