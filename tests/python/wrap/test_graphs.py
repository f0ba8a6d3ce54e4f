"""Tests of uncommon uses of autograd: gradients of gradients, and graphs that are used again."""

import pytest
import torch
from python.wrap.support import graphs
from python.wrap.support.ranks import run_ranks

PENALTIES = ["at the end", "in forward", "under autocast"]


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("keep_gathered", [False, True])
def test_a_penalty_on_gradients_trains_as_in_torch(penalty, keep_gathered, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    expected = graphs.penalized(penalty)
    ours = graphs.penalized(penalty, stage=3, offload=on_drive, keep_gathered=keep_gathered)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_penalty_on_gradients_trains_as_in_torch_on_two_ranks():
    expected = [graphs.penalized(penalty) for penalty in PENALTIES]
    for ours in run_ranks(2, graphs.penalized_on_each_rank, PENALTIES):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
