"""Read models from a Hugging Face configuration: common decoders by arithmetic, without torch or transformers, and others from
transformers' own class.

A test compares each type of EXACT with the model that transformers builds: a type that is not exact does not belong there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast import _core
from ballast.checks import is_whole_number, refuse
from ballast.models.description import (
    Activations,
    Attention,
    Block,
    Description,
    attention_elements,
    bytes_of_element,
    dtype_named,
    longest_sequence,
    matrix_flops,
    mlp_elements,
    possible,
)
from ballast.models.transformers import from_transformers

Shapes = dict[str, list[int]]
Config = Mapping[str, Any]
LAYERS = ("num_hidden_layers", "n_layer")
MOST_LAYERS = 1 << 14  # each of them is a unit of the plan
MOST_SIZE = 1 << 24
DEFAULT_WINDOW, DEFAULT_FULL_LAYERS = 4096, 28  # the defaults of Mistral and Qwen in transformers


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
        return _computed(config, name=name, dtype=dtype)
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


def _computed(config: Mapping[str, Any], *, name: str, dtype: str) -> Description:
    if any(key in config for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        refuse(
            f"cannot count the parameters of {config['model_type']}: its configuration is of a mixture of experts",
            remedy="Name the model_type that has experts, or plan from the shapes by name.",
        )
    architecture, shapes_of = EXACT[config["model_type"]]
    shape, kind = shapes_of(config), dtype_named(dtype)

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
    assumed = f"counted as {architecture}: the configuration names no architecture"
    return Description(
        name=name,
        model=_core.Model(units),
        flops=[0.0, *[block_flops] * shape.layers, 0.0, matrix_flops(head)],
        attention=[none, *attention, none, none],
        activations=Activations(shape.layers, shape.hidden, shape.vocabulary, shape.kept.kept_bytes(element), element),
        longest=longest_sequence(config),
        notes=() if config.get("architectures") else (assumed,),
    )


def is_exact(config: Config) -> bool:
    """Return whether arithmetic knows each parameter: it does for language models of the types in EXACT.

    >>> is_exact({"model_type": "gpt2"}), is_exact({"model_type": "gpt2", "architectures": ["GPT2Model"]})
    (True, False)
    """
    known = EXACT.get(config["model_type"])
    if known is None or config.get("add_cross_attention"):
        return False
    return list(config.get("architectures") or known[:1]) == [known[0]]


@dataclass(frozen=True)
class Transformer:
    """A decoder: an embedding, equal blocks, a norm and a language-model head."""

    embedding: Shapes
    block: Shapes
    last: Shapes  # the norm in front of the head
    layers: int
    hidden: int
    vocabulary: int
    head_width: int  # all heads together
    tied: bool
    kept: Block
    windows: Sequence[int] = ()  # the attention's, by layer; 0 or none: the whole sequence


@dataclass(frozen=True)
class Llama:
    """The differences of a model type from Llama. The defaults are those of its configuration class in transformers."""

    key_value_heads: int | None = None  # the number if the configuration names none; None: one for each head
    head_dim: int | None = None  # the size if the configuration names none; None: hidden_size / num_attention_heads
    optional_biases: tuple[str, ...] = ()  # the ones of attention_bias and mlp_bias that its configuration may have
    has_qkv_bias: bool = False
    has_head_norms: bool = False
    windows: Callable[[Config], Sequence[int]] = lambda config: ()

    def __call__(self, config: Config) -> Transformer:
        hidden, vocabulary = _number(config, "hidden_size"), _number(config, "vocab_size")
        heads = _number(config, "num_attention_heads")
        width = _optional(config, "head_dim", self.head_dim) or _divided(hidden, heads)
        keys = width * (_optional(config, "num_key_value_heads", self.key_value_heads) or heads)
        return Transformer(
            embedding={"weight": [vocabulary, hidden]},
            block=self._block(config, hidden=hidden, queries=heads * width, keys=keys, head_dim=width),
            last={"weight": [hidden]},
            layers=_number(config, "num_hidden_layers"),
            hidden=hidden,
            vocabulary=vocabulary,
            head_width=heads * width,
            tied=bool(config.get("tie_word_embeddings", False)),
            kept=Block(
                norms=2 * hidden,
                attention=attention_elements(heads * width, keys),
                mlp=mlp_elements(_number(config, "intermediate_size"), config.get("hidden_act"), is_gated=True),
                head_norms=heads * width + keys if self.has_head_norms else 0,
            ),
            windows=self.windows(config),
        )

    def _block(self, config: Config, *, hidden: int, queries: int, keys: int, head_dim: int) -> Shapes:
        inner = _number(config, "intermediate_size")
        attention = {"q_proj": [queries, hidden], "k_proj": [keys, hidden], "v_proj": [keys, hidden]}
        output = {"o_proj": [hidden, queries]}
        mlp = {"gate_proj": [inner, hidden], "up_proj": [inner, hidden], "down_proj": [hidden, inner]}
        has_bias = {name: bool(config.get(name)) for name in self.optional_biases}
        attention_bias = has_bias.get("attention_bias", False)
        norms = ("self_attn.q_norm", "self_attn.k_norm") if self.has_head_norms else ()
        return {
            **_linear("self_attn", attention, bias=self.has_qkv_bias or attention_bias),
            **_linear("self_attn", output, bias=attention_bias),
            **{f"{norm}.weight": [head_dim] for norm in norms},
            **_linear("mlp", mlp, bias=has_bias.get("mlp_bias", False)),
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
        }


def _window_of_all(config: Config) -> list[int]:
    """Return the windows of Mistral: each layer has one, unless the configuration says null."""
    return [_optional(config, "sliding_window", DEFAULT_WINDOW) or 0] * _number(config, "num_hidden_layers")


def _windows_of_last(config: Config) -> list[int]:
    """Return the windows of Qwen: layers may have one from max_window_layers on, or where layer_types says so."""
    layers = _number(config, "num_hidden_layers")
    window = _optional(config, "sliding_window", DEFAULT_WINDOW) if config.get("use_sliding_window") else None
    if window is None:
        return [0] * layers
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return [window if kind == "sliding_attention" else 0 for kind in types]
    full = 0 if config.get("max_window_layers") == 0 else _optional(config, "max_window_layers", DEFAULT_FULL_LAYERS) or 0
    return [0] * min(full, layers) + [window] * max(0, layers - full)


def _gpt2(config: Config) -> Transformer:
    width, vocabulary = _number(config, "n_embd"), _number(config, "vocab_size")
    inner = _optional(config, "n_inner", None) or 4 * width
    _divided(width, _number(config, "n_head"))
    block = {
        **_linear("attn", {"c_attn": [width, 3 * width], "c_proj": [width, width]}, bias=True, outputs=1),
        **_linear("mlp", {"c_fc": [width, inner], "c_proj": [inner, width]}, bias=True, outputs=1),
        **_layer_norms("ln_1", "ln_2", width=width),
    }
    return _layer_norm_decoder(
        {"wte.weight": [vocabulary, width], "wpe.weight": [_number(config, "n_positions"), width]},
        block,
        layers=_number(config, "n_layer"),
        tied=bool(config.get("tie_word_embeddings", True)),
        attention=attention_elements(width, width),
        mlp=mlp_elements(inner, config.get("activation_function", "gelu_new"), is_gated=False),
    )


def _gpt_neox(config: Config) -> Transformer:
    hidden, vocabulary = _number(config, "hidden_size"), _number(config, "vocab_size")
    inner = _number(config, "intermediate_size")
    _divided(hidden, _number(config, "num_attention_heads"))
    attention = {"query_key_value": [3 * hidden, hidden], "dense": [hidden, hidden]}
    block = {
        **_linear("attention", attention, bias=bool(config.get("attention_bias", True))),
        **_linear("mlp", {"dense_h_to_4h": [inner, hidden], "dense_4h_to_h": [hidden, inner]}, bias=True),
        **_layer_norms("input_layernorm", "post_attention_layernorm", width=hidden),
    }
    return _layer_norm_decoder(
        {"weight": [vocabulary, hidden]},
        block,
        layers=_number(config, "num_hidden_layers"),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention=attention_elements(hidden, hidden, is_fused=True),
        mlp=mlp_elements(inner, config.get("hidden_act"), is_gated=False),
    )


def _layer_norm_decoder(embedding: Shapes, block: Shapes, *, layers: int, tied: bool, attention: int, mlp: int) -> Transformer:
    """Return a decoder whose heads are together as wide as the model. The first weight of its embedding is the vocabulary's."""
    vocabulary, width = next(iter(embedding.values()))
    kept = Block(norms=2 * width, attention=attention, mlp=mlp, has_rms_norms=False)
    last = {"weight": [width], "bias": [width]}
    return Transformer(embedding, block, last, layers, width, vocabulary, head_width=width, tied=tied, kept=kept)


