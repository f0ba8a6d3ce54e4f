"""Tests that estimated activations are the bytes that autograd keeps for models of transformers, and the peak of their loss."""

import pytest
from ballast.models import describe

torch = pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: .ci/bootstrap venv frameworks")

TOKENS = 64
SIZES = {"hidden_size": 256, "vocab_size": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1}
GPT2 = {"n_embd": 256, "n_head": 4, "vocab_size": 64, "n_positions": TOKENS, "bos_token_id": None, "eos_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Models with the ratios of published ones, and the bytes in bf16 that a block keeps for each token and hidden element, by hand.
MODELS = {
    "llama": ("Llama", {**SIZES, **HEADS, "intermediate_size": 896}, 16 + 4 + 1 + 8 * 3.5),
    "mistral": ("Mistral", {**SIZES, **HEADS, "intermediate_size": 896}, 16 + 4 + 1 + 8 * 3.5),
    "qwen2": ("Qwen2", {**SIZES, **HEADS, "intermediate_size": 1353}, 16 + 4 + 1 + 8 * 1353 / 256),
    "qwen3": ("Qwen3", {**SIZES, **HEADS, "intermediate_size": 768, "head_dim": 64}, 16 + 4 + 1 + 6 * 1.25 + 8 * 3),
    "gpt_neox": ("GPTNeoX", {**SIZES, "num_attention_heads": 4, "intermediate_size": 1024}, 8 + 12 + 4 * 4),
    "gpt2": ("GPT2", {**GPT2, **NO_DROPOUT}, 8 + 8 + 10 * 4),
    "phi3": ("Phi3", {**SIZES, "num_attention_heads": 4, "intermediate_size": 683}, 16 + 12 + 8 * 683 / 256),
    "opt": ("OPT", {**SIZES, "num_attention_heads": 4, "ffn_dim": 1024, "dropout": 0.0}, 8 + 8 + 2 * 4),
    "mixtral": (
        "Mixtral",
        {**SIZES, **HEADS, "intermediate_size": 896, "num_local_experts": 4, "num_experts_per_tok": 2},
        16 + 4 + 1 + 2 * (4 + 8 * 3.5),
    ),
}


def config_of(kind, layers=2):
    name, sizes, _ = MODELS[kind]
    depth = {"n_layer" if kind == "gpt2" else "num_hidden_layers": layers}
    architecture = f"{name}LMHeadModel" if kind == "gpt2" else f"{name}ForCausalLM"
    return {"model_type": kind, "architectures": [architecture], **sizes, **depth}


def model_of(kind, layers, dtype):
    config = config_of(kind, layers)
    settings = transformers.CONFIG_MAPPING[kind].from_dict(dict(config))
    model = getattr(transformers, config["architectures"][0])._from_config(settings, attn_implementation="sdpa")
    return model.to(dtype).train()


def kept_bytes(model):
    """Return the bytes of all storages that a forward pass keeps for backward, without the parameters."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor: its address must not be used again
        return tensor

    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="cpu")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("kind", MODELS)
def test_a_block_keeps_what_autograd_keeps(kind):
    described = describe(config_of(kind))
    assert described.activations.block == pytest.approx(MODELS[kind][2] * 256, abs=1)
    measured = [kept_bytes(model_of(kind, layers, torch.bfloat16)) for layers in (1, 2)]
    # The CPU's attention copies its result where a projection is fused. Attention keeps four bytes for each head, too.
    assert (measured[1] - measured[0]) / TOKENS == pytest.approx(described.activations.block, rel=0.045)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_a_block_in_fp32_keeps_elements_of_four_bytes(kind):
    described = describe(config_of(kind), dtype="fp32")
    by_hand = {"llama": 24 + 8 + 2 + 16 * 3.5, "qwen3": 24 + 8 + 2 + 8 * 1.25 + 16 * 3, "gpt_neox": 2 * (8 + 12 + 4 * 4)}
    assert described.activations.block == by_hand[kind] * 256
    measured = [kept_bytes(model_of(kind, layers, torch.float32)) for layers in (1, 2)]
    assert (measured[1] - measured[0]) / TOKENS == pytest.approx(described.activations.block, rel=0.03)
    assert describe(model_of(kind, 2, torch.float32)).activations == described.activations


def test_the_loss_of_transformers_takes_twelve_bytes_for_each_logit():
    sizes = {**config_of("llama", layers=1), "hidden_size": 32, "intermediate_size": 32, "vocab_size": 8192}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="cpu")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    described = describe(sizes)
    estimated = described.activations.bytes(TOKENS, "kept")
    assert peak(step) == pytest.approx(estimated, rel=0.05)
    assert 12 * 8192 * TOKENS <= estimated <= 13 * 8192 * TOKENS


def peak(step):
    """Return the most bytes that tensors of a step have at one time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
