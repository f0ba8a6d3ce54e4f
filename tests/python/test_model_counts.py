"""Tests that the parameters counted for a configuration are those of the model that transformers builds from it."""

import sys

import ballast
import pytest
from ballast.models import describe
from ballast.models.known import KNOWN

torch = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: .ci/bootstrap venv frameworks")

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
SMALL_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 100}
GPT_NEOX_20B = {
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "vocab_size": 50432,
}
BERT_BASE = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
}
MISTRAL_7B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
MIXTRAL = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 32000}
QWEN2_05B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
DECODERS = [
    *[("gpt2", {**SMALL_GPT2, **more}) for more in ({}, {"n_inner": 100}, {"tie_word_embeddings": False})],
    *[
        ("gpt_neox", {**SMALL, **more})
        for more in (
            {},
            {"attention_bias": False},
            {"use_parallel_residual": False, "rotary_pct": 0.5},
            {"tie_word_embeddings": True},
        )
    ],
    ("gpt_neox", GPT_NEOX_20B),
    *[
        ("llama", {**SMALL, **more})
        for more in (
            {},
            {"num_key_value_heads": 2},
            {"num_key_value_heads": None},
            {"head_dim": 32},
            {"head_dim": None},
            {"attention_bias": True, "num_key_value_heads": 1},
            {"mlp_bias": True},
            {"tie_word_embeddings": True},
        )
    ],
    *[
        ("mistral", {**SMALL, "num_key_value_heads": 2, **more})
        for more in (
            {},
            {"head_dim": 32},
            {"attention_bias": True},  # Mistral ignores it and has no bias
            {"tie_word_embeddings": True},
        )
    ],
    ("mistral", {**SMALL, "num_attention_heads": 16}),  # the default is 8 heads of keys and values
    ("mistral", MISTRAL_7B),
    *[
        ("qwen2", {**SMALL, "num_key_value_heads": 2, **more})
        for more in ({}, {"num_key_value_heads": None}, {"attention_bias": True}, {"tie_word_embeddings": True})
    ],
    ("qwen2", {**SMALL, "num_attention_heads": 32}),
    ("qwen2", QWEN2_05B),
    *[
        ("qwen3", {**SMALL, "num_key_value_heads": 2, **more})
        for more in ({}, {"head_dim": 16}, {"attention_bias": True}, {"tie_word_embeddings": True})
    ],
    ("qwen3", {**SMALL, "num_attention_heads": 32}),
    ("qwen3", QWEN3_06B),
]
OTHERS = {
    "albert": ("AlbertForMaskedLM", {**SMALL, "embedding_size": 16}),
    "bert": ("BertForMaskedLM", BERT_BASE),
    "bloom": ("BloomForCausalLM", {"n_embed": 96, "n_layer": 3, "num_attention_heads": 4, "vocab_size": 100}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            **{**SMALL, "n_routed_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 32},
            **{"n_group": 4, "first_k_dense_replace": 1},
        },
    ),
    "falcon": ("FalconForCausalLM", SMALL),
    "gemma2": ("Gemma2ForCausalLM", {**SMALL, "head_dim": 16, "num_key_value_heads": 2}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**SMALL, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 8},
            "vision_config": {**SMALL, "model_type": "siglip_vision_model", "image_size": 56},
        },
    ),
    "gpt_oss": ("GptOssForCausalLM", {**SMALL, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8}),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {**SMALL, "model_type": "llama4_text", "num_local_experts": 4, "num_experts_per_tok": 1},
            "vision_config": {
                **{**SMALL, "model_type": "llama4_vision_model", "intermediate_size": 256, "image_size": 56},
                **{"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
            },
        },
    ),
    "mamba": ("MambaForCausalLM", SMALL),
    "mixtral": (
        "MixtralForCausalLM",
        {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 32}),
    "phi": ("PhiForCausalLM", SMALL),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",  # the language model's sizes are not in a part of their own
        {**SMALL, "num_key_value_heads": 2, "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**SMALL, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "num_key_value_heads": 2},
    ),
    "t5": ("T5ForConditionalGeneration", {"d_model": 64, "d_ff": 160, "num_layers": 3, "num_heads": 4, "vocab_size": 100}),
    "vit": ("ViTForImageClassification", SMALL),
    "wav2vec2": ("Wav2Vec2ForCTC", SMALL),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 160,
            "decoder_ffn_dim": 160,
            "vocab_size": 100,
            "pad_token_id": 0,
        },
    ),
    "clip": (
        "CLIPModel",
        {
            "text_config": {**SMALL, "model_type": "clip_text_model", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
            "vision_config": {**SMALL, "model_type": "clip_vision_model"},
        },
    ),
}


