"""Tests that writes to parameters inside ballast.gather() are kept, however they are made."""

import ballast
import pytest
import torch
from ballast.torch.parameters.writes import checksum_on_device
from python.wrap.support import writing
from python.wrap.support.loops import Loop
from python.wrap.support.ranks import run_ranks

BF16 = torch.bfloat16
ROUNDED = ["compact", "4bit"]
FORMATS = ["fp32", "split", "fp32 of bf16", *ROUNDED, *(f"{name}, stage 3" for name in ROUNDED)]


def options_of(folder):
    """Return for each format its dtype, and the options of stages and tiers that must all give the same bits."""
    tiers = [None, "host", f"nvme:{folder}", {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}]
    stages = [{"stage": stage, "offload": tier} for stage in range(3) for tier in tiers[:3]]
    stages += [{"stage": 3, "offload": tier} for tier in tiers]
    return {
        "fp32": (torch.float32, stages),
        "split": (BF16, stages),
        "fp32 of bf16": (BF16, [{**each, "state_format": "fp32"} for each in stages]),
        # Rounding depends on an element's index in its unit, and stage 3 has other units.
        **{name: (BF16, [{"stage": stage, "state_format": name} for stage in range(3)]) for name in ROUNDED},
        **{
            f"{name}, stage 3": (BF16, [{"stage": 3, "state_format": name, "offload": tier} for tier in tiers])
            for name in ROUNDED
        },
    }


def check_same_bits(results):
    first, *others = [tensors for by_write in results for tensors in by_write.values()]
    for other in others:
        assert len(other) == len(first)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, first))


@pytest.mark.parametrize("kept", FORMATS)
def test_every_kind_of_write_is_kept_at_every_stage_and_tier(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    check_same_bits(writing.trained_on_each_rank(0, dtype, options))


@pytest.mark.parametrize("kept", FORMATS)
def test_every_kind_of_write_is_kept_on_two_ranks(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    options = options if kept == "fp32" else options[FORMATS.index(kept) % 2 :: 2]
    for results in run_ranks(2, writing.trained_on_each_rank, dtype, options):
        check_same_bits(results)


@pytest.mark.parametrize("kept", ["fp32", "split"])
def test_every_kind_of_write_survives_a_backward_pass_that_is_dropped(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    check_same_bits([*writing.trained_on_each_rank(0, dtype, options), *writing.trained_on_each_rank(0, dtype, options, True)])


@pytest.mark.parametrize("stage", range(4))
def test_a_write_survives_the_end_of_a_training_in_the_middle_of_a_step(stage):
    weight = writing.closed_in_the_middle_of_a_step({"stage": stage, "offload": "host"})
    assert torch.equal(weight, torch.full_like(weight, 5.0))


def test_writes_in_the_middle_of_every_step_reach_all_uses_after_them(tmp_path):
    in_stage_3 = [{}, {"keep_gathered": True}, {"offload": {"parameters": "host", "state": "host"}}]
    in_stage_3 += [{"offload": {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}}]
    configurations = [{"stage": 2}, {"stage": 2, "offload": "host"}, *({"stage": 3, **options} for options in in_stage_3)]
    for by_moment in run_ranks(2, writing.losses_with_writes, configurations):
        for moment, (plain, *others) in by_moment.items():
            for options, losses in zip(configurations, others):
                assert losses == pytest.approx(plain, rel=1e-4), (moment, options)


@pytest.mark.parametrize("stage", range(4))
def test_a_write_does_not_change_masters_of_other_parameters(stage):
    """A write to a parameter does not change the masters of others, even in the same tile."""
    undisturbed, disturbed = (writing.rounded_from(stage, write) for write in (None, writing.in_place_of_data))
    assert torch.equal(undisturbed, disturbed)


@pytest.mark.parametrize("stage", range(3))
def test_a_step_inside_of_gather_is_no_write(stage):
    outside, inside = (writing.steps_inside_of_gather(stage, gathers) for gathers in (False, True))
    assert torch.equal(outside, inside)


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True}])
def test_in_stage_3_copies_are_gathered_that_no_step_updates(options):
    loop = Loop(steps=2)
    run = loop.run(stage=3, **options)
    with pytest.raises(ballast.UsageError, match="cannot (make a step|update parameters)(.|\n)*: parameters are gathered"):
        with ballast.gather(run.model):
            loop.steps = 3
            loop.train(run.model, run.optimizer, 2)


