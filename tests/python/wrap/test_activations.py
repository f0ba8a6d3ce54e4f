"""Tests of activations that are offloaded to a drive: gradients, what is offloaded, and when its space is free."""

from __future__ import annotations

import gc
import os
import resource
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ballast
import pytest
import torch
from ballast._torch_compat import top_saved_tensor_hooks
from python.wrap.support.bodies import SMALL, offloading_everything, tower_loop
from python.wrap.support.frameworks import tiny_model
from python.wrap.support.loops import check_equal, mlp
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from python.wrap.support.resident import peak_resident
from torch.nn import functional


def losses_of_a_tower(rank: int, options: dict[str, Any]) -> tuple[list[float], list[torch.Tensor], dict[str, float]]:
    """Train a tower on this rank. Return its losses, its parameters and its figures."""
    with offloading_everything():
        run = tower_loop(rank=rank, ranks=2).run(**options)
    with ballast.gather(run.model):
        return run.losses, [each.tolist() for each in run.parameters], run.optimizer.metrics()


def file_of(directory: Path) -> Path:
    """Return a path of the nameless file that this process has open there."""
    [found] = [each for each in Path("/proc/self/fd").iterdir() if str(each.resolve()).startswith(f"{directory}/")]
    return found


@pytest.fixture
def offload(tmp_path):
    return ballast.offload_activations(f"nvme:{tmp_path}", **SMALL)


def gradients(compute, *shapes, block=None, backward=torch.Tensor.backward):
    """Return the gradients of leaves with these shapes, and those of a parameter that scales the first one."""
    torch.manual_seed(1)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    if block is None:
        loss = compute(*leaves)
    else:
        with block:
            loss = compute(*leaves)
    backward(loss)
    return [leaf.grad for leaf in leaves]


def attention(rows):
    query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in rows.tanh().chunk(3, dim=-1))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).square().sum()


def channels_last(image, weight):
    image = image.exp().to(memory_format=torch.channels_last)
    return functional.conv2d(image, weight, padding=1).relu().square().sum()


