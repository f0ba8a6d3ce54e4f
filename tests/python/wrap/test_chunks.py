"""Tests of chunked_loss() and tiled(): the values and gradients of torch, and the activations of one part of the tokens."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ballast
import pytest
import torch
from python.wrap.support.ranks import run_ranks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, TOKENS, CHUNK, STEPS = 700, 32, 24, 5, 3
OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2}, {"num_items_in_batch": 7}, {"ignore_index": 3}]


class Words(torch.nn.Module):
    """Return the hidden states of tokens, which the head turns into logits."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.block = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.block(hidden)
        return loss(hidden[:, :-1], self.head, tokens[:, 1:])


def whole(hidden: torch.Tensor, head: torch.nn.Module, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the same loss, of all logits at once."""
    logits, labels, ignored = head(hidden).flatten(0, -2), labels.flatten(), options.get("ignore_index", -100)
    smoothing = options.get("label_smoothing", 0.0)
    total = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing, ignore_index=ignored)
    counts = labels != ignored
    total = total + options.get("z_loss", 0.0) * logits.logsumexp(-1).square()[counts].sum()
    return total / options.get("num_items_in_batch", counts.sum())


def chunked(hidden: torch.Tensor, head: torch.nn.Module, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    return ballast.chunked_loss(hidden, head, labels, chunk=CHUNK, **options)


def tokens_of(rank: int, step: int = 0) -> torch.Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randint(WORDS, (2, TOKENS))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_torch(options, bias):
    torch.manual_seed(0)
    head, labels = torch.nn.Linear(WIDTH, WORDS, bias=bias), tokens_of(0)
    labels[0, :9] = options.get("ignore_index", -100)
    seen = []
    for loss in (whole, chunked):
        hidden = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        value = loss(hidden, head, labels, **options)
        seen.append([value.detach(), *torch.autograd.grad(3 * value, [hidden, *head.parameters()])])
    for one, other in zip(*seen):
        torch.testing.assert_close(one, other)


def test_what_needs_no_gradient_gets_none():
    head, labels = torch.nn.Linear(WIDTH, WORDS).requires_grad_(False), tokens_of(0)
    hidden = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    chunked(hidden, head, labels).backward()
    assert head.weight.grad is None and hidden.grad is not None
    with torch.no_grad():
        assert not chunked(hidden, head, labels).requires_grad
    frozen = chunked(hidden.detach(), head.requires_grad_(True), labels)
    frozen.backward()
    assert head.weight.grad is not None and "forward" not in vars(head)


class Largest(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_is_larger_than_the_logits_of_a_chunk_or_the_head():
    model, tokens = Words(), tokens_of(0).expand(40, -1, -1).flatten(0, 1)
    with Largest() as largest:
        model(tokens, chunked).backward()
    assert largest.elements == max(tokens.numel() * 4 * WIDTH, WORDS * WIDTH, CHUNK * WORDS) < tokens.numel() * WORDS // 4


def train(rank: int, folder: str, chunks: bool, tied: bool, stage: int | None, **limited: str) -> tuple[list[float], int]:
    """Return the losses, and how often the head was gathered."""
    torch.manual_seed(0)
    model = Words(tied)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage, tuning=ballast.Tuning(timeline=True), **limited)
    losses = []
    for step in range(STEPS):
        loss = model(tokens_of(rank, step), chunked if chunks else whole)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if stage is None:
        return losses, 0
    file = Path(folder, f"{rank}.json")
    optimizer.write_timeline(file)
    unit = "gather embedding" if tied else "gather head"
    return losses, sum(event["name"] == unit for event in json.loads(file.read_text()))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_training_has_the_losses_of_one_with_all_logits(stage, tied, tmp_path):
    folder = str(tmp_path)
    body = partial(train, memory="1MiB") if stage == 3 else train  # nothing is kept gathered
    with_chunks, with_all = (run_ranks(2, body, folder, chunks, tied, stage) for chunks in (True, False))
    for (losses, gathers), (expected, _) in zip(with_chunks, with_all):
        assert losses == pytest.approx(expected, rel=1e-4)
        if stage == 3:  # forward and backward of the head, and of the embedding if it is tied; and the next step has begun
            assert STEPS <= gathers <= (4 if tied else 2) * STEPS + 1
    [(alone, _)] = run_ranks(1, train, folder, True, tied, stage)
    [(plain, _)] = run_ranks(1, train, folder, False, tied, None)
    assert alone == pytest.approx(plain, rel=1e-4)


def test_a_head_with_an_adapter_is_trained():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(Words(), peft.LoraConfig(target_modules=["head"], r=4, init_lora_weights=False))
    gradients = []
    for loss in (whole, chunked):
        model.zero_grad()
        model(tokens_of(0), loss).backward()
        gradients.append([each.grad.clone() for each in model.parameters() if each.requires_grad])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


def train_llama(rank: int, folder: str, loss: str = "", tiles: int = 0) -> tuple[list[float], Counter[str]]:
    """Return the losses, and how often each unit was gathered."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=8 * WIDTH, **sizes))
    for layer in model.model.layers if tiles else []:
        ballast.tiled(layer.mlp, tiles)
    options = {"tuning": ballast.Tuning(timeline=True), "memory": "1800KiB"}  # nothing is kept gathered
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, **options)
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(rank, step)
        if loss == "chunked":
            hidden = model.model(input_ids=tokens).last_hidden_state
            value = ballast.chunked_loss(hidden[:, :-1], model.lm_head, tokens[:, 1:], chunk=CHUNK)
        else:
            value = model(input_ids=tokens, labels=tokens).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    file = Path(folder, f"{rank}.json")
    optimizer.write_timeline(file)
    return losses, Counter(event["name"] for event in json.loads(file.read_text()) if event["name"].startswith("gather "))


