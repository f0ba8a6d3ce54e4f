"""Tests of trainings on emulated GPUs that look into the emulation: what waits, what is copied, and what several GPUs do."""

import re
from functools import partial
from typing import Any

import ballast
import pytest
import torch
from ballast.torch.parameters import units
from ballast.torch.parameters.overlapped_gathers import AwaitedParameter
from ballast.torch.updates import sharded_state
from python.conftest import PACKAGE
from python.wrap.support import frozen_base
from python.wrap.support.emulated_ranks import Trained, train_on_gpu, train_several_on_gpu
from python.wrap.support.loops import Loop, Tower, check_equal, keywords, mean_square, mean_square_in_bfloat16, mlp_in_bfloat16
from python.wrap.support.ranks import run_ranks

pytestmark = pytest.mark.emulated
WAITS = ["wait of torch", "copy that waits", "kernel that is not late"]


def training(**options):
    torch.manual_seed(0)
    model = Tower().to("emulated")
    return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 20, device="emulated")


def waits_of(use) -> dict[str, int]:
    """Return how often torch lets this thread wait for the GPU: by a call of torch, by a copy of pageable memory, and by a
    kernel that the emulation cannot run late."""
    torch.emulated.reset_counts()
    use()
    return {call: torch.emulated.count(call) for call in WAITS if torch.emulated.count(call)}


def test_freed_memory_is_overwritten_and_used_again():
    tensor = torch.ones(100, device="emulated")
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(100, device="emulated")
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_results_are_written_by_the_stream():
    """The host continues before the result is there: a stream that does not wait for it may find what was there before."""
    into = torch.zeros(4, device="emulated")
    ready = torch.Event("emulated")
    assert waits_of(lambda: (into.add_(1), ready.record())) == {}
    ready.synchronize()
    assert into.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("stage", [0, 2])
def test_updates_of_a_lone_gpu_overlap_the_next_forward(stage):
    model, optimizer = training(stage=stage)
    mean_square(model, batch()).backward()
    optimizer.step()
    assert all(type(each) is AwaitedParameter for each in model.parameters() if each.requires_grad)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_clipping_waits_for_the_gpu_once(stage):
    model, optimizer = training(stage=stage)
    for _ in range(2):
        mean_square(model, batch()).backward()
        waits = waits_of(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
        optimizer.zero_grad()
        assert waits == {"wait of torch": 1}  # torch waits for the factor of all gradients


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3}, {"stage": 3, "update_in_backward": True}], ids=str)
def test_a_step_waits_for_the_gpu_only_where_a_value_is_read(options):
    model, optimizer = training(**options)
    inputs = batch()

    def step() -> torch.Tensor:
        loss = mean_square(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step()
    assert waits_of(step) == {}
    assert waits_of(lambda: step().item()) == {"wait of torch": 1}


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_deferred_model_is_made_on_the_gpu(stage, offload):
    def deferred() -> torch.nn.Module:
        with ballast.deferred():
            return Tower(width=48).to("emulated")

    plain = Loop(make_model=lambda: Tower(width=48), device="emulated").run(stage=stage, offload=offload)
    ours = Loop(make_model=deferred, device="emulated").run(stage=stage, offload=offload)
    with ballast.gather(plain.model), ballast.gather(ours.model):
        assert all(each.is_emulated for each in ours.model.parameters())
        check_equal(plain, ours)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@pytest.mark.parametrize("autocast", [False, True])
def test_full_and_sharded_parameters_train_to_the_same_bits(autocast, checkpointing):
    loop = Loop(make_model=partial(Tower, checkpointing), micro_steps=2, clip=0.5, autocast=autocast, device="emulated")
    full, sharded = loop.run(stage=2), loop.run(stage=3)
    with ballast.gather(sharded.model):
        check_equal(full, sharded)


def test_offloading_returns_the_memory_of_the_gpu():
    model, optimizer = training(stage=3)
    mean_square(model, batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with_training = torch.emulated.mem_get_info()[0]
    optimizer.offload()
    torch.emulated.empty_cache()
    without = torch.emulated.mem_get_info()[0]
    optimizer.reload()
    assert without > with_training


@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_frozen_base_is_streamed_to_the_gpu(tier, tmp_path):
    results = {}
    for where in ("device", tier):
        model = frozen_base.model_of().to("emulated")
        optimizer = frozen_base.wrapped(model, offload=frozen_base.moved(where, tmp_path))
        losses = frozen_base.train(model, optimizer)
        torch.emulated.empty_cache()
        free = torch.emulated.mem_get_info()[0]
        results[where] = (losses, frozen_base.values_of(model), optimizer.metrics(), free)
        optimizer.close()
        del model, optimizer
    expected, (losses, values, metrics, free) = results["device"], results[tier]
    assert losses == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(values, expected[1]))
    assert expected[2]["memory_bytes/device"] - metrics["memory_bytes/device"] > frozen_base.BASE / 2
    assert free - expected[3] > frozen_base.BASE / 2
    offload = {"parameters": tier, "state": tier}
    plan = ballast.plan(frozen_base.model_of(), gpu="h100", stage=3, offload=offload, host_memory="64GiB", drive_space="64GiB")
    assert plan.memory[tier]["frozen"] >= frozen_base.BASE
    of_base = {owner: count for owner, count in plan.memory[tier].items() if owner in ("frozen", "blocks", "records")}
    assert metrics[f"memory_bytes/{tier}"] >= sum(of_base.values())


IN_BF16 = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16}
EXACT: list[dict[str, Any]] = [
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "offload": "host"},
    {"stage": 2, "overlap_gathers": True},
    {"stage": 3, "activations": "host"},
]
ROUNDED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (IN_BF16, {"stage": 3, "wire": "int8"}),
    (IN_BF16, {"stage": 2, "wire": {"reduce": "int4"}, "gradient_format": "bf16"}),
    ({}, {"stage": 3, "state_format": "4bit"}),
    ({"make_optimizer": torch.optim.Adafactor}, {"stage": 3}),
]