CASES = {
    "matrices": (lambda a, b: (a.tanh() @ b.exp()).square().sum(), (5, 7), (7, 3)),
    "transposed": (lambda a, b: (a.tanh().t() @ b.exp()[::2, 1:]).square().sum(), (5, 7), (10, 4)),
    "views of one memory": (attention, (2, 5, 48)),
    "channels last": (channels_last, (2, 3, 6, 6), (4, 3, 3, 3)),
    "broadcast": (lambda a, b: (a.exp().expand(4, 6) * b.exp()).square().sum(), (6,), (4, 6)),
    "complex": (lambda a: torch.fft.rfft(a.tanh()).abs().square().sum(), (12,)),
    "conjugate": (lambda a: torch.view_as_real(torch.fft.rfft(a.tanh()).conj() ** 2).sum(), (12,)),
    "integers": (lambda a: a.exp()[torch.tensor([2, 0, 2])].max(dim=0).values.square().sum(), (4, 5)),
    "scalar": (lambda a: a.sum().exp().square(), (4,)),
    "empty": (lambda a: a.exp()[:0].square().sum() + a.square().sum(), (4,)),
    "lstm": (lambda a: torch.nn.LSTM(6, 5)(a.exp())[0].square().sum(), (3, 2, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_have_the_same_bits(case, offload):
    compute, *shapes = CASES[case]
    plain = gradients(compute, *shapes)
    ours = gradients(compute, *shapes, block=offload)
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))
    assert offload.counters()["saved_bytes"] > 0
    assert offload.counters()["kept_bytes"] == 0


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_stage_trains_to_the_same_bits(checkpointing, autocast, tmp_path):
    loop = tower_loop(checkpointing, autocast=autocast)
    plain = loop.run(stage=2)
    for stage in (0, 1, 2, 3):
        with offloading_everything():
            ours = loop.run(stage=stage, activations=f"nvme:{tmp_path}")
        with ballast.gather(ours.model):
            check_equal(plain, ours)
        figures = ours.optimizer.metrics()
        assert figures["activation_bytes/saved"] == figures["activation_bytes/loaded"] > 0
        assert figures["activation_bytes/kept"] == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_train_to_the_same_bits(stage, tmp_path):
    plain = run_ranks(2, losses_of_a_tower, {"stage": stage})
    ours = run_ranks(2, losses_of_a_tower, {"stage": stage, "activations": f"nvme:{tmp_path}"})
    for (losses, parameters, _), (expected_losses, expected, _) in zip(ours, plain):
        assert losses == expected_losses and parameters == expected
    assert all(figures["activation_bytes/written"] > 0 for *_, figures in ours)


def test_tensors_come_back_with_their_strides_and_share_their_memory(offload):
    rows = torch.arange(48.0).view(4, 12)
    views = [rows.t(), rows[:, 4:8], rows.view(2, 2, 12).permute(2, 0, 1)[1:], rows[::2], rows[:0], rows[1, 3]]
    pack, unpack = offload.hooks
    packed = [pack(view) for view in views]
    assert offload.counters()["saved_bytes"] == rows.nbytes + 64  # the saved bytes begin at a multiple of 64 bytes
    restored = [unpack(each) for each in packed]
    for view, back in zip(views, restored):
        assert torch.equal(view, back) and view.stride() == back.stride() and view.dtype == back.dtype
    assert restored[0].untyped_storage().data_ptr() == restored[1].untyped_storage().data_ptr() != rows.data_ptr()


def test_a_part_of_a_large_tensor_is_saved_without_the_rest(offload):
    data = torch.arange(100_000.0)
    pack, unpack = offload.hooks
    packed = pack(data[5000:5016])
    assert offload.counters()["saved_bytes"] <= 16 * 4 + 64
    assert torch.equal(unpack(packed), data[5000:5016])


def test_what_is_saved_several_times_is_kept_once_until_it_changes(offload):
    leaf = torch.randn(1000, requires_grad=True)
    with offload:
        values = leaf.exp()  # saves its result
        first = values * values  # saves it twice more
        assert offload.counters()["saved_bytes"] == values.nbytes
        other = values.detach()
        scaled = torch.ones(1000, requires_grad=True) * other
        assert offload.counters()["saved_bytes"] == values.nbytes
        with torch.no_grad():
            other.add_(1)
        again = torch.ones(1000, requires_grad=True) * other
        assert offload.counters()["saved_bytes"] == 2 * values.nbytes
    again.sum().backward()
    for changed in (first, scaled):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            changed.sum().backward()


def test_parameters_and_their_views_stay(offload):
    trained, frozen = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)
    batch = torch.randn(8, 8, requires_grad=True)
    with offload:
        loss = (batch @ trained.t() @ frozen[:, 1:] @ trained.view(-1)[8:].view(7, 8)).sum()
    assert offload.counters()["saved_bytes"] == 8 * 7 * 4  # the left side of the last product
    loss.backward()
    assert trained.grad is not None and batch.grad is not None


def test_small_tensors_stay(tmp_path):
    offload = ballast.offload_activations(f"nvme:{tmp_path}", min_bytes=1024)
    leaf = torch.randn(256, requires_grad=True)
    with offload:
        small = leaf[:255].exp()[:100].exp()
        assert offload.counters().get("saved_bytes", 0) == 0
        large = leaf.exp()
        assert offload.counters()["saved_bytes"] == large.nbytes
    (small.sum() + large.sum()).backward()


@pytest.mark.parametrize("offloads", [True, False])
def test_a_change_in_place_raises_what_torch_raises(offloads, tmp_path):
    def changed(block):
        leaf = torch.randn(100, requires_grad=True)
        with block:
            values = leaf * 2
            loss = (values * values).sum()
            values.add_(1)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        return str(raised.value)

    ours = changed(ballast.offload_activations(f"nvme:{tmp_path}", min_bytes=1 if offloads else "1GiB"))
    plain = changed(torch.enable_grad())
    assert ours.split(" is at version")[0] == plain.split(", which is output")[0]
    assert "is at version 1; expected version 0 instead" in ours and "is at version 1; expected version 0 instead" in plain


