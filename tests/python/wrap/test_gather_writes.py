"""What is written to parameters inside ballast.gather() is kept, however it is written."""

import ballast
import pytest
import torch
from python.wrap import writing
from python.wrap.loops import Loop
from python.wrap.ranks import run_ranks

BF16 = torch.bfloat16
FORMATS = ["fp32", "split", "fp32 of bf16", "compact", "compact, stage 3"]


def options_of(folder):
    """By what must give the same bits: the options of each stage and tier."""
    tiers = [None, "host", f"nvme:{folder}", {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}]
    stages = [{"stage": stage, "offload": tier} for stage in range(3) for tier in tiers[:3]]
    stages += [{"stage": 3, "offload": tier} for tier in tiers]
    return {
        "fp32": (torch.float32, stages),
        "split": (BF16, stages),
        "fp32 of bf16": (BF16, [{**each, "state_format": "fp32"} for each in stages]),
        # Rounded by the element's place in its unit, and units are others in stage 3.
        "compact": (BF16, [{"stage": stage, "state_format": "compact"} for stage in range(3)]),
        "compact, stage 3": (BF16, [{"stage": 3, "state_format": "compact", "offload": tier} for tier in tiers]),
    }


def check_same_bits(results):
    first, *others = [tensors for ways in results for tensors in ways.values()]
    for other in others:
        assert len(other) == len(first)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, first))


@pytest.mark.parametrize("kept", FORMATS)
def test_every_way_of_writing_is_kept_at_every_stage_and_tier(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    check_same_bits(writing.trained_on_each_rank(0, dtype, options))


@pytest.mark.parametrize("kept", FORMATS)
def test_every_way_of_writing_is_kept_on_two_ranks(kept, tmp_path):
    dtype, options = options_of(tmp_path)[kept]
    for results in run_ranks(2, writing.trained_on_each_rank, dtype, options):
        check_same_bits(results)


@pytest.mark.parametrize("stage", range(4))
def test_a_write_leaves_alone_what_other_parameters_were_rounded_from(stage):
    """Those of its tile too."""
    undisturbed, disturbed = (writing.rounded_from(stage, write) for write in (None, writing.in_place_of_data))
    assert torch.equal(undisturbed, disturbed)


@pytest.mark.parametrize("stage", range(3))  # in stage 3 it is refused
def test_a_step_inside_of_gather_is_no_write(stage):
    outside, inside = (writing.steps_inside_of_gather(stage, gathers) for gathers in (False, True))
    assert torch.equal(outside, inside)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("by_data", [True, False])
def test_values_that_differ_between_ranks_are_refused_on_all_of_them(stage, by_data):
    for error in run_ranks(2, writing.writes_on_rank_1_only, stage, by_data):
        assert "cannot keep what was written to a parameter: ranks hold different values" in error
        assert "parameter 0.weight; rank 1 differs from rank 0" in error


@pytest.mark.parametrize("stage", range(4))
def test_what_one_rank_cannot_keep_is_refused_on_all_of_them(stage):
    first, second = run_ranks(2, writing.casts_on_rank_1_only, stage)
    assert "B3301 keeping what was written to parameters failed on other ranks" in first
    assert "torch.float64" in second and "parameter 0.weight" in second


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("assign", writing.ASSIGNMENTS)
def test_a_new_parameter_in_its_place_is_refused_and_loses_nothing(stage, assign):
    loop = Loop(steps=2)
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
    longer = loop.train(run.model, run.optimizer, 2)
    assert longer.losses == Loop(steps=4).run(stage=stage).losses[2:]