def test_a_llama_has_the_losses_of_transformers_and_as_many_gathers(tmp_path):
    pytest.importorskip("transformers")
    folder = str(tmp_path)
    plain = run_ranks(2, train_llama, folder)
    for changed in (run_ranks(2, train_llama, folder, "chunked"), run_ranks(2, train_llama, folder, "", 4)):
        for (losses, gathers), (expected, of_plain) in zip(changed, plain):
            assert losses == pytest.approx(expected, rel=1e-4)
            assert all(times <= of_plain[unit] + 1 for unit, times in gathers.items())  # the next step has begun, or not


def test_wrong_shapes_are_refused():
    head = torch.nn.Linear(WIDTH, WORDS)
    with pytest.raises(ballast.UsageError, match="B1001 .*of different tokens"):
        ballast.chunked_loss(torch.zeros(2, 3, WIDTH), head, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ballast.UsageError, match="B1001 cannot compute the loss"):
        ballast.chunked_loss(torch.zeros(2, 3, WIDTH), head, torch.zeros(2, 3, dtype=torch.long), chunk=0)


# --- Tiles of a module ---


def mlp(inner: int = 4 * WIDTH) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, inner), torch.nn.GELU(), torch.nn.Linear(inner, WIDTH))


@pytest.mark.parametrize("tiles", [1, 3, 100])
@pytest.mark.parametrize("autocast", [False, True])
def test_tiles_have_the_values_and_gradients_of_the_module(tiles, autocast):
    seen = []
    for module in (mlp(), ballast.tiled(mlp(), tiles)):
        hidden = torch.randn(2, 11, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = module(hidden)
        value.float().square().sum().backward()
        seen.append([value.detach(), hidden.grad, *(each.grad for each in module.parameters())])
        assert list(module.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for one, other in zip(*seen):
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if autocast else {}
        torch.testing.assert_close(one, other, **tolerance)


def test_backward_draws_the_random_numbers_of_forward():
    module = ballast.tiled(torch.nn.Dropout(0.5), 4)
    hidden = torch.rand(9, WIDTH, requires_grad=True)
    value = module(hidden)
    state = torch.get_rng_state()
    value.sum().backward()
    assert torch.equal(hidden.grad * hidden, value)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_copy_of_a_tiled_module_is_one_of_its_own():
    module = ballast.tiled(ballast.tiled(mlp(), 2), 3)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other[2].weight.zero_()
        other[2].bias.zero_()
    assert not other(torch.ones(4, WIDTH)).any() and module(torch.ones(4, WIDTH)).any()
    with pytest.raises(ballast.UsageError, match="B1001 cannot compute a module in tiles"):
        ballast.tiled(module, 0)


def test_no_tensor_is_larger_than_a_tile():
    module, hidden = ballast.tiled(mlp(inner=64 * WIDTH), 20), torch.randn(400, WIDTH, requires_grad=True)
    with Largest() as largest:
        module(hidden).sum().backward()
    assert largest.elements == max(64 * WIDTH * WIDTH, 400 * WIDTH, 20 * 64 * WIDTH)


def train_tiles(rank: int, tiles: int, stage: int, checkpoints: bool) -> list[float]:
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), mlp()) for _ in range(3))
    for block in blocks if tiles else []:
        ballast.tiled(block[1], tiles)
    optimizer = ballast.wrap(torch.optim.AdamW(blocks.parameters(), lr=1e-2), blocks, stage=stage)
    losses = []
    for step in range(STEPS):
        hidden = torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        for block in blocks:
            hidden = hidden + (checkpoint(block, hidden, use_reentrant=False) if checkpoints else block(hidden))
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_training_with_tiles_has_the_losses_of_one_without(stage, checkpoints):
    for one, other in zip(*(run_ranks(2, train_tiles, tiles, stage, checkpoints) for tiles in (4, 0))):
        assert one == pytest.approx(other, rel=1e-4)