def test_a_parameter_that_is_changed_before_backward_raises_too(offload):
    weight = torch.nn.Parameter(torch.ones(10))
    with offload:
        loss = (weight * weight).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_retained_graph_and_second_derivatives(offload):
    def twice(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    def of_gradients(compute, *leaves):
        loss = compute(*leaves)
        made = torch.autograd.grad(loss, leaves, create_graph=True)
        return sum(each.square().sum() for each in made)

    compute, *shapes = CASES["matrices"]
    second = partial(of_gradients, compute)
    for each, backward in ((compute, twice), (second, torch.Tensor.backward)):
        plain = gradients(each, *shapes, backward=backward)
        ours = gradients(each, *shapes, block=offload, backward=backward)
        assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))
    gc.collect()
    assert offload.counters()["kept_bytes"] == 0


def test_space_is_free_when_a_graph_is_dropped_and_after_an_exception(offload):
    leaf = torch.randn(100, requires_grad=True)
    with offload:
        loss = leaf.exp().exp()
    assert offload.counters()["kept_bytes"] == 2 * leaf.nbytes
    del loss
    assert offload.counters()["kept_bytes"] == 0
    with pytest.raises(ZeroDivisionError), offload:
        leaf.exp().exp() / (1 // 0)
    gc.collect()
    assert offload.counters()["kept_bytes"] == 0
    assert top_saved_tensor_hooks() is None
    assert offload.counters()["drive_bytes"] <= 3 << 20  # places are used again


def test_an_exception_in_a_wrapped_model_leaves_no_hooks(tmp_path):
    model = mlp()
    with offloading_everything():
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, activations=f"nvme:{tmp_path}")
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(3))
    assert top_saved_tensor_hooks() is None
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    assert optimizer.metrics()["activation_bytes/loaded"] > 0
    optimizer.close()
    model(torch.ones(20)).sum().backward()
    assert top_saved_tensor_hooks() is None


def test_hooks_around_a_wrapped_model_decide(tmp_path):
    """Activation checkpointing of the whole model saves nothing of it."""
    model = mlp()
    with offloading_everything():
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, activations=f"nvme:{tmp_path}")
    loss = torch.utils.checkpoint.checkpoint(model, torch.ones(4, 20), use_reentrant=False).sum()
    loss.backward()
    optimizer.step()
    assert optimizer.metrics().get("activation_bytes/saved", 0) == 0