def is_same(one: Trained, other: Trained) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


def test_two_ranks_train_with_nccl_as_on_the_cpu():
    configurations = [*(({}, options) for options in EXACT), *ROUNDED]
    for of_rank in run_ranks(2, train_on_gpu, PACKAGE, configurations):
        for (on_gpu, on_cpu), (changes, options) in zip(of_rank, configurations, strict=True):
            assert is_same(on_gpu, on_cpu), f"{changes}, {options}"
        exact = [on_gpu for on_gpu, _ in of_rank[: len(EXACT)]]
        assert all(is_same(each, exact[0]) for each in exact)


def test_two_ranks_train_with_two_optimizers_near_the_cpu():
    """Without an order of their exchanges the emulation of NCCL ends the ranks. cuBLAS adds in another order than the CPU."""
    first, second = run_ranks(2, train_several_on_gpu, PACKAGE, [2, 3])
    for on_gpu, on_cpu in first:
        torch.testing.assert_close(torch.tensor(on_gpu[0]), torch.tensor(on_cpu[0]), rtol=0.02, atol=1e-3)
    assert all(map(torch.equal, first[0][0][1], second[0][0][1]))


LAYERS, LAYER_BYTES = 16, 256 << 10


@pytest.fixture
def small_units(monkeypatch):
    """Let units and torch's cache be as small, relative to the model, as with a large model."""
    monkeypatch.setattr(units, "UNIT_ELEMENTS", LAYER_BYTES // 4)
    monkeypatch.setattr(sharded_state, "RETURNED_EVERY", LAYER_BYTES)


def layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(LAYERS))).to("emulated")


def losses_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = model(torch.linspace(-1, 1, 256, device="emulated")).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def leaving_free(count: int):
    """Leave this many bytes of the GPU free inside the block."""
    torch.emulated.empty_cache()
    return torch.emulated.taken(torch.emulated.mem_get_info()[0] - count)


def trained_in_plenty(**options) -> tuple[list[float], int]:
    """Return the losses of a training, and the bytes that it takes on the GPU."""
    model = layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **options)
    losses, taken = losses_of(model, optimizer), int(optimizer.metrics()["memory_bytes/device"])
    optimizer.close()
    return losses, taken


@pytest.mark.parametrize("offload", [None, "host"])
@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_move_to_a_gpu_without_room_for_them_twice(stage, offload, small_units):
    expected, taken = trained_in_plenty(stage=stage, offload=offload)
    model = layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, offload=offload)
    with leaving_free(taken - LAYERS // 2 * LAYER_BYTES):
        assert losses_of(model, optimizer) == expected


def test_a_run_resumes_on_a_gpu_without_room_for_parameters_twice(small_units, tmp_path):
    def wrapped(model, **options):
        return ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=2, **options)

    run = {"offload": {"state": f"nvme:{tmp_path}"}, "run": "again"}
    plain, first, again = layers(), layers(), layers()
    plain_optimizer, optimizer = wrapped(plain), wrapped(first, **run)
    assert losses_of(plain, plain_optimizer) == losses_of(first, optimizer)
    taken = int(optimizer.metrics()["memory_bytes/device"])
    optimizer.close()
    with leaving_free(taken - LAYERS // 2 * LAYER_BYTES):
        assert losses_of(again, wrapped(again, **run)) == losses_of(plain, plain_optimizer)


@pytest.mark.parametrize("has_model", [True, False])
def test_a_training_that_does_not_fit_next_to_parameters_of_torch_leaves_them(has_model, small_units):
    """Without its model, a training begins with the first gradient, when autograd still uses all parameters."""
    _, taken = trained_in_plenty(stage=2)
    model, untouched = layers(), layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model if has_model else None, stage=2)
    left = taken - LAYER_BYTES * (LAYERS if has_model else LAYERS // 2)
    with leaving_free(left), pytest.raises(ballast.OutOfMemoryError, match="B2003") as raised:
        losses_of(model, optimizer)
    assert "deferred()" in raised.value.remedy
    assert all(map(torch.equal, model.parameters(), untouched.parameters()))


def test_a_budget_counts_the_memory_that_torch_frees(caplog, small_units):
    caplog.set_level("INFO", "ballast")
    model = layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage="auto", offload="auto")
    with leaving_free(8 << 20):
        losses_of(model, optimizer)
    [budget] = re.findall(r"chosen for device ([\d.]+) MiB", caplog.text)
    assert float(budget) == pytest.approx(0.75 * 8 + 4, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
def test_closing_is_refused_where_the_gpu_lacks_memory_for_the_parameters(stage):
    model, optimizer = training(stage=stage)
    mean_square(model, batch()).backward()
    optimizer.step()
    with leaving_free(1000), pytest.raises(ballast.OutOfMemoryError, match="cannot close(.|\n)*close.gather=False"):
        optimizer.close()
    optimizer.close()
    assert mean_square(model, batch()).isfinite()
