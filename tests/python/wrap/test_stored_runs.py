"""Tests of the state that the library keeps for an own step: in runs, where its size decides, and where it is refused."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from functools import partial
from pathlib import Path

import ballast
import pytest
import torch
from python.wrap.support import kept_runs
from python.wrap.support.custom_optimizers import UserOptimizer, check_same_state, on_drive, own_step_loop, state_of
from python.wrap.support.kept_runs import Layers, Stoppable, kept_in, train
from python.wrap.support.loops import Loop, Tower, keywords, mlp


def train_until_stopped(folder: str) -> None:
    Stoppable.stops = True
    train(Layers(), 0, 5, kind=Stoppable, elementwise=True, tile=128, **kept_in(Path(folder)))


# --- Runs ---


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.ASGD])
def test_a_run_resumes_with_values_and_numbers(kind, tmp_path):
    options = {"kind": kind, "tile": 128, **kept_runs.kept_in(tmp_path)}
    _, whole = kept_runs.train(kept_runs.Layers(), 0, 5, kind=kind, stage=3)
    assert kept_runs.train(kept_runs.Layers(), 0, 2, **options) == (0, whole[:2])
    assert kept_runs.train(kept_runs.Layers(), 0, 3, **options) == (2, whole[2:3])
    assert kept_runs.train(kept_runs.Layers(), 0, 5, **options) == (3, whole[3:])


def test_a_process_that_is_killed_in_a_step_resumes_before_it(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=train_until_stopped, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    _, whole = kept_runs.train(kept_runs.Layers(), 0, 5, kind=torch.optim.NAdam, stage=3)
    options = {"kind": kept_runs.Stoppable, "elementwise": True, "tile": 128, **kept_runs.kept_in(tmp_path)}
    assert kept_runs.train(kept_runs.Layers(), 0, 5, **options) == (2, whole[2:])


def test_state_that_was_cleared_begins_again_in_a_run(tmp_path):
    ended = []
    for options in ({"stage": 3}, kept_runs.kept_in(tmp_path)):
        model = kept_runs.Layers()
        optimizer = ballast.wrap(torch.optim.NAdam(model.parameters(), lr=1e-2), model, **keywords(**options))
        own_step_loop(steps=2).train(model, optimizer)
        optimizer.state.clear()
        own_step_loop(steps=5).train(model, optimizer, 2)
        ended.append(state_of(optimizer))
        optimizer.close()
    check_same_state(*ended)
    assert ended[0][0]["step"] == 3


class Amsgrad(torch.optim.AdamW):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr, amsgrad=True)


class AmsgradOfAdam(torch.optim.Adam):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr, amsgrad=True)


def test_a_run_is_not_resumed_by_another_optimizer_with_as_many_values(tmp_path):
    options = {"elementwise": True, **kept_runs.kept_in(tmp_path)}
    kept_runs.train(kept_runs.Layers(), 0, 2, kind=Amsgrad, **options)
    with pytest.raises(ballast.UsageError, match="B1009 cannot resume the run: it keeps exp_avg, exp_avg_sq, max_exp"):
        kept_runs.train(kept_runs.Layers(), 0, 3, kind=AmsgradOfAdam, **options)
    assert kept_runs.train(kept_runs.Layers(), 0, 3, kind=Amsgrad, **options)[0] == 2


class Numbered(torch.optim.RMSprop):
    """Keeps another number for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["text"] = f"{number} " + "x" * 40_000


def test_numbers_for_which_a_commit_has_no_room_are_refused(tmp_path):
    options = {"kind": Numbered, "elementwise": True, **kept_runs.kept_in(tmp_path)}
    with pytest.raises(ballast.UsageError, match="its scalar state differs from parameter to parameter"):
        kept_runs.train(kept_runs.Layers(), 0, 1, **options)


# --- Choosing ---


def test_memory_and_drives_are_chosen_by_what_the_step_keeps(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="ballast")
    loop = Loop(make_model=partial(Tower, width=128), make_optimizer=torch.optim.RMSprop, steps=2)
    options = {"stage": "auto", "offload": f"auto:{tmp_path}", "tile": 1024}
    plenty = loop.run(**options, memory="1GiB")
    kept = int(plenty.optimizer.metrics()["memory_bytes/device"])
    least = loop.run(**options, memory=int(0.7 * kept))
    assert least.optimizer.metrics()["memory_bytes/nvme"] > 0
    assert least.losses == plenty.losses
    chosen = [record.getMessage() for record in caplog.records if record.getMessage().startswith("chosen for")]
    assert "nvme" not in chosen[0].partition(": ")[2]
    assert "on drives" in chosen[1].partition(": ")[2] or "nvme" in chosen[1].partition(": ")[2]


# --- Failures and refusals ---


def refusal(optimizer, **options):
    with pytest.raises(ballast.UsageError) as raised:
        ballast.wrap(optimizer, **keywords(elementwise=True, **options))
    return str(raised.value)


class InDoubles(UserOptimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.zeros_like(parameter, dtype=torch.float64)


class Greedy(UserOptimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].update({f"value {number}": torch.zeros_like(parameter) for number in range(9)})


class Broken(UserOptimizer):
    def step(self, closure=None):
        raise ZeroDivisionError("nothing to divide")


class Outside(UserOptimizer):
    """Keeps its state in a dictionary of its own."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.sums = {}

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.sums[parameter] = self.sums.get(parameter, 0) + parameter.grad
            parameter.sub_(self.sums[parameter], alpha=0.01)


class OfNoParameter(UserOptimizer):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.state["steps"] = self.calls


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Outside, "keeps something of a parameter outside of optimizer.state"),
        (OfNoParameter, "keeps state of no parameter: state['steps']"),
        (InDoubles, "its state sum is of torch.float64"),
        (Greedy, "it keeps 9 values of each element"),
        (Broken, "its step has failed on 7 elements: ZeroDivisionError: nothing to divide"),
    ],
)
def test_state_that_the_library_cannot_keep_is_refused_at_once(kind, said, tmp_path):
    refused = refusal(kind(mlp().parameters()), **on_drive(tmp_path, stage=2))
    assert "B1005" in refused and said in refused and kind.__name__ in refused and 'offload={"state": "host"}' in refused


class Surprising(UserOptimizer):
    """Makes a value of each element in its third step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        if self.calls == 3:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["surprise"] = torch.zeros_like(parameter)


def test_state_that_comes_too_late_is_refused_when_it_comes(tmp_path):
    with pytest.raises(ballast.UsageError, match="the optimizer's state has surprise") as raised:
        own_step_loop(Surprising).run(**on_drive(tmp_path, stage=2), elementwise=True)
    assert "parameter 0" in str(raised.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"state_format": "bf16"}, "state_format='bf16'"),
        ({"verify": 2}, "verify=2"),
        ({"stage": 3, "update_in_backward": True}, "update_in_backward"),
    ],
    ids=str,
)
def test_options_that_an_own_step_cannot_have_are_refused(options, word, tmp_path):
    model = mlp()
    refused = refusal(torch.optim.RMSprop(model.parameters()), model=model, **{**on_drive(tmp_path), **options})
    assert "B1001" in refused and word in refused and "its own step" in refused
