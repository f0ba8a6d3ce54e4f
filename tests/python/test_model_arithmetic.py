"""Tests of the arithmetic that is counted for a model of transformers: experts, attention, and what a plan leaves out."""

import ballast
import pytest
from ballast.models import describe
from python.test_model_counts import ARCHITECTURES, OTHERS, SMALL, built, torch

# Mixtures of experts as published, with billions of parameters in all and for each token.
MIXTURES = {
    "mixtral": (
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "vocab_size": 32000,
        },
        (46.7, 12.9),
    ),
    "deepseek_v3": (
        {
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "vocab_size": 129280,
            "quantization_config": {"quant_method": "fp8"},
        },
        (671.0, 37.6),
    ),
    "gpt_oss": (
        {
            "head_dim": 64,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "sliding_window": 128,
            "vocab_size": 201088,
        },
        (20.9, 4.2),  # the published 3.6 are without the embedding
    ),
}


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "gpt2"])  # it has no torch.nn.Linear
def test_modules_have_the_arithmetic_of_the_configuration(kind):
    config = {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **SMALL, "head_dim": 16, "num_key_value_heads": 2}
    counted, read = describe(config), describe(built(ARCHITECTURES[kind], config), dtype="bf16")
    assert [each for each in read.attention if each.flops] == [each for each in counted.attention if each.flops] != []
    assert (read.activations, sum(read.flops)) == (counted.activations, sum(counted.flops))


@pytest.mark.parametrize("kind", MIXTURES)
def test_tokens_pass_through_some_of_the_experts(kind):
    sizes, (billions, active) = MIXTURES[kind]
    described = describe({"model_type": kind, "architectures": [OTHERS[kind][0]], **sizes}, dtype="bf16")
    assert described.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert described.active_parameters / 1e9 == pytest.approx(active, abs=0.05)
    embedding = sizes["vocab_size"] * sizes["hidden_size"]
    multiplied = described.active_parameters - embedding  # a few vectors remain, which multiply nothing
    assert sum(described.flops) / 2 == pytest.approx(multiplied, rel=0.002)


def test_attention_in_a_window_is_counted_up_to_the_window():
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **OTHERS["gpt_oss"][1], "head_dim": 16}
    inside, outside, *_ = (each for each in describe(config).attention if each.flops)
    assert (inside.of(4096), outside.of(4096)) == (4 * 64 * (8 - 64 / 8192), 2 * 64 * 4096)
    assert inside.of(2) == 2 * 64 * 2
    encoder = describe({"model_type": "vit", **SMALL}).attention[1]
    assert encoder.of(196) == 4 * 64 * 196  # nothing is masked


def test_adapters_leave_the_model_inside_and_its_frozen_matrices_take_half_of_backward():
    peft = pytest.importorskip("peft", reason="peft is not installed: .ci/bootstrap venv frameworks")
    model = built("LlamaForCausalLM", {"model_type": "llama", **SMALL})
    plain = describe(model, dtype="bf16")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"]))
    described = describe(adapted, dtype="bf16")
    assert (described.activations, described.attention) == (plain.activations, plain.attention)
    assert (described.longest, described.notes) == (plain.longest, plain.notes)
    adapters = 3 * 2 * (64 + 64)  # the adapters have rank 2, in three layers of width 64
    assert described.parameters == plain.parameters + adapters == sum(each.numel() for each in adapted.parameters())
    assert sum(described.flops) - sum(described.frozen_flops) == 2 * adapters
    planned = ballast.plan(adapted, dtype="bf16", gpu="h100", tokens=1024)
    assert "activations (estimated)" in planned.memory["device"]


def test_frozen_parameters_take_no_time_for_their_gradients():
    """Forward takes two flops for each element. Backward takes four, or two where the matrix is frozen."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False, device="meta") for _ in range(4)))
    figures = {"dtype": "bf16", "gpu": "h100", "tokens": 1 << 20, "efficiency": 0.5}  # of all operations

    def seconds():
        entries = ballast.plan(model, **figures).timeline()
        return sum(entry.end - entry.begin for entry in entries if entry.lane.name == "compute")

    trained = seconds()
    model[:3].requires_grad_(False)
    assert seconds() / trained == pytest.approx((4 * 6 - 3 * 2) / (4 * 6), rel=0.001)


def compute(**options):
    """Return the seconds of a step's arithmetic."""
    entries = ballast.plan("llama-8b", gpu="h100", gpu_memory="1TiB", **options).timeline()
    return sum(each.end - each.begin for each in entries if each.kind == "use")


