"""Several processes: beside torch's own data parallelism."""

import socket
import subprocess
import sys

import pytest
import torch
from python.wrap import bodies
from python.wrap.ranks import run_ranks


def check_close(one, other):
    for mine, theirs in zip(one, other):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("micro_steps", "clip"), [(1, None), (3, 0.05)])
def test_all_stages_and_tiers_train_as_ddp_does_and_with_the_same_bits(ranks, micro_steps, clip, tmp_path):
    ways = [{"stage": stage} for stage in (0, 1, 2)]
    ways += [{"stage": stage, "offload": where} for stage in (0, 2) for where in ("host", f"nvme:{tmp_path}")]
    for (losses, parameters), first, *others in run_ranks(ranks, bodies.in_every_way, micro_steps, clip, ways):
        torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(losses), atol=1e-6, rtol=1e-5)
        check_close(first[1], parameters)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


def test_ranks_begin_with_the_first_ones_parameters():
    one, other = run_ranks(2, bodies.different_beginnings)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_that_are_used_on_some_ranks_only(stage):
    expected = run_ranks(2, bodies.routed, None)
    for mine, theirs in zip(run_ranks(2, bodies.routed, stage), expected):
        check_close(mine, theirs)


def test_a_rank_without_a_batch_adds_zeros():
    one, other = run_ranks(2, bodies.one_rank_has_no_batch)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


def test_a_state_dict_holds_a_ranks_part_and_goes_on_from_there():
    answers = run_ranks(2, bodies.saved_state)
    kept = [sum(values["exp_avg"].numel() for values in state.values()) for state, _, _ in answers]
    assert all(0 < count < 20 * 24 + 24 + 24 * 5 + 5 for count in kept)
    assert sum(kept) == 20 * 24 + 24 + 24 * 5 + 5
    for _, losses, loaded_losses in answers:
        assert losses == loaded_losses


def test_a_process_group_limits_who_shares():
    answers = run_ranks(4, bodies.beside_tensor_parallelism, 2)
    assert answers[0] == answers[2] != answers[1] == answers[3]
    assert all(norm == pytest.approx(15.0) for norm, _ in answers)  # the mean of 1 and 2, a hundred times


DIES = """
import os, torch, ballast
model = torch.nn.Linear(20, 5)
optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage={stage}, timeout=120)
for step in range(5):
    model(torch.ones(20)).sum().backward()
    if step == 3 and os.environ["RANK"] == "1":
        raise RuntimeError("this batch is bad")
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_ends_by_an_error_ends_the_others_with_its_name(stage, environment):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BALLAST_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DIES.format(stage=stage)],
            env={**environment, **meeting, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (rank.communicate(timeout=100)[1] for rank in ranks)
    assert "RuntimeError: this batch is bad" in second
    assert "B3301 rank 1" in first


def test_ranks_that_train_different_models_are_told():
    failures = run_ranks(2, bodies.different_uses)
    assert all(failure.startswith("B") for failure in failures), failures
