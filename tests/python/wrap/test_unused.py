"""Tests of parameters without a gradient: those that no rank uses stay as they are, as in torch; others count as zero."""

from functools import partial

import pytest
import torch
from python.wrap.support import unused
from python.wrap.support.ranks import run_ranks
from python.wrap.support.unused import STEPS, Branches, OneUnit

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
KINDS = {
    "AdamW": ADAMW,
    "Adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, weight_decay=0.1, lr_decay=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, weight_decay=0.1),
}


def everywhere(folder, stages=(0, 1, 2, 3), **more):
    configurations = [
        *({"stage": stage, **offload} for stage in stages for offload in ({}, {"offload": "host"})),
        *({"stage": stage, "offload": {"state": f"nvme:{folder}"}} for stage in stages),
        {"stage": 3, "offload": f"nvme:{folder}"},
    ]
    of_one_unit = {"units": ["Branches"]}  # for OneUnit: else each of its layers is a unit
    return [{**each, **more, **(of_one_unit if each["stage"] == 3 else {})} for each in configurations]


def plain(kind=Branches, make=ADAMW, parts=2, **how):
    model = kind()
    optimizer = make(model.parameters())
    unused.train(model, optimizer, range(STEPS), range(parts), **how)
    return [each.detach() for each in model.parameters()], unused.counts_of(optimizer)


def require_same(one, other, *, bits=False):
    """Compare the values, and the counts of steps where both have one."""
    tolerance = {"rtol": 0, "atol": 0} if bits else {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(one[0], other[0], **tolerance)
    assert all(mine == others for mine, others in zip(one[1], other[1]) if mine is not None and others is not None)


def check_as_plain(ranks, configurations, kind=OneUnit, make=ADAMW, parts=2, *, bits=True, **how):
    """Compare trainings in these configurations with each other, bit for bit, and with a plain one."""
    expected = plain(kind, make, parts, **how)
    for found in run_ranks(ranks, partial(unused.trained, **how), kind, make, configurations, parts, ranks):
        for each in found:
            require_same(each, found[0], bits=bits)
        require_same(found[0], expected)
    return found[0]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_a_parameter_that_no_rank_uses_stays_as_it_is(name, ranks, tmp_path):
    is_factored = name == "Adafactor"
    configurations = [each for each in everywhere(tmp_path) if not is_factored or "nvme" not in str(each)]
    for kind in (Branches, OneUnit):
        of_kind = configurations if kind is OneUnit else [{"stage": 3}, *configurations[:1]]
        values, counts = check_as_plain(ranks, of_kind, kind, KINDS[name], bits=not is_factored)
        assert all(map(torch.equal, values[4:6], Branches().never.parameters()))
        assert counts[4:6] == ([0, 0] if name == "Adagrad" else [None, None])  # torch makes Adagrad's entries with it


@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_of_muon_stay_as_they_are(ranks, tmp_path):
    kind, make = partial(OneUnit, bias=False), partial(torch.optim.Muon, lr=1e-2)
    expected, _ = plain(kind, make)
    for found in run_ranks(ranks, unused.trained, kind, make, everywhere(tmp_path), 2, ranks):
        for each in found:
            require_same(each, found[0], bits=True)
        torch.testing.assert_close(found[0][0], expected, rtol=3e-2, atol=3e-3)  # sums in bfloat16
        assert torch.equal(found[0][0][2], Branches(bias=False).never.weight)


@pytest.mark.parametrize(("ranks", "parts"), [(1, 2), (2, 2), (2, 4)])
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_parameter_that_some_parts_of_a_batch_use_counts_as_zero_in_the_others(name, ranks, parts, tmp_path):
    check_as_plain(ranks, everywhere(tmp_path), make=KINDS[name], parts=parts, alone=True)
    check_as_plain(ranks, [{"stage": 2}, {"stage": 3}], Branches, KINDS[name], parts, alone=True)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_in_the_backward_pass_leave_them_out_too(ranks, alone, tmp_path):
    configurations = [{"stage": 2}, *everywhere(tmp_path, (3,), update_in_backward=True)]
    check_as_plain(ranks, configurations, parts=ranks, alone=alone)
    check_as_plain(ranks, [{"stage": 2}, {"stage": 3, "update_in_backward": True}], Branches, parts=ranks, alone=alone)


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_gradients_of_zeros_are_used(name):
    check_as_plain(1, [{"stage": 2}, {"stage": 3}], Branches, KINDS[name], set_to_none=False)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("stops_at", [2, 3])
def test_the_counts_are_those_of_before_after_a_restart(stops_at, in_backward, saves, tmp_path):
    options = {"stage": 3, "offload": {"state": f"nvme:{tmp_path}"}, "update_in_backward": in_backward}
    if not saves:
        options["run"] = "mine"
    for steps, ranks in ((range(stops_at), 2), (range(stops_at, 6), 2), (range(6, STEPS), 1 if not in_backward else 2)):
        found = run_ranks(ranks, unused.resumed, tmp_path / "saved", options, steps, 2, ranks)
    for each in found:
        require_same(each, plain())
