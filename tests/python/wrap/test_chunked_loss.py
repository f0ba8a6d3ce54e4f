"""Tests of chunked_loss(): the values and gradients of torch's loss, one call of the head, and the logits of one chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.ranks import run_ranks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

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


def train_llama(rank: int, chunks: bool) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, **sizes))
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    losses = []
    for step in range(STEPS):
        tokens = tokens_of(rank, step)
        if chunks:
            hidden = model.model(input_ids=tokens).last_hidden_state
            loss = ballast.chunked_loss(hidden[:, :-1], model.lm_head, tokens[:, 1:], chunk=CHUNK)
        else:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_llama_has_the_losses_of_transformers():
    pytest.importorskip("transformers")
    for one, other in zip(run_ranks(2, train_llama, True), run_ranks(2, train_llama, False)):
        assert one == pytest.approx(other, rel=1e-4)


def test_wrong_shapes_are_refused():
    head = torch.nn.Linear(WIDTH, WORDS)
    with pytest.raises(ballast.UsageError, match="B1001 .*of different tokens"):
        ballast.chunked_loss(torch.zeros(2, 3, WIDTH), head, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ballast.UsageError, match="B1001 cannot compute the loss"):
        ballast.chunked_loss(torch.zeros(2, 3, WIDTH), head, torch.zeros(2, 3, dtype=torch.long), chunk=0)
