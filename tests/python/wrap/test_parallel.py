"""Tests of tensor parallelism, and of schedules that reduce gradients in the last pass only."""

import pytest
import torch
from python.wrap.support import parallel
from python.wrap.support.ranks import run_ranks


@pytest.mark.parametrize(("stage", "by_option"), [(2, True), (3, False)])
def test_two_halves_of_a_model_train_as_the_whole_with_one_norm(stage, by_option):
    for expected, norms, apart, skipped in run_ranks(4, parallel.halves_of_a_model, stage, by_option):
        assert norms == pytest.approx(expected, rel=1e-5)
        assert apart < 1e-6
        assert skipped == 1.0


def test_passes_without_a_reduction_are_reduced_with_the_last_one():
    each, last, none, one = ({}, 4, 0), ({"stage": 0}, 4, 3), ({"stage": 2}, 4, 4), ({}, 1, 0)
    configurations = [each, last, none, ({"stage": 2, "offload": "host"}, 4, 3), one]
    for trained in run_ranks(2, parallel.passes_reduced_together, configurations):
        (losses, parameters), bytes_each = trained[0]
        first, others = trained[1], trained[2:-1]
        _, bytes_of_one = trained[-1]
        assert bytes_each >= 4 * bytes_of_one
        assert first[0][0] == pytest.approx(losses, rel=1e-5)
        for mine, theirs in zip(first[0][1], parameters):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
        for (other_losses, other), bytes_reduced in others:
            assert bytes_reduced <= bytes_of_one
            assert other_losses == first[0][0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, first[0][1]))
