"""Tests of ranks that use different units in stage 3: a unit that only some of them use counts as zero on the others."""

from functools import partial

import pytest
import torch
from python.wrap.support import different_uses
from python.wrap.support.different_uses import Training
from python.wrap.support.ranks import run_ranks

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs for mine, theirs in zip(one, other)
    )


def check_equal(ranks, cases):
    for found in run_ranks(ranks, different_uses.trained, cases):
        for case, each in zip(cases, found):
            assert equal(each, found[0]), case


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("checkpointing", ["none", "not reentrant", "reentrant"])
def test_stage_3_has_the_bits_of_stage_2(ranks, checkpointing, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    for clip, options in (("optimizer", {}), ("", {"max_grad_norm": 0.5})):
        of_stages = [{"stage": 2}, {"stage": 3}, {"stage": 3, "calls_differ": True, "offload": on_drive}]
        if not clip:
            of_stages.append({"stage": 3, "prefetch": 2, "keep_gathered": True})
        training = Training(ADAMW, clip=clip, drops=True, checkpointing=checkpointing)
        check_equal(ranks, [(training, {**each, **options}) for each in of_stages])


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_accumulated_pass_counts_zeros_for_what_a_rank_does_not_use(ranks):
    for clip in ("", "torch"):
        training = Training(SGD, passes=3, clip=clip, drops=True)
        cases = [(training._replace(counts_zeros=True), {"stage": 2}), (training, {"stage": 3})]
        check_equal(ranks, [*cases, (training._replace(checkpointing="reentrant"), {"stage": 3, "calls_differ": True})])


@pytest.mark.parametrize("ranks", [2, 3])
def test_updates_in_the_backward_pass_have_the_same_bits(ranks):
    training = Training(ADAMW)
    check_equal(ranks, [(training, {"stage": 2}), (training, {"stage": 3, "update_in_backward": True})])


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_optimizers_have_the_same_bits(ranks):
    training = Training(ADAMW, several=True)
    check_equal(ranks, [(training, {"stage": 2}), (training, {"stage": 3}), (training, {"stage": 3, "calls_differ": True})])


def test_parameters_are_those_of_data_parallel():
    training = Training(torch.optim.Adagrad, passes=2)
    expected = run_ranks(2, different_uses.trained_with_ddp, training)[0]
    [found] = run_ranks(2, different_uses.trained, [(training, {"stage": 3})])[0]
    torch.testing.assert_close(found[-len(expected) :], expected, rtol=1e-5, atol=1e-6)


def test_rank_0_logs_that_ranks_agree_from_now_on():
    (refused, lines), (_, of_others) = run_ranks(2, different_uses.differs_in_step, 4, {})
    assert refused == "" and of_others == []
    assert [line for line in lines if "as blocks.3, which rank 0 alone uses now" in line] == lines[-1:], lines


def test_a_later_difference_names_the_option_with_which_it_works():
    for (refused, _), (allowed, lines) in zip(
        run_ranks(2, different_uses.differs_in_step, 12, {}),
        run_ranks(2, different_uses.differs_in_step, 12, {"calls_differ": True}),
    ):
        assert refused.startswith(("B1003", "B1007", "B3301")) and "rank" in refused, refused
        assert allowed == "" and not any("different units" in line for line in lines)
    assert "calls_differ=True" in run_ranks(2, different_uses.differs_in_step, 12, {})[0][0]


def test_one_rank_evaluates_while_the_others_train():
    assert run_ranks(2, different_uses.evaluates_alone) == [[], [True] * 6]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_call_that_fails_on_one_rank_can_be_dropped_on_all(where):
    one, other = run_ranks(2, different_uses.fails_in_a_call, where)
    assert (one[0], other[0]) == (0, 1) and equal(one[1:], other[1:])


def test_a_step_that_one_rank_drops_is_refused():
    for refused in run_ranks(2, different_uses.ends_a_step_in_its_own_way):
        assert refused.startswith("B1001 cannot make a step: rank 1 discarded its gradients"), refused


def test_a_rank_that_stays_away_is_named():
    refused, _ = run_ranks(2, different_uses.comes_late, lost=[])
    assert refused.startswith("B3302") and "rank 1" in refused, refused
