"""Read models from a Hugging Face configuration: by arithmetic where that is exact, else from transformers' own
class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ballast import _core
from ballast.checks import refuse
from ballast.models.arithmetic import EXACT, Shapes, is_exact
from ballast.models.description import (
    Activations,
    Attention,
    Description,
    bytes_of_element,
    dtype_named,
    longest_sequence,
    matrix_flops,
    possible,
)
from ballast.models.transformers_class import from_transformers


def from_config(config: Mapping[str, Any], *, name: str = "model", dtype: str | None = None) -> Description:
    """Describe the model of a configuration. The units of a known decoder are its embedding, blocks, norm and head.

    Raises UsageError where its parameters cannot be counted exactly.

    >>> from_config({"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 4, "vocab_size": 16},
    ...             name="small").unit_names
    ['embedding', 'layers.0', 'layers.1', 'norm', 'head']
    """
    config = without_quantization(config) if dtype else config
    _check(config)
    dtype = dtype or str(config.get("torch_dtype") or config.get("dtype") or "bf16")
    if is_exact(config):
        return _by_arithmetic(config, name=name, dtype=dtype)
    return from_transformers(config, name=name, dtype=dtype)


def _check(config: Mapping[str, Any]) -> None:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        refuse(
            "cannot count parameters: the configuration has no model_type",
            needed=f"one of {', '.join(EXACT)}, or another that transformers knows",
        )
    parts = {kind: config, **{key: part for key, part in config.items() if isinstance(part, Mapping)}}
    for where, part in parts.items():
        if part.get("quantization_config"):
            refuse(
                "cannot plan a training of quantized weights: the configuration has a quantization_config",
                where=where,
                remedy='Name the format of trained weights, --dtype bf16 (dtype="bf16"), to plan without quantization.',
            )


def without_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out how published weights are quantized: the caller names the format in which they are trained."""
    return {
        key: {k: v for k, v in part.items() if k != "quantization_config"} if isinstance(part, Mapping) else part
        for key, part in config.items()
        if key != "quantization_config"
    }


def _by_arithmetic(config: Mapping[str, Any], *, name: str, dtype: str) -> Description:
    if any(key in config for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        refuse(
            f"cannot count the parameters of {config['model_type']}: its configuration is of a mixture of experts",
            remedy="Name the model_type that has experts, or plan from the shapes by name.",
        )
    exact = EXACT[config["model_type"]]
    shape, kind = exact.shapes(config), dtype_named(dtype)

    def unit(name: str, shapes: Shapes, ties: list[_core.Tie] | None = None) -> _core.Unit:
        tensors = [_core.Tensor(n, possible(s, n)) for n, s in shapes.items()]
        return _core.Unit(name, dtype=kind, tensors=tensors, ties=ties or [])

    blocks = [unit(f"layers.{i}", shape.block) for i in range(shape.layers)]
    head = [shape.vocabulary, shape.hidden]
    tie = [_core.Tie("weight", unit=0, tensor=0)]
    last = unit("head", {}, tie) if shape.tied else unit("head", {"weight": head})
    units = [unit("embedding", shape.embedding), *blocks, unit("norm", shape.last), last]
    element = bytes_of_element(kind)
    windows = shape.windows or [0] * shape.layers
    attention = [Attention(4.0 * shape.head_width, window, causal=True) for window in windows]  # two products
    none = Attention(0.0)
    block_flops = sum(matrix_flops(s) for s in shape.block.values())
    assumed = f"counted as {exact.architecture}: the configuration names no architecture"
    return Description(
        name=name,
        model=_core.Model(units),
        flops=[0.0, *[block_flops] * shape.layers, 0.0, matrix_flops(head)],
        attention=[none, *attention, none, none],
        activations=Activations(shape.layers, shape.hidden, shape.vocabulary, shape.kept.kept_bytes(element), element),
        longest=longest_sequence(config),
        notes=() if config.get("architectures") else (assumed,),
    )
