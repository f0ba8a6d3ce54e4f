"""Tests of activations of an emulated GPU, which go to the host or to a drive and return behind the GPU's work."""

import ballast
import pytest
import torch
from python.wrap.support.bodies import SMALL, offloading_everything, tower_loop
from python.wrap.support.loops import check_equal

pytestmark = pytest.mark.emulated


def tier(name, directory):
    return name if name == "host" else f"nvme:{directory}"


@pytest.mark.parametrize("checkpointing", ["none", "not reentrant"])
@pytest.mark.parametrize("to", ["host", "nvme"])
def test_every_stage_trains_to_the_same_bits(to, checkpointing, tmp_path):
    loop = tower_loop(checkpointing, device="emulated")
    plain = loop.run(stage=2)
    for stage in (0, 2, 3):
        with offloading_everything():
            ours = loop.run(stage=stage, activations=tier(to, tmp_path))
        with ballast.gather(ours.model):
            check_equal(plain, ours)
        figures = ours.optimizer.metrics()
        assert figures["activation_bytes/saved"] > 0 and figures["activation_bytes/kept"] == 0
        assert (figures["activation_bytes/written"] > 0) == (to == "nvme")


def layers_of(leaf, count):
    values = leaf
    for _ in range(count):
        values = values.tanh()
    return values.sum()


@pytest.mark.parametrize("to", ["host", "nvme"])
def test_the_device_holds_what_is_in_flight_only(to, tmp_path):
    """32 activations of 1 MiB are saved, and 2 MiB may be in flight. torch.emulated gives freed memory back at once when its
    cache is emptied."""
    offload = ballast.offload_activations(tier(to, tmp_path), **SMALL)
    leaf = torch.ones(1 << 18, device="emulated", requires_grad=True)
    torch.emulated.empty_cache()
    before = torch.emulated.mem_get_info()[0]
    loss = layers_of(leaf, 32)
    torch.emulated.empty_cache()
    assert before - torch.emulated.mem_get_info()[0] >= 32 << 20
    loss.backward()
    expected, leaf.grad = leaf.grad, None
    for _ in range(3):
        with offload:
            loss = layers_of(leaf, 32)
        torch.emulated.empty_cache()
        assert before - torch.emulated.mem_get_info()[0] <= 8 << 20  # the first gradient and what is computed now count
        loss.backward()
        assert torch.equal(leaf.grad, expected)
        leaf.grad = None


def test_the_host_tier_lets_the_trainer_wait_for_nothing(tmp_path):
    offload = ballast.offload_activations("host", min_bytes=1, in_flight="1GiB")
    leaf = torch.ones(1 << 12, device="emulated", requires_grad=True)

    def step():
        with offload:
            loss = layers_of(leaf, 8)
        loss.backward()

    step()
    torch.emulated.reset_counts()
    step()
    assert torch.emulated.count("wait of torch") == 0
    assert torch.emulated.count("copy that waits") == 0


def test_a_graph_that_is_dropped_while_it_is_loaded_ahead_frees_its_memory(tmp_path):
    offload = ballast.offload_activations("host", min_bytes=1, in_flight="64MiB")
    leaf = torch.ones(1 << 12, device="emulated", requires_grad=True)
    with offload:
        values = leaf.exp()
        first, second = values.exp(), values.exp().exp()
    second.sum().backward(retain_graph=True)
    del first, second, values
    assert offload.counters()["kept_bytes"] == 0
    leaf.grad = None
    with offload:
        loss = layers_of(leaf, 4)
    loss.backward()
    assert leaf.grad is not None


def test_activations_of_the_cpu_stay_where_there_is_a_gpu(tmp_path):
    offload = ballast.offload_activations("host", **SMALL)
    leaf = torch.ones(100, requires_grad=True)
    with offload:
        loss = leaf.exp().sum()
    assert offload.counters() == {}
    loss.backward()