def error_where_files_may_not_grow(rank, directory):
    """Return the error of a forward pass, and what is kept after it. The next forward pass needs less."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    offload = ballast.offload_activations(f"nvme:{directory}", **SMALL)
    leaf = torch.randn(1 << 18, requires_grad=True)
    with pytest.raises(ballast.ResourceError) as raised, offload:
        repeated_exp(leaf, 8)
    message = str(raised.value)
    del raised
    gc.collect()
    kept = offload.counters()["kept_bytes"]
    with offload:
        loss = repeated_exp(leaf, 3).sum()
    loss.backward()
    assert leaf.grad is not None and top_saved_tensor_hooks() is None
    return message, kept


def repeated_exp(values, times):
    for _ in range(times):
        values = values.exp()
    return values


def test_a_drive_without_space_is_an_error_and_training_can_continue(tmp_path):
    [(message, kept)] = run_ranks(1, error_where_files_may_not_grow, str(tmp_path))
    assert "B2202" in message and str(tmp_path) in message and "ulimit -f" in message
    assert kept == 0


def growth_of_the_peak(rank, directory):
    """Return by how much a step with 32 activations of 4 MiB raises the peak of resident memory."""
    offload = ballast.offload_activations(f"nvme:{directory}", in_flight="16MiB") if directory else nullcontext()
    leaf = torch.randn(1 << 20, requires_grad=True)
    leaf.sum().backward()
    before = peak_resident(begin=True)
    for _ in range(2):
        with offload:
            values = leaf
            for _ in range(32):
                values = values.tanh()
        loss = values.sum()
        del values
        loss.backward()
        del loss
    return peak_resident() - before


def test_memory_holds_what_is_in_flight_only(tmp_path):
    """Plain torch holds all activations. With the drive the process holds 16 MiB in flight, and a few activations that are
    being computed."""
    all_of_them = 32 * (4 << 20)
    [plain], [ours] = run_ranks(1, growth_of_the_peak, ""), run_ranks(1, growth_of_the_peak, str(tmp_path))
    assert plain > all_of_them - (8 << 20)
    assert ours < (16 << 20) + 8 * (4 << 20)


def test_other_bytes_on_the_drive_are_found(offload, tmp_path):
    leaf = torch.randn(1 << 18, requires_grad=True)
    with offload:
        loss = leaf.exp().exp().exp().exp().sum()
    assert not list(tmp_path.iterdir())  # the file has no name
    with open(file_of(tmp_path), "r+b") as file:
        file.write(b"other bytes")
        os.fsync(file.fileno())
    with pytest.raises(ballast.FailureError, match="B3202") as raised:
        loss.backward()
    assert str(tmp_path) in str(raised.value)
    assert leaf.grad is None


def test_impossible_options_are_refused(tmp_path):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for to, words in {
        "host": "on a CPU activations go to a drive only",
        "hots": 'Did you mean "host"',
        "nvme": "no directory is given",
        "nvme:/no/such/directory": "no directory",
        "host:/tmp": "the host has no directories",
    }.items():
        with pytest.raises(ballast.UsageError, match=words):
            ballast.offload_activations(to)
        with pytest.raises(ballast.UsageError, match=words):
            ballast.wrap(optimizer, model, activations=to)
    with pytest.raises(ballast.UsageError, match="without a model"):
        ballast.wrap(optimizer, activations=f"nvme:{tmp_path}")
    with pytest.raises(ballast.UsageError, match="not a size"):
        ballast.offload_activations(f"nvme:{tmp_path}", min_bytes=-1)
    model(torch.ones(20)).sum().backward()
    optimizer.step()  # nothing has changed


def losses_of_checkpoints(rank: int, folder: str, stage: int, theirs: bool, ours: bool) -> tuple[list[float], float]:
    """Train a Llama whose blocks are checkpoints. Return the losses, and the bytes of activations that Ballast has written."""
    model = tiny_model(64)
    pageable = torch.autograd.graph.save_on_cpu()  # transformers pins memory, which needs a GPU
    with patch("transformers.modeling_utils.save_on_cpu", lambda **_: pageable):
        return trained_checkpoints(rank, model, folder, stage, theirs, ours)


def trained_checkpoints(
    rank: int, model: Any, folder: str, stage: int, theirs: bool, ours: bool
) -> tuple[list[float], float]:
    model.activation_checkpointing_enable(offload=theirs)
    model.train()
    options = {"activations": f"nvme:{folder}"} if ours else {}
    with offloading_everything():
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, **options)
        losses, words = [], torch.arange(32).view(2, 16) + rank
        for _ in range(3):
            loss = model(input_ids=words, labels=words, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, optimizer.metrics().get("activation_bytes/saved", 0.0)


@pytest.mark.parametrize("stage", [2, 3])
def test_inputs_of_checkpoints_are_offloaded_by_transformers_or_by_ballast(stage, tmp_path):
    """Whose hooks are nearer to the block gets them: with those of transformers, Ballast has the other activations."""
    pytest.importorskip("transformers")
    both = [(theirs, ours) for theirs in (False, True) for ours in (False, True)]
    found = {each: run_ranks(2, losses_of_checkpoints, str(tmp_path), stage, *each, imported=FRAMEWORKS) for each in both}
    for rank in range(2):
        losses = [found[each][rank][0] for each in both]
        assert losses == [losses[0]] * 4
        inputs_of_blocks = 2 * 32 * 64 * 4  # bytes of a step
        assert found[False, True][rank][1] - found[True, True][rank][1] == inputs_of_blocks