def test_in_stage_3_a_checkpoint_has_no_copies(tmp_path):
    run = Loop(steps=2).run(stage=3)
    with ballast.gather(run.model), pytest.raises(ballast.UsageError, match="save a checkpoint: parameters are gathered"):
        ballast.save(tmp_path, run.model, run.optimizer)


# In stage 3 each block ends with a write, and the master of a bf16 parameter restarts from the written values.
SWAPS = [(stage, torch.float32) for stage in range(4)] + [(stage, BF16) for stage in range(3)]


@pytest.mark.parametrize(("stage", "dtype"), SWAPS)
def test_averages_are_swapped_in_and_out_again(stage, dtype):
    """Swapping averages in and out through .data, as scripts do for an evaluation, changes nothing."""
    assert all(torch.equal(*pair) for pair in zip(*(writing.swapped(stage, dtype, swaps) for swaps in (0, 2))))


@pytest.mark.parametrize("stage", range(3))
def test_memory_of_a_parameter_that_another_tensor_uses_is_not_overwritten(stage):
    with pytest.raises(ballast.UsageError, match="another tensor uses the parameter's own memory(.|\n)*clone"):
        writing.swapped(stage, torch.float32, 1)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("by_data", [True, False])
def test_values_that_differ_between_ranks_are_refused_on_all_of_them(stage, by_data):
    for error in run_ranks(2, writing.writes_on_rank_1_only, stage, by_data):
        assert "cannot keep a write to a parameter: ranks hold different values" in error
        assert "parameter 0.weight; rank 1 differs from rank 0" in error


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("gathers", [True, False])
def test_values_that_differ_when_training_begins_are_refused(stage, gathers):
    for error in run_ranks(2, writing.begins_with_other_values, stage, gathers):
        assert "cannot begin to train: ranks hold different values" in error
        assert "parameter 0.weight; rank 1 differs from rank 0" in error


def test_an_exception_inside_of_gather_is_raised_on_its_rank():
    first, second = run_ranks(2, writing.raises_on_rank_1_only)
    assert "B3301 cannot keep writes of a block of ballast.gather(): " in first and "rank 1" in first
    assert second == "ValueError: mine"


@pytest.mark.parametrize("stage", range(4))
def test_writes_that_one_rank_cannot_keep_are_refused_on_all(stage):
    first, second = run_ranks(2, writing.casts_on_rank_1_only, stage)
    assert "B3301 keeping what was written to parameters failed on other ranks" in first
    assert "torch.float64" in second and "parameter 0.weight" in second


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("assign", writing.ASSIGNMENTS)
@pytest.mark.parametrize("steps", [0, 2])
def test_a_new_parameter_in_its_place_is_refused_and_loses_nothing(stage, assign, steps):
    loop = Loop(steps=steps)
    run = loop.run(stage=stage)
    weight = run.model[0].weight
    with pytest.raises(ballast.UsageError, match="cannot keep a new Parameter(.|\n)*0.weight(.|\n)*copy_"):
        with ballast.gather(run.model[0]):
            kept = weight.detach().clone()
            assign(run.model[0])
    assert run.model[0].weight is weight
    with ballast.gather(weight):
        assert torch.equal(weight, kept)
    loop.steps = 4
    longer = loop.train(run.model, run.optimizer, steps)
    assert longer.losses == Loop(steps=4).run(stage=stage).losses[steps:]


def test_a_checksum_on_a_device_detects_every_write():
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(BF16)
    changed = [values.clone() for _ in range(4)]
    changed[0][:2].neg_()
    changed[1][[0, 1]] = changed[1][[1, 0]]
    changed[2][-1] += 1
    changed[3].view(torch.int16)[1500] ^= 1
    known = [checksum_on_device(each.view(torch.uint8)) for each in (values, *changed)]
    assert len(set(known)) == len(known)
    assert checksum_on_device(values.clone().view(torch.uint8)) == known[0]
    assert checksum_on_device(torch.empty(0, dtype=torch.uint8)) == 0
