"""Tests on several ranks: they train like torch's DistributedDataParallel."""

from contextlib import ExitStack

import pytest
import torch
from ports import free_port
from python.wrap.support import bodies, partitions
from python.wrap.support.loops import adapted, only_trained
from python.wrap.support.programs import Program
from python.wrap.support.ranks import run_ranks

REMEDY = "Call ballast.save() and ballast.load_checkpoint() on all ranks; or save and load a file for each rank."


def check_close(one, other, tolerance=1e-6):
    for mine, theirs in zip(one, other):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=10 * tolerance)


# The last bit of a sum can change how autocast rounds an activation to bfloat16, whose values are 2^-8 apart.
@pytest.mark.parametrize(
    ("ranks", "training", "tolerance"),
    [
        (2, {}, 1e-6),
        (2, {"micro_steps": 3, "clip": 0.05}, 1e-6),
        (3, {"micro_steps": 3, "clip": 0.05}, 1e-6),
        (4, {"micro_steps": 2, "clip": 0.05}, 1e-6),
        (2, {"autocast": True, "micro_steps": 3, "clip": 0.05}, 2e-4),
        (4, {"autocast": True}, 2e-4),
        (2, {"make_model": adapted, "make_optimizer": only_trained, "clip": 0.05}, 1e-6),
    ],
)
def test_all_stages_and_tiers_train_as_ddp_does_and_with_the_same_bits(ranks, training, tolerance, tmp_path):
    configurations = [{"stage": stage} for stage in (0, 1, 2, 3)]
    configurations += [{"stage": stage, "overlap_gathers": True} for stage in (0, 2)]
    configurations += [{"stage": 3, "keep_gathered": kept} for kept in (True, "1KiB")]
    configurations += [{"stage": 3, "prefetch": units} for units in (0, 3)]
    configurations += [{"stage": stage, "offload": where} for stage in (0, 2) for where in ("host", f"nvme:{tmp_path}")]
    for (losses, parameters), first, *others in run_ranks(ranks, bodies.in_every_configuration, training, configurations):
        check_close([torch.tensor(first[0])], [torch.tensor(losses)], tolerance)
        check_close(first[1], parameters, tolerance)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


@pytest.mark.parametrize("training", [partitions.freezes, partitions.begins_again])
def test_freezing_and_beginning_again_gives_the_same_bits_at_all_stages(training):
    for first, *others in run_ranks(2, training, [{"stage": stage} for stage in range(4)]):
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam])
def test_another_plan_keeps_the_masters(kind):
    configurations = [{"stage": stage} for stage in range(4)]
    if kind is torch.optim.AdamW:
        configurations += [{"stage": 3, "state_format": format} for format in ("fp32", "bf16", "compact", "4bit")]
    for undisturbed, disturbed in run_ranks(2, partitions.others_freeze, kind, configurations)[0]:
        assert (undisturbed != 1.0).any()
        assert torch.equal(undisturbed, disturbed)


def test_ranks_begin_with_the_parameters_of_rank_0():
    one, other = run_ranks(2, bodies.different_initial_values)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


def test_parameters_that_are_used_on_some_ranks_only():
    # All ranks gather the same units in stage 3.
    configurations = [{"stage": 0}, {"stage": 2}, {"stage": 2, "overlap_gathers": True}, {"stage": 3, "units": ("Routed",)}]
    for expected, *all_ours in run_ranks(2, bodies.routed, configurations):
        for ours in all_ours:
            check_close(ours, expected)


def test_a_rank_without_a_batch_adds_zeros():
    one, other = run_ranks(2, bodies.one_rank_has_no_batch)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


def test_a_state_dict_holds_a_ranks_shard_and_resumes():
    answers = run_ranks(2, bodies.saved_state)
    kept = [sum(values["exp_avg"].numel() for values in state.values()) for state, _, _ in answers]
    assert all(0 < count < 20 * 24 + 24 + 24 * 5 + 5 for count in kept)
    assert sum(kept) == 20 * 24 + 24 + 24 * 5 + 5
    for _, losses, loaded_losses in answers:
        assert losses == loaded_losses


def test_removing_a_part_of_sharded_state_is_refused():
    for said in run_ranks(2, partitions.loses_some_state):
        assert "B1001" in said and "parameter 2.weight" in said and "optimizer.state.clear()" in said


def test_a_state_dict_of_another_rank_is_refused():
    for rank, said in enumerate(run_ranks(2, bodies.loads_state_of_another_rank)):
        assert f"rank {rank} of 2 cannot load the state_dict() of rank {1 - rank} of 2" in said
        assert REMEDY in said


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_dict_of_one_of_several_ranks_warns_once(ranks, tmp_path):
    for rank, answers in enumerate(run_ranks(ranks, bodies.warnings_of_state_dicts, str(tmp_path), [0, 1, 2, 3])):
        for stage, (harmless, told) in enumerate(answers):
            assert harmless == []
            assert len(told) == int(ranks > 1 and stage > 0)
            assert all(f"the shard of rank {rank} of 2" in line and REMEDY in line for line in told)


def test_distributed_data_parallel_around_a_model_does_nothing_or_is_refused():
    for ours, expected, said in run_ranks(2, bodies.inside_of_ddp):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected))
        assert "DistributedDataParallel" in said
        assert "wrap(optimizer, model)" in said


def test_distributed_data_parallel_reduces_gradients_again_after_close():
    one, other = run_ranks(2, bodies.gradients_after_close)
    assert len(one) == 4 and all(map(torch.equal, one, other))


def test_a_process_group_limits_which_ranks_share():
    answers = run_ranks(4, bodies.with_tensor_parallelism, 2)
    assert answers[0] == answers[2] != answers[1] == answers[3]
    assert all(norm == pytest.approx(15.0) for norm, _ in answers)  # the norm of 100 elements, each the mean of 1 and 2


DIES = """
import os, torch, ballast
model = torch.nn.Linear(20, 5)
optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage={stage}, tuning=ballast.Tuning(timeout=120))
for step in range(5):
    model(torch.ones(20)).sum().backward()
    if step == 3 and os.environ["RANK"] == "1":
        raise RuntimeError("this batch is bad")
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_ends_by_an_error_ends_the_others_with_its_name(stage, environment, tmp_path):
    port = str(free_port())
    rendezvous = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "BALLAST_PORT": port}
    script = tmp_path / "dies.py"
    script.write_text(DIES.format(stage=stage))
    with ExitStack() as programs:
        environments = ({**environment, **rendezvous, "RANK": str(rank)} for rank in range(2))
        ranks = [programs.enter_context(Program([script], each)) for each in environments]
        first, second = (rank.wait(timeout=100).stderr for rank in ranks)
    assert "RuntimeError: this batch is bad" in second
    assert "B3301 rank 1" in first


def test_ranks_that_train_different_models_are_refused():
    failures = run_ranks(2, bodies.different_models)
    assert all(failure.startswith("B") for failure in failures), failures


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_has_begun_ends_where_state_is_loaded_or_the_optimizer_closed(ranks, stage):
    expected = run_ranks(ranks, bodies.in_every_configuration, {"steps": 4}, [{"stage": 0}])
    for (losses, parameters), (_, (right, right_parameters)) in zip(
        run_ranks(ranks, bodies.begins_a_step_and_loads, stage), expected
    ):
        assert losses == right
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(parameters, right_parameters))