def built(architecture, config):
    """Return the model of a configuration, on the meta device."""
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return getattr(transformers, architecture)(settings)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def tensors_by_unit(described):
    return [sorted(tuple(tensor.shape) for tensor in unit.tensors) for unit in described.model.units]


def test_gpt_neox_20b_has_its_published_parameters():
    described = describe({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **GPT_NEOX_20B})
    assert described.parameters == 20_554_567_680


def test_bert_base_has_its_published_parameters():
    config = {"model_type": "bert", **BERT_BASE}
    assert describe({**config, "architectures": ["BertForMaskedLM"]}).parameters == 109_514_298
    assert describe({**config, "architectures": ["BertModel"]}).parameters == 109_482_240


def test_each_type_that_arithmetic_knows_is_compared():
    from ballast.models.config import EXACT

    assert {kind: architecture for kind, (architecture, _) in EXACT.items()} == ARCHITECTURES
    assert {kind for kind, _ in DECODERS} == set(EXACT)


@pytest.mark.parametrize(("kind", "sizes"), DECODERS)
def test_arithmetic_has_the_tensors_of_the_model_in_each_unit(kind, sizes):
    config = {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **sizes}
    model = built(ARCHITECTURES[kind], config)
    described = describe(config)
    assert described.parameters == count(model)
    assert described.unit_names[0] == "embedding"
    expected = tensors_by_unit(describe(model))
    if kind == "gpt2":  # its two embeddings are one unit
        expected = [sorted(expected[0] + expected[1]), *expected[2:]]
    assert tensors_by_unit(described) == expected
    assert bool(described.model.units[-1].ties) == bool(describe(model).model.units[-1].ties)


@pytest.mark.parametrize("name", KNOWN)
def test_known_names_are_the_models_of_transformers(name):
    assert describe(name).parameters == count(built(KNOWN[name]["architectures"][0], KNOWN[name]))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_types_are_counted_on_the_meta_device(kind):
    architecture, sizes = OTHERS[kind]
    config = {"model_type": kind, "architectures": [architecture], **sizes}
    random = torch.get_rng_state()
    described = describe(config)
    assert torch.equal(random, torch.get_rng_state())
    assert described.parameters == count(built(architecture, config))
    assert described.model.units[0].dtype.name == "bf16"


@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        ("bert", {"bert.encoder.layer": 12}),
        ("mixtral", {"model.layers": 3}),
        ("t5", {"encoder.block": 3, "decoder.block": 3}),
        ("vit", {"vit.layers": 3}),
        ("whisper", {"model.encoder.layers": 2, "model.decoder.layers": 3}),
        ("clip", {"text_model.encoder.layers": 3, "vision_model.encoder.layers": 3}),
    ],
)
def test_the_blocks_of_other_types_are_units(kind, blocks):
    architecture, sizes = OTHERS[kind]
    names = describe({"model_type": kind, "architectures": [architecture], **sizes}).unit_names
    for prefix, number in blocks.items():
        assert [f"{prefix}.{i}" for i in range(number)] == [name for name in names if name.startswith(f"{prefix}.")]


