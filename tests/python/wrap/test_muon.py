"""Tests of torch's Muon, whose step needs whole matrices that several ranks have."""

from __future__ import annotations

import copy
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast.errors import Error
from python.wrap.support.loops import Loop
from python.wrap.support.ranks import run_ranks
from python.wrap.support.several import MUON_OPTIONS, Several, muon_of, same


def training_of_ranks(rank: int, **changes: Any) -> Several:
    return Several(muon_of(MUON_OPTIONS["defaults"]), loop=Loop(rank=rank, ranks=dist.get_world_size()), **changes)


def in_every_configuration(rank: int, folder: str) -> list[tuple[list[float], torch.Tensor]]:
    """Return the losses of each configuration, and all parameters at the end."""
    training = training_of_ranks(rank, micro_steps=2, clip=0.5)
    results = []
    for options in [
        {"stage": 0},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload": "host"},
        {"stage": 3, "offload": f"nvme:{folder}"},
    ]:
        losses, values = training.run(**options)
        results.append((losses, torch.cat([value.flatten() for value in values])))
    return results


def saved_and_resumed(rank: int, folder: str) -> bool:
    """Return whether a checkpoint of stage 3 continues with the same bits in stage 2."""
    training = training_of_ranks(rank)
    model, optimizers = training.begin(stage=3)
    training.train(model, optimizers, 0, 2)
    ballast.save(f"{folder}/saved", model, optimizers)
    expected = training.train(model, optimizers, 2, 2)
    again, resumed = training.begin(stage=2)
    ballast.load_checkpoint(f"{folder}/saved", again, resumed)
    return training.train(again, resumed, 2, 2) == expected


# Products of bf16 matrices are added in another order than torch's, and both round to bf16. Four steps move a
# value by up to 0.2.
TOLERANCE = 0.006


@pytest.mark.parametrize("options", MUON_OPTIONS.values(), ids=MUON_OPTIONS)
def test_one_rank_trains_as_torch_does(options, tmp_path):
    training = Several(muon_of(options), micro_steps=2, clip=0.5)
    plain, kept = training.run(), training.run(stage=0)
    torch.testing.assert_close(kept[0], plain[0], atol=2e-4, rtol=0.0)
    torch.testing.assert_close(kept[1], plain[1], atol=TOLERANCE, rtol=0.0)
    assert same(training.run(stage=3), kept)
    assert same(training.run(stage=3, offload="host"), kept)
    assert same(training.run(stage=3, offload=f"nvme:{tmp_path}"), kept)


def test_ranks_train_alike_at_every_stage_and_on_every_tier(tmp_path):
    results = run_ranks(2, in_every_configuration, str(tmp_path))
    for (losses, parameters), *others in results:
        for other_losses, other_parameters in others:
            assert other_losses == losses
            assert torch.equal(other_parameters, parameters)
    assert results[0][0][1].isfinite().all()


def matrix(rows=16, columns=32):
    return torch.nn.Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(1), device="cpu"))


def stepped(parameter, gradients, **options):
    optimizer = torch.optim.Muon([{"params": [parameter], **options}], lr=0.1)
    optimizer = ballast.wrap(optimizer)
    for gradient in gradients:
        (parameter * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(optimizer, torch.optim.Muon)
    return parameter.detach().clone(), optimizer


def test_blocks_are_orthogonalized_apart():
    gradients = [torch.randn(16, 32, generator=torch.Generator().manual_seed(seed), device="cpu") for seed in range(3)]
    for blocks, rows in ((4, [4] * 4), ([8, 4, 4], [8, 4, 4])):
        divided, _ = stepped(matrix(), gradients, blocks=blocks)
        parts = zip(matrix().detach().split(rows), zip(*(gradient.split(rows) for gradient in gradients)))
        apart = [stepped(torch.nn.Parameter(part.clone()), of_part)[0] for part, of_part in parts]
        assert torch.equal(divided, torch.cat(apart))
    assert not torch.equal(divided, stepped(matrix(), gradients)[0])


def test_polar_express_brings_singular_values_closer_to_one():
    gradient = torch.randn(16, 32, generator=torch.Generator().manual_seed(1), device="cpu")

    def spread(**options):
        parameter = matrix()
        before = parameter.detach().clone()
        after, _ = stepped(parameter, [gradient], weight_decay=0.0, **options)
        values = torch.linalg.svdvals((before - after) / 0.1)
        return float((values - 1).abs().max())

    assert spread(orthogonalization="polar_express") < 0.15 < 0.25 < spread(orthogonalization="newton_schulz")


def test_a_state_dict_goes_to_the_plain_optimizer_and_back():
    gradients = [torch.randn(16, 32, generator=torch.Generator().manual_seed(seed), device="cpu") for seed in range(2)]
    _, ours = stepped(matrix(), gradients)
    state = copy.deepcopy(ours.state_dict())
    plain = torch.optim.Muon([matrix()], lr=0.1)
    plain.load_state_dict(state)
    momentum = plain.state_dict()["state"][0]["momentum_buffer"]
    parameter = matrix()
    again = ballast.wrap(torch.optim.Muon([parameter], lr=0.1))
    again.load_state_dict(plain.state_dict())
    assert torch.equal(again.state[parameter]["momentum_buffer"], momentum)
    assert momentum.abs().sum() > 0


def test_a_checkpoint_resumes(tmp_path):
    assert run_ranks(2, saved_and_resumed, str(tmp_path)) == [True, True]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"blocks": 5}, "blocks=5"),
        ({"blocks": [8, 4]}, "are its rows"),
        ({"blocks": [10, 6]}, "a group of 128 elements"),
        ({"orthogonalization": "svd"}, "orthogonalization='svd'"),
        ({"adjust_lr_fn": "original", "ns_steps": 100}, "ns_steps"),
    ],
    ids=str,
)
def test_options_that_it_does_not_have_are_refused(options, words):
    with pytest.raises(Error) as raised:
        stepped(matrix(columns=24), [1.0], **options)
    assert words in str(raised.value)