def test_what_lies_between_products_takes_less_time_where_it_is_fused_or_kept():
    seconds = {how: compute(activations=how) for how in ("kept", "selective", "checkpointed")}
    fused = {how: compute(activations=how, compiled=True) for how in seconds}
    assert seconds["kept"] < seconds["selective"] < seconds["checkpointed"]
    assert all(fused[how] < seconds[how] for how in seconds)
    # "selective" repeats what lies between products: 4 passes over memory in eager torch, and 1 where it is fused.
    repeated = {each: found["selective"] - found["kept"] for each, found in (("eager", seconds), ("fused", fused))}
    assert repeated["eager"] == pytest.approx(4 * repeated["fused"], rel=1e-6)


def test_few_tokens_and_small_chunks_of_the_loss_load_matrices_more_often():
    few, many = (compute(tokens=tokens, sequence=256) / tokens for tokens in (256, 8192))
    assert few > 1.3 * many
    assert compute(loss_chunk=256) > compute(loss_chunk=8192) == compute()


def test_backward_repeats_checkpointed_blocks_and_not_the_head():
    """Backward takes 2 times as long as forward for matrices, and 2.5 times for attention, whose heads have 4096 elements."""
    options = {"gpu": "h200", "gpu_memory": "1TiB", "tokens": 4096, "dtype": "bf16", "efficiency": 0.5}  # of all operations
    between, described = 4 * 4096 * 4096 / 2, describe("llama-8b", dtype="bf16")
    block = described.flops[described.unit_names.index("layers.0")]
    for activations, repeated in (("checkpointed", 1), ("kept", 0)):
        entries = ballast.plan("llama-8b", activations=activations, **options).timeline()
        seconds = {(each.unit, each.phase.name): each.end - each.begin for each in entries if each.kind == "use"}
        assert seconds["head", "backward"] == pytest.approx(2 * seconds["head", "forward"])
        forward, backward = (seconds["layers.0", phase] for phase in ("forward", "backward"))
        expected = repeated + (2 * block + 2.5 * between) / (block + between)
        assert backward / forward == pytest.approx(expected)


def seen(kind, tokens, **changes):
    """Return by layer how many tokens one attends to on average, in heads of 64 elements together."""
    config = {"model_type": kind, "architectures": [ARCHITECTURES.get(kind, "Phi3ForCausalLM")], **SMALL, "pad_token_id": 0}
    config |= {"head_dim": 16, "num_key_value_heads": 2, **changes}
    described = describe(config)
    if kind in ARCHITECTURES:
        read = describe(built(ARCHITECTURES[kind], config))
        assert [each for each in read.attention if each.flops] == [each for each in described.attention if each.flops]
    return [each.of(tokens) / (4 * 64) for each in described.attention if each.flops]


def test_windows_are_those_of_the_configuration():
    """A token far in sees a whole window: 4096 tokens on average less half a window's share at the start, not half of 32768."""
    assert seen("mistral", 32768, sliding_window=4096) == seen("mistral", 32768) == [4096 - 4096 / 16] * 3
    assert seen("mistral", 32768, sliding_window=None) == [16384] * 3
    assert seen("phi3", 8188, sliding_window=2047) == [2047 - 2047 / 8] * 3
    assert seen("phi3", 8188, sliding_window=None) == [4094] * 3
    for kind in ("qwen2", "qwen3"):
        assert seen(kind, 1024, sliding_window=64, max_window_layers=1) == [512] * 3
        used = {"sliding_window": 64, "use_sliding_window": True}
        assert seen(kind, 1024, **used, max_window_layers=1) == [512, 62, 62]
        assert seen(kind, 1024, **used, max_window_layers=0) == [62] * 3
        assert seen(kind, 1024, **used) == [512] * 3  # only layers from 28 on have a window
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        assert seen(kind, 1024, **used, layer_types=types) == [62, 512, 62]


def test_a_plan_says_what_its_time_leaves_out():
    config = {kind: {"model_type": kind, "architectures": [name], **sizes} for kind, (name, sizes) in OTHERS.items()}
    plan = ballast.plan(config["mixtral"], host_memory="1GiB", activations="checkpointed")
    assert plan.notes == () and plan.active_parameters < plan.parameters
    assert "active for each token" in plan.text()
    assert "all parts of the model" in ballast.plan(config["gemma3"]).text()
    assert "all parts of the model" in ballast.plan(config["t5"]).text()
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))})
    assert "as if each token passed through all experts" in ballast.plan(experts).text()