class Joined(torch.nn.Module):
    """A module whose two parameters have one tensor as their gradient, with an expert that only some tokens use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(2))
        self.expert, self.unused = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result = functional.linear(tokens, self.one + self.other)
        chosen = (tokens[..., 0] > 1.5).nonzero(as_tuple=True)
        if len(chosen[0]):
            result = result.index_put(chosen, self.expert(tokens[chosen]))
        return result


@pytest.mark.parametrize("in_chunks", [False, True])
def test_parameters_may_share_a_gradient_or_have_none(in_chunks):
    seen = []
    for changed in (False, True):
        module, hidden = Joined(), torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if in_chunks:
            (chunked if changed else whole)(hidden, module, torch.zeros(60, dtype=torch.long)).backward()
        else:
            (ballast.tiled(module, 9) if changed else module)(hidden).square().sum().backward()
        seen.append([hidden.grad, *(each.grad for each in module.parameters())])
        assert module.unused.weight.grad is None and module.expert.weight.grad is not None
    for one, other in zip(*seen):
        if one is not None:
            torch.testing.assert_close(one, other)


def test_nothing_is_computed_for_a_backward_that_does_not_come():
    head, labels, hidden = torch.nn.Linear(WIDTH, WORDS), tokens_of(0), torch.randn(2, TOKENS, WIDTH)
    expected = whole(hidden, head, labels).item()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), mock.patch("torch.autograd.grad", side_effect=AssertionError):
            assert chunked(hidden, head, labels).item() == pytest.approx(expected)
    value = chunked(hidden.requires_grad_(), head, labels)
    value.backward()
    with pytest.raises(RuntimeError, match="second time|one backward"):
        value.backward()


def test_hooks_of_saved_tensors_do_not_see_the_logits():
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor

    head, labels, hidden = torch.nn.Linear(WIDTH, WORDS), tokens_of(0), torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = chunked(hidden, head, labels)
    assert max(seen, default=0) <= 1
    again = checkpoint(lambda tokens: chunked(tokens, head, labels), hidden, use_reentrant=False)
    for one, other in zip(*(torch.autograd.grad(each, [hidden, head.weight]) for each in (value, again))):
        torch.testing.assert_close(one, other)


def test_a_tiled_module_that_changes_its_input_is_refused():
    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x *= 2
            return super().forward(x)

    module = ballast.tiled(Doubled(4, 4), tiles=2)
    with pytest.raises(ballast.UsageError, match="changes its input"):
        module(torch.ones(6, 4))


def test_other_calls_of_a_tiled_module_are_refused():
    assert ballast.tiled(mlp(), 4)(torch.zeros(0, WIDTH)).shape == (0, WIDTH)
    with pytest.raises(ballast.UsageError, match="B1001 cannot compute a module in tiles"):
        ballast.tiled(torch.nn.LSTM(WIDTH, WIDTH), 2)(torch.zeros(8, WIDTH))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        ballast.tiled(mlp(), 4)(tokens=torch.zeros(4, WIDTH))
