"""Find the configuration or the shapes of a model: by a known name, with its publisher's sizes, or in a JSON file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ballast.checks import NEXT_LINE, one_of, refuse
from ballast.json_reader import object_in

Config = Mapping[str, Any]
PUBLISHERS = ("deepseek-ai", "google", "meta-llama", "microsoft", "mistralai", "openai", "openai-community", "qwen")

# Ends of names that say how a model was trained further, with the same sizes.
TUNED = re.compile(r"(-instruct|-it|-base|-chat|-hf|-v0\.1)+$")
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(?<!\.json)")  # owner/model
FORMS = "a configuration with a model_type, shapes by name, or several of either by name"


def known_name(model: str) -> str:
    """Return the name of a known model: in any case, and with its publisher and a suffix as the Hugging Face Hub has them.
    Return any other text as it is. A file of that name comes first.

    >>> known_name("Llama-8B"), known_name("Qwen/Qwen2.5-7B-Instruct"), known_name("Llama-9B")
    ('llama-8b', 'qwen2.5-7b', 'Llama-9B')
    """
    owner, slash, name = model.lower().rpartition("/")
    name = name if name in KNOWN else TUNED.sub("", name)
    is_published = not slash or owner in PUBLISHERS
    return name if name in KNOWN and is_published and not Path(model).exists() else model


def read_model(location: str) -> Mapping[str, Any]:
    """Return the configuration or the shapes in a JSON file, or the configuration in a folder. `FILE.json:NAME` is one of
    several models in a file."""
    before, colon, name = location.rpartition(":")
    path, name = (Path(before), name) if colon and not Path(location).exists() else (Path(location), "")
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        _refuse_missing(location, path)
    return _named(object_in(path, FORMS), name, path)


def _refuse_missing(location: str, path: Path) -> NoReturn:
    """Refuse what is neither a file nor a known name. For another model than a path, say how to get its configuration."""
    needed = f"one of {len(KNOWN)} known names (ballast plan --help lists them), or the path of a model's config.json"
    is_name = "/" not in location and ".json" not in location
    if not is_name and not HUB_NAME.fullmatch(location):
        refuse(f"{path} does not exist", needed=needed)
    near = difflib.get_close_matches(location.lower().rpartition("/")[2], KNOWN, n=3, cutoff=0.5)
    words = ["Did you mean " + " or ".join(f'"{name}"' for name in near) + "?"] if near else []
    command = f'"hf download {"OWNER/NAME" if is_name else location} config.json"'
    words.append(f"For a model of the Hugging Face Hub, {command} prints the path of its configuration: plan with that path.")
    what = f'there is no known model "{location}"' if is_name else f"{path} does not exist"
    refuse(what, needed=needed, remedy=NEXT_LINE.join(words))


def is_config(found: Mapping[str, Any]) -> bool:
    """Return whether this is a configuration, and not shapes.

    >>> is_config({"model_type": "vit"}), is_config({"h.0.weight": [4, 4]})
    (True, False)
    """
    return any(key in found for key in ("model_type", "vocab_size", "architectures"))


def _named(found: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    if name:
        chosen = found[one_of(f"model in {path}", name, found)]
        if not isinstance(chosen, Mapping):
            refuse(f"{name} in {path} is no model", needed=FORMS)
        return chosen
    if not is_config(found) and any(isinstance(part, Mapping) and is_config(part) for part in found.values()):
        needed = f"one of {', '.join(f'{path}:{each}' for each in found)}"
        refuse(f"cannot choose a model: {path} has {len(found)}", needed=needed)
    other = next((key for key, part in found.items() if not isinstance(part, (list, Mapping))), None)
    if not is_config(found) and other is not None:
        refuse(f"{path} has no model: {other} is {found[other]!r}", needed=FORMS)
    return found


def _gpt2(layers: int, width: int, heads: int) -> Config:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def _decoder(kind: str, *sizes: int, vocabulary: int, **more: Any) -> Config:
    """Return the configuration of a decoder of this model_type. `sizes` are layers, hidden size, heads, key-value heads and the
    MLP's width."""
    layers, hidden, heads, key_value_heads, intermediate = sizes
    return {
        "model_type": kind,
        "architectures": [f"{CLASSES[kind]}ForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        **more,
    }


CLASSES = {"llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2"}
CLASSES |= {"qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "phi3": "Phi3", "deepseek_v3": "DeepseekV3"}
UNTIED = {"tie_word_embeddings": False}  # the embedding is not the head
TIED = {"tie_word_embeddings": True}
_llama = partial(_decoder, "llama", vocabulary=128256)
_older_llama = partial(_decoder, "llama", vocabulary=32000)
_mistral = partial(_decoder, "mistral", head_dim=128, sliding_window=None)
_mixtral = partial(_decoder, "mixtral", vocabulary=32000, num_local_experts=8, num_experts_per_tok=2)
_qwen2 = partial(_decoder, "qwen2")
_qwen3 = partial(_decoder, "qwen3", vocabulary=151936, head_dim=128)
_qwen3_moe = partial(_decoder, "qwen3_moe", vocabulary=151936, head_dim=128, num_experts=128, num_experts_per_tok=8, **UNTIED)
_gpt_oss = partial(_decoder, "gpt_oss", vocabulary=201088, head_dim=64, num_experts_per_tok=4, **UNTIED)
_gemma2 = partial(_decoder, "gemma2", vocabulary=256000)
_phi3 = partial(_decoder, "phi3", pad_token_id=0, **UNTIED)  # no default padding is valid for all of these vocabularies
DEEPSEEK_V3 = _decoder(
    "deepseek_v3",
    *(61, 7168, 128, 128, 18432),
    vocabulary=129280,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    first_k_dense_replace=3,
)
KNOWN: Mapping[str, Config] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    **dict.fromkeys(("llama-8b", "llama-3-8b", "llama-3.1-8b"), _llama(32, 4096, 32, 8, 14336, **UNTIED)),
    **dict.fromkeys(("llama-70b", "llama-3-70b", "llama-3.1-70b", "llama-3.3-70b"), _llama(80, 8192, 64, 8, 28672, **UNTIED)),
    **dict.fromkeys(("llama-405b", "llama-3.1-405b"), _llama(126, 16384, 128, 8, 53248, **UNTIED)),
    "llama-3.2-1b": _llama(16, 2048, 32, 8, 8192, **TIED),
    "llama-3.2-3b": _llama(28, 3072, 24, 8, 8192, **TIED),
    "llama-2-7b": _older_llama(32, 4096, 32, 32, 11008),
    "llama-2-13b": _older_llama(40, 5120, 40, 40, 13824),
    "llama-2-70b": _older_llama(80, 8192, 64, 8, 28672),
    "tinyllama-1.1b": _older_llama(22, 2048, 32, 4, 5632),
    "mistral-7b": _mistral(32, 4096, 32, 8, 14336, vocabulary=32000),
    "mistral-nemo-12b": _mistral(40, 5120, 32, 8, 14336, vocabulary=131072),
    "mistral-small-24b": _mistral(40, 5120, 32, 8, 32768, vocabulary=131072),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 8, 14336),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 8, 16384),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, vocabulary=151936, **TIED),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, vocabulary=151936, **TIED),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 2, 11008, vocabulary=151936, **TIED),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18944, vocabulary=152064, **UNTIED),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 8, 13824, vocabulary=152064, **UNTIED),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27648, vocabulary=152064, **UNTIED),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29568, vocabulary=152064, **UNTIED),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, **TIED),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, **TIED),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, **TIED),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288, **UNTIED),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408, **UNTIED),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600, **UNTIED),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 4, 6144, moe_intermediate_size=768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 4, 12288, moe_intermediate_size=1536),
    "gpt-oss-20b": _gpt_oss(24, 2880, 64, 8, 2880, num_local_experts=32),
    "gpt-oss-120b": _gpt_oss(36, 2880, 64, 8, 2880, num_local_experts=128),
    "deepseek-v3": DEEPSEEK_V3,
    "gemma-2-2b": _gemma2(26, 2304, 8, 4, 9216, head_dim=256),
    "gemma-2-9b": _gemma2(42, 3584, 16, 8, 14336, head_dim=256),
    "gemma-2-27b": _gemma2(46, 4608, 32, 16, 36864, head_dim=128),
    "phi-3-mini": _phi3(32, 3072, 32, 32, 8192, vocabulary=32064),
    "phi-4": _phi3(40, 5120, 40, 10, 17920, vocabulary=100352),
}
