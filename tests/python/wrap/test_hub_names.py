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
