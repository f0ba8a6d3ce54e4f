"""Tests of what wrap(outer=...) refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import ballast
import pytest
import torch
from ballast import DiLoCo
from ballast.outer.hosts import host_ranks
from ballast.sizes import parse_size
from python.wrap.support.loops import Loop, keywords, mean_square, mlp
from python.wrap.support.outer import loop_of
from python.wrap.support.ranks import run_ranks


def error_of(rank: int, options_of: dict[int, dict[str, Any]]) -> str:
    """Return the error that a rank gets with its options."""
    try:
        loop_of(rank, steps=4).run(timeout=20, **options_of.get(rank, options_of[0]))
    except (ballast.Error, TypeError) as error:
        return str(error)
    return ""


def thaws(rank: int, options: dict[str, Any]) -> str:
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))
    mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].bias.requires_grad_(False)
    try:
        mean_square(model, torch.ones(20)).backward()
    except ballast.Error as error:
        return str(error)
    return ""


REFUSED = {
    "every=0": {"every": 0},
    "every=True": {"every": True},
    "cannot exchange 3 fragments within 2 steps": {"every": 2, "fragments": 3},
    "lr=0": {"every": 2, "lr": 0},
    "momentum=1": {"every": 2, "momentum": 1},
    "hosts=0": {"every": 2, "hosts": 0},
    "timeout=0": {"every": 2, "timeout": 0},
    "offload='nvme'": {"every": 2, "offload": "nvme"},
    "offload='host:/tmp'": {"every": 2, "offload": "host:/tmp"},
    "offload=None": {"every": 2, "offload": None},
    'there is no tier "disk"': {"every": 2, "offload": "disk"},
    'there is no wire format "int2"': {"every": 2, "wire": "int2"},
    "cannot use /not/there: it is no directory": {"every": 2, "offload": "nvme:/not/there"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_options_that_are_not_possible_are_refused(words):
    with pytest.raises(ballast.UsageError, match="B1001") as refused:
        DiLoCo(**REFUSED[words])
    assert words in str(refused.value)


def test_ranks_may_write_the_same_number_in_different_ways():
    assert DiLoCo(every=2, lr=1).shared() == DiLoCo(every=2, lr=1.0).shared()


def test_wraps_that_are_not_possible_are_refused(tmp_path):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ballast.UsageError, match="cannot use outer=64"):
        ballast.wrap(optimizer, model, outer=64)
    with pytest.raises(ballast.UsageError, match="exclude each other"):
        state = {"state": f"nvme:{tmp_path}"}
        ballast.wrap(optimizer, model, outer=DiLoCo(every=2), run="mine", offload=state)
    wrapped = ballast.wrap(optimizer, model)
    with pytest.raises(ballast.UsageError, match="there is no outer optimizer"):
        wrapped.exchange()


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_limit_of_memory_counts_what_the_table_of_memory_shows(fragments):
    """On a CPU all of it is on the device."""
    options, needed = {"stage": 2, "outer": DiLoCo(every=4, fragments=fragments)}, []
    for limited in ({"stage": 2}, options):
        with pytest.raises(ballast.OutOfMemoryError, match="B2004") as refused:
            Loop(steps=1).run(memory="1KiB", **limited)
        needed.append(bytes_of("device", refused.value.needed))
    run = Loop(steps=1).run(**options)
    tables = run.optimizer.memory().split("outer optimizer, ")[1:]
    exchanged = 4 * max(fragment.elements for fragment in run.optimizer._ballast.outer.fragments)
    expected = sum(bytes_of("device", table) for table in tables) + exchanged
    assert needed[1] - needed[0] == pytest.approx(expected, rel=0.005)  # they are shown with four digits
    Loop(steps=1).run(memory=int(1.01 * needed[1]), **options)


def bytes_of(tier, text):
    """Return the first size after the name of a tier."""
    return parse_size(re.search(rf"{tier} +([0-9.]+ \w+)", text)[1].replace(" ", ""))


def test_ranks_that_do_not_fit_together_are_refused():
    for words, options_of in {
        "cannot divide 3 ranks into 2 hosts": {0: {"outer": DiLoCo(every=2, hosts=2)}},
        "rank 1 has another every of DiLoCo than rank 0": {
            0: {"outer": DiLoCo(every=2, hosts=3)},
            1: {"outer": DiLoCo(every=4, hosts=3)},
        },
    }.items():
        assert all(words in error for error in run_ranks(3, error_of, options_of))


def test_hosts_with_other_shards_are_refused():
    options = {"stage": 3, "outer": DiLoCo(every=2, hosts=2)}
    others = {**options, "stage": 0}
    for error in run_ranks(4, error_of, {0: options, 2: others, 3: others}):
        assert "B1001 cannot train with outer=: the hosts have divided the parameters in different ways" in error
        assert "stage 3, " in error and " units; host 1 (" in error and "): stage 0, " in error


def test_hosts_with_other_numbers_of_ranks_are_refused():
    with pytest.raises(ballast.UsageError, match="different numbers of ranks") as refused:
        host_ranks(["one", "other", "one"], ["a", "b", "a"], None)
    assert refused.value.where == "a: 2, b: 1"


def copied(state_dict):
    """Return another state with the same values: the current one would change nothing."""
    state = {number: {name: value.clone() for name, value in each.items()} for number, each in state_dict["state"].items()}
    return {**state_dict, "state": state}


def test_other_shards_than_at_the_beginning_are_refused():
    run = Loop(steps=2).run(stage=2, outer=DiLoCo(every=4))
    run.optimizer.load_state_dict(copied(run.optimizer.state_dict()))
    Loop(steps=3).train(run.model, run.optimizer, 2)
    [fragment] = run.optimizer._ballast.outer.fragments
    key, span = next(iter(fragment.spans.items()))
    fragment.spans[key] = replace(span, first=1)
    run.optimizer.load_state_dict(copied(run.optimizer.state_dict()))
    with pytest.raises(ballast.UsageError, match="B1007 cannot continue to train: the stage or the units have changed"):
        Loop(steps=4).train(run.model, run.optimizer, 3)


def test_exchanges_of_gathered_or_cast_parameters_are_refused():
    run = Loop(steps=2).run(stage=3, outer=DiLoCo(every=4))
    with ballast.gather(run.model), pytest.raises(ballast.UsageError, match="B1007 cannot exchange parameters: .* gathered"):
        run.optimizer.exchange()
    run = Loop(steps=2).run(stage=2, outer=DiLoCo(every=4))
    run.model.to(torch.bfloat16)
    with pytest.raises(ballast.UsageError, match="cast"):
        run.optimizer.exchange()


def test_other_parameters_are_refused_after_the_beginning():
    for error in run_ranks(2, thaws, {"stage": 2, "outer": DiLoCo(every=2, hosts=2)}):
        assert "B1007 cannot train other parameters" in error
