"""Tests of models of transformers whose files on the Hub have other tensors than their parameters, such as single experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.checkpoint import hub_names
from python.wrap.support.frameworks import as_launched
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(intermediate_size=48, num_local_experts=4),
    "Qwen3Moe": dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, head_dim=8),
    "DeepseekV3": dict(
        num_key_value_heads=4, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8,
        qk_nope_head_dim=8,
    ),
    "GptOss": dict(intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
}  # fmt: skip


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def loss_of(model: Any, rank: int) -> torch.Tensor:
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(rank))
    return model(input_ids=tokens, labels=tokens).loss


def read_and_train(rank: int, folder: str) -> list[str]:
    """Read each model from files as the Hub has them, in stage 3, and train it. Return what is not as without Ballast."""
    as_launched(rank)
    from ballast.integrations.transformers import from_pretrained

    wrong = []
    for name in MODELS:
        plain = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
        whole, read = [], hub_names.StoredTensor.read_all
        hub_names.StoredTensor.read_all = lambda stored: (whole.append(stored.shape), read(stored))[1]  # type: ignore
        model = from_pretrained(transformers.AutoModelForCausalLM, f"{folder}/{name}")
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
        with torch.no_grad():
            loss_of(model, 0)
        hub_names.StoredTensor.read_all = read
        wrong += [f"{name} read {shape} at once" for shape in whole if len(shape) > 2 and name != "GptOss"]
        with ballast.gather(model):
            wrong += [f"{name}: {own}" for own, each in plain.named_parameters() if not each.equal(model.get_parameter(own))]
        loss_of(model, rank).backward()
        ((loss_of(plain, 0) + loss_of(plain, 1)) / 2).backward()
        optimizer.step()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        ballast.export(model, f"{folder}/{name}/model.safetensors")
        optimizer.close()
        if rank == 0:  # transformers saves on this rank only
            plain.save_pretrained(f"{folder}/plain")
            expected, found = (load_file(f"{folder}/{each}/model.safetensors") for each in ("plain", name))
            wrong += [f"{name} has {each}" for each in expected.keys() ^ found.keys()]
            close = {each: torch.allclose(expected[each], found[each], atol=1e-6) for each in expected.keys() & found.keys()}
            wrong += [f"{name} differs in {each}" for each, is_close in close.items() if not is_close]
    return wrong


def test_experts_of_the_hub_are_read_one_at_a_time_and_written_back(tmp_path):
    for name in MODELS:
        model_of(name).save_pretrained(tmp_path / name)
        [experts] = [len(load_file(tmp_path / name / "model.safetensors")) - len([*model_of(name).state_dict()])]
        assert experts > 8 or name == "GptOss"
    assert run_ranks(2, read_and_train, str(tmp_path), imported=FRAMEWORKS) == [[], []]


@pytest.mark.parametrize("change", ["missing", "missing in one", "more", "other shape", "unknown"])
def test_experts_that_no_file_has_are_named(change, tmp_path):
    model_of("Mixtral").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    layer = "model.layers.1.block_sparse_moe.experts"
    if change.startswith("missing"):
        for each in ("w1", "w2", "w3") if change == "missing" else ("w1",):
            del tensors[f"{layer}.2.{each}.weight"]
    elif change == "more":
        tensors |= {f"{layer}.4.{each}.weight": tensors[f"{layer}.3.{each}.weight"].clone() for each in ("w1", "w2", "w3")}
    elif change == "other shape":
        tensors[f"{layer}.2.w1.weight"] = torch.zeros(40, 32)
    else:
        tensors[f"{layer}.2.w9.weight"] = torch.zeros(4)
    save_file(tensors, path, metadata={"format": "pt"})
    from ballast.integrations.transformers import from_pretrained

    with pytest.raises(ballast.UsageError, match=r"B1001(.|\n)*layers\.1\.(mlp|block_sparse_moe)\.experts"):
        from_pretrained(transformers.MixtralForCausalLM, tmp_path)
    assert Path(path).exists()


def renamed_models() -> dict[str, Any]:
    """Return models whose tensors have other names on the Hub, without any that are converted."""
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    text = transformers.LlamaConfig(**SIZES, intermediate_size=48)
    llava = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
    granite = transformers.GraniteMoeConfig(**SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2)
    qwen = transformers.Qwen2_5_VLConfig(
        text_config=dict(SIZES, intermediate_size=48, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
        vision_config=dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32),
    )
    return {
        "Llava": transformers.LlavaForConditionalGeneration(llava),
        "GraniteMoe": transformers.GraniteMoeForCausalLM(granite),
        "Qwen2.5-VL": transformers.Qwen2_5_VLForConditionalGeneration(qwen),
    }


def test_tensors_that_are_only_renamed_have_the_names_of_the_hub(tmp_path):
    for name, model in renamed_models().items():
        model.save_pretrained(tmp_path / name)
        expected = load_file(tmp_path / name / "model.safetensors")
        assert expected.keys() != model.state_dict().keys()
        ballast.export(model, tmp_path / name / "exported.safetensors")
        found = load_file(tmp_path / name / "exported.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[each].equal(values) for each, values in expected.items())
        values = {own: each.clone() for own, each in model.state_dict().items()}
        with torch.no_grad():
            for each in model.parameters():
                each.zero_()
        ballast.load(model, tmp_path / name / "exported.safetensors")
        assert all(each.equal(values[own]) for own, each in model.state_dict().items())


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, intermediate_size=48, **options))


def merge_one(model: Any, config: Any) -> None:
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    model.merge_adapter(["default"])  # set_adapter() would take it out again


LORA: dict[str, Any] = dict(r=2, init_lora_weights=False)
PARTLY: dict[str, tuple[dict[str, Any], str, str]] = {  # options; layer and reason in the error
    "DoRA": (LORA | dict(use_dora=True, target_modules=["q_proj"]), "0.self_attn.q_proj", "DoRA scales"),
    "bias": (LORA | dict(lora_bias=True, target_modules=["k_proj"]), "0.self_attn.k_proj", "lora_bias changes"),
    "tied head": (LORA | dict(target_modules=["q_proj", "lm_head"]), "lm_head", "another module has the same weight"),
    "tied words": (LORA | dict(target_modules=["embed_tokens"]), "embed_tokens", "another module has the same weight"),
    "variant": (LORA | dict(alora_invocation_tokens=[1], target_modules=["q_proj"]), "0.self_attn.q_proj", "variant"),
    "one merged": (LORA | dict(target_modules=["q_proj"]), "0.self_attn.q_proj", "some adapters of the layer are merged"),
}


def refused(model: Any, path: Path, layer: str, reason: str) -> None:
    with pytest.raises(ballast.UsageError) as caught:
        ballast.export(model, path, merge_adapters=True)
    assert all(each in str(caught.value) for each in ("B1001 cannot merge adapters", layer, reason)), caught.value
    assert not path.exists()


@pytest.mark.parametrize("case", PARTLY)
def test_adapters_that_would_be_merged_in_part_are_refused(case, tmp_path):
    peft = pytest.importorskip("peft")
    options, layer, reason = PARTLY[case]
    config = peft.LoraConfig(**options)
    model = peft.get_peft_model(llama(attention_bias=True, tie_word_embeddings="tied" in case), config)
    if case == "one merged":
        merge_one(model, config)
    refused(model, tmp_path / "model.safetensors", layer, reason)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {  # configs, their options, and the layer or adapter in the error
    "IA3Config": (dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "0.self_attn.k_proj"),
    "LNTuningConfig": (dict(target_modules=["input_layernorm"]), "0.input_layernorm"),
    "OFTConfig": (dict(oft_block_size=8, target_modules=["q_proj"]), "0.self_attn.q_proj"),
    "HRAConfig": (dict(r=2, target_modules=["q_proj"]), "0.self_attn.q_proj"),
    "VeraConfig": (dict(r=2, target_modules=["q_proj"]), "0.self_attn.q_proj"),
    "FourierFTConfig": (dict(n_frequency=8, target_modules=["q_proj"]), "0.self_attn.q_proj"),
    "PrefixTuningConfig": (dict(task_type="CAUSAL_LM", num_virtual_tokens=3), "adapter default"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_adapters_that_do_not_add_to_weights_are_refused(kind, tmp_path):
    peft = pytest.importorskip("peft")
    options, where = OTHERS[kind]
    model = peft.get_peft_model(llama(), getattr(peft, kind)(**options))
    refused(model, tmp_path / "model.safetensors", where, "does not add to weights")


@pytest.mark.parametrize("options", [dict(trainable_token_indices=[1, 2]), dict(target_parameters=["experts.down_proj"])])
def test_adapters_of_other_tensors_than_weights_are_refused(options, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("Mixtral"), peft.LoraConfig(**LORA, target_modules=["q_proj"], **options))
    where = "embed_tokens" if "trainable_token_indices" in options else "0.mlp.experts"
    refused(model, tmp_path / "model.safetensors", where, "add to weights")


def test_a_merge_that_is_refused_can_be_made_in_full(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(**PARTLY["DoRA"][0]))
    expected = model.merge_and_unload().state_dict()
    torch.manual_seed(0)
    model = peft.get_peft_model(llama(), peft.LoraConfig(**PARTLY["DoRA"][0]))
    adapters = [each for each in model.parameters() if each.requires_grad]
    optimizer = ballast.wrap(torch.optim.SGD(adapters, lr=0.0), model, stage=3)
    loss_of(model, 0).backward()
    optimizer.step()
    with ballast.gather(model):
        model.merge_and_unload().save_pretrained(tmp_path)
    optimizer.close()
    for name, each in load_file(tmp_path / "model.safetensors").items():
        torch.testing.assert_close(each, expected[name])


@pytest.mark.parametrize("is_injected", [False, True])
def test_adapters_are_merged_however_they_were_given_to_the_model(is_injected, tmp_path):
    peft = pytest.importorskip("peft")
    model, config = llama(), peft.LoraConfig(**LORA, target_modules=["q_proj"])
    if is_injected:
        model.add_adapter(config)
    else:
        model = peft.get_peft_model(model, config, mixed=True)
    ballast.export(model, tmp_path / "model.safetensors", merge_adapters=True)
    found, plain = load_file(tmp_path / "model.safetensors"), llama().state_dict()
    assert found.keys() == plain.keys()
    [layer, _] = [each for each in model.modules() if hasattr(each, "get_delta_weight")]
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(found[name], plain[name] + layer.get_delta_weight("default"))