# Model types whose parameters are known, each with the class of transformers that has them.
EXACT: Mapping[str, tuple[str, Callable[[Config], Transformer]]] = {
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "gpt_neox": ("GPTNeoXForCausalLM", _gpt_neox),
    "llama": ("LlamaForCausalLM", Llama(optional_biases=("attention_bias", "mlp_bias"))),
    "mistral": ("MistralForCausalLM", Llama(key_value_heads=8, windows=_window_of_all)),
    "qwen2": ("Qwen2ForCausalLM", Llama(key_value_heads=32, has_qkv_bias=True, windows=_windows_of_last)),
    "qwen3": (
        "Qwen3ForCausalLM",
        Llama(
            key_value_heads=32,
            head_dim=128,
            optional_biases=("attention_bias",),
            has_head_norms=True,
            windows=_windows_of_last,
        ),
    ),
}


def _linear(module: str, weights: Shapes, *, bias: bool, outputs: int = 0) -> Shapes:
    """Return the shapes of linear modules. The bias has the length of the weight's dimension `outputs`: the first one in
    torch.nn.Linear, and the second one in GPT-2."""
    shapes: Shapes = {}
    for name, weight in weights.items():
        shapes[f"{module}.{name}.weight"] = weight
        if bias:
            shapes[f"{module}.{name}.bias"] = [weight[outputs]]
    return shapes


def _layer_norms(*names: str, width: int) -> Shapes:
    return {f"{name}.{part}": [width] for name in names for part in ("weight", "bias")}


def _number(config: Config, key: str) -> int:
    value = config.get(key)
    most = MOST_LAYERS if key in LAYERS else MOST_SIZE
    if not is_whole_number(value) or not 1 <= value <= most:
        refuse(f"{key} is {value!r} in the configuration", needed=f"a whole number from 1 to {most}")
    return int(value)


def _optional(config: Config, key: str, default: int | None) -> int | None:
    """Return a size, or the default if the key is missing. None means that the size follows from others."""
    if key not in config:
        return default
    return None if config[key] is None else _number(config, key)


def _divided(hidden: int, heads: int) -> int:
    if hidden % heads != 0:
        what = f"{heads} attention heads do not divide the hidden size of {hidden}"
        refuse(what, where="the configuration", needed="a multiple of the heads")
    return hidden // heads