def test_another_class_of_a_known_type_is_counted_as_that_class():
    config = {"model_type": "llama", **SMALL}
    for architecture in ("LlamaModel", "LlamaForSequenceClassification"):
        assert describe({**config, "architectures": [architecture]}).parameters == count(built(architecture, config))


def test_a_configuration_object_of_transformers_is_counted():
    settings = transformers.BertConfig(**BERT_BASE, architectures=["BertModel"])
    assert describe(settings).parameters == 109_482_240


def test_the_class_that_is_trained_is_counted_where_a_configuration_names_none():
    for kind in ("bert", "mixtral", "qwen2_vl", "t5", "vit", "whisper"):
        architecture, sizes = OTHERS[kind]
        settings = transformers.CONFIG_MAPPING[kind].from_dict(dict(sizes))
        described = describe(settings)
        assert described.parameters == count(built(architecture, {"model_type": kind, **sizes}))
        assert described.notes[0] == f"counted as {architecture}: the configuration names no architecture"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**BERT_BASE}, "no model_type"),
        ({"model_type": "bert", "architectures": ["BertModel", "BertForMaskedLM"], **BERT_BASE}, "2 architectures"),
        ({"model_type": "bert", "architectures": ["BertOfMine"], **BERT_BASE}, "no model BertOfMine"),
        ({"model_type": "bert", "architectures": ["AutoConfig"], **BERT_BASE}, "no model AutoConfig"),
        ({"model_type": "bert", "architectures": ["GPT2Model"], **BERT_BASE}, "GPT2Model is a model of gpt2"),
        ({"model_type": "bertt", "architectures": ["BertModel"], **BERT_BASE}, "does not know this model_type"),
        ({"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 3}, "hidden_size is missing"),
        ({"model_type": "t5", "architectures": ["T5Model"], "vocab_size": 3}, "d_model is missing"),
        ({"model_type": "bert"}, "hidden_size is missing"),
        ({"model_type": "resnet", "architectures": ["ResNetModel"]}, "hidden_sizes is missing"),
        ({"model_type": "mixtral", **MIXTRAL}, "intermediate_size is missing"),
        ({"model_type": "mixtral", **MIXTRAL, "intermediate_size": 14336}, "num_local_experts is missing"),
        ({"model_type": "opt", **SMALL}, "ffn_dim is missing"),
        ({"model_type": "qwen3_moe", **SMALL, "num_experts": 16, "num_experts_per_tok": 4}, "moe_intermediate_size is missing"),
        ({"model_type": "clip", "architectures": ["CLIPModel"], "text_config": {}}, "vision_config is missing"),
        ({"model_type": "opt", **SMALL, "ffn_dim": 96, "num_attention_heads": 5}, "cannot build"),
        ({"model_type": "bert", "architectures": ["BertModel"], **BERT_BASE, "hidden_size": "big"}, "cannot read"),
    ],
)
def test_models_that_cannot_be_counted_exactly_are_refused(config, said):
    with pytest.raises(ballast.UsageError) as raised:
        describe({"vocab_size": 100, **config})
    assert said in str(raised.value)
    assert raised.value.needed or raised.value.remedy


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_quantized_weights_are_refused(kind):
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    for more in (quantized, {"text_config": quantized}):
        with pytest.raises(ballast.UsageError, match="quantized weights") as raised:
            describe({"model_type": kind, **SMALL, **more})
        assert "--dtype bf16" in raised.value.remedy
    in_bf16 = describe({"model_type": kind, **SMALL, **quantized}, dtype="bf16")
    assert in_bf16.parameters == describe({"model_type": kind, **SMALL}).parameters


def test_without_transformers_only_exact_types_are_counted(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert describe({"model_type": "gpt_neox", **GPT_NEOX_20B}).parameters == 20_554_567_680
    with pytest.raises(ballast.UsageError, match="transformers") as raised:
        describe({"model_type": "bert", "architectures": ["BertModel"], **BERT_BASE})
    assert "pip install transformers torch" in raised.value.remedy
