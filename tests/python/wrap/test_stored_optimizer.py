"""Tests of optimizers that run their own step on state that the library keeps, on drives too."""

import logging
import multiprocessing
import signal
from functools import partial

import ballast
import pytest
import torch
from python.wrap.support import bodies, kept_runs, offloading
from python.wrap.support.custom_optimizers import KINDS, UserOptimizer
from python.wrap.support.loops import Loop, Tower, check_equal, in_bfloat16, mlp
from python.wrap.support.ranks import run_ranks

EACH_KIND = {"argvalues": [*KINDS, (UserOptimizer, {})], "ids": lambda value: getattr(value, "__name__", "")}


def on_drive(path, **options):
    return {"offload": {"state": f"nvme:{path}"}, "tile": 128, **options}


def placements(path):
    return [
        *(on_drive(path, stage=stage) for stage in (0, 2, 3)),
        {"stage": 3, "offload": f"nvme:{path}"},
        {"stage": 3, "offload": {"state": {"device": 0.3, "host": 0.3, f"nvme:{path}": 0.4}}, "tile": 128},
    ]


def loop_of(kind=torch.optim.NAdam, options=None, **changes):
    return Loop(make_optimizer=kind, optimizer_options=options or {"lr": 1e-2}, **changes)


def state_of(optimizer):
    """Return the values of optimizer.state, read now."""
    return [{name: value * 1 for name, value in optimizer.state[each].items()} for each in parameters_in(optimizer)]


def parameters_in(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_same_state(one, other):
    assert [[*values] for values in one] == [[*values] for values in other]
    for mine, theirs in zip(one, other):
        assert all(torch.equal(torch.as_tensor(mine[name]), torch.as_tensor(theirs[name])) for name in mine)


# --- Training ---


@pytest.mark.parametrize("make_loop", [Loop, in_bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "options"), **EACH_KIND)
def test_bits_are_those_of_state_in_memory(kind, options, make_loop, tmp_path):
    loop = make_loop(make_optimizer=kind, optimizer_options=options or {"lr": 1e-2}, micro_steps=2, clip=0.05, steps=4)
    memory = loop.run(stage=2, elementwise=True)
    for placement in placements(tmp_path):
        stored = loop.run(**placement, elementwise=True)
        check_same_state(state_of(stored.optimizer), state_of(memory.optimizer))
        stored.optimizer.close()
        check_equal(stored, memory)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_train_as_with_state_in_memory(ranks, tmp_path):
    for kind, options in [(torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}), (UserOptimizer, {})]:
        configurations = [{**each, "elementwise": True} for each in [{"stage": 2}, *placements(tmp_path)]]
        for _, (first, *others) in run_ranks(ranks, bodies.custom_optimizers, kind, options, configurations):
            for other in others:
                assert other[0] == first[0]
                assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1], strict=True))


def test_a_step_in_many_calls_counts_once(tmp_path):
    loop = loop_of(UserOptimizer)
    optimizer = loop.run(**on_drive(tmp_path, stage=2), elementwise=True).optimizer
    assert optimizer.calls == optimizer.param_groups[0]["calls"] == loop.steps


class WithAttributes(UserOptimizer):
    """Changes a list, a tensor, a dictionary and a set in each step, and makes an attribute."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.seen, self.total, self.by_name, self.kinds = [], torch.zeros(()), {"last": 0}, {"none"}

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.seen.append(self.calls)
        self.total += 1
        self.by_name["last"] = self.calls
        self.kinds.add(len(self.seen))
        self.made = getattr(self, "made", 0) + 1


def test_attributes_and_options_change_as_in_one_call(tmp_path):
    found = []
    for placement in ({"stage": 2}, on_drive(tmp_path, stage=2)):
        optimizer = loop_of(WithAttributes, steps=3).run(**placement, elementwise=True).optimizer
        found.append((optimizer.seen, optimizer.total.item(), optimizer.by_name, optimizer.kinds, optimizer.made))
    assert found[0] == found[1] == ([1, 2, 3], 3.0, {"last": 3}, {"none", 1, 2, 3}, 3)


def test_the_trial_leaves_the_optimizer_as_it_was(tmp_path):
    optimizer = WithAttributes(mlp().parameters())
    ballast.wrap(optimizer, **on_drive(tmp_path, stage=2), elementwise=True)
    assert (optimizer.calls, optimizer.param_groups[0]["calls"], optimizer.seen, optimizer.kinds) == (0, 0, [], {"none"})
    assert not hasattr(optimizer, "made")
    assert not optimizer.state


class Late(UserOptimizer):
    """Makes a second value of each element in its second step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if self.calls > 1:
                self.state[parameter].setdefault("slow", parameter.clone()).lerp_(parameter, 0.5)


def test_values_that_come_later_are_kept_from_then_on(tmp_path):
    loop = loop_of(Late, steps=4)
    memory, stored = loop.run(stage=2, elementwise=True), loop.run(**on_drive(tmp_path, stage=2), elementwise=True)
    check_same_state(state_of(stored.optimizer), state_of(memory.optimizer))
    after_one = loop_of(Late, steps=1).run(**on_drive(tmp_path, stage=2), elementwise=True)
    assert [[*values] for values in state_of(after_one.optimizer)] == 4 * [["mean"]]


def test_a_skipped_step_changes_nothing(tmp_path):
    run = loop_of(torch.optim.RMSprop, steps=2).run(**on_drive(tmp_path, stage=2))
    before = state_of(run.optimizer)
    (run.model(torch.ones(20)).sum() * float("inf")).backward()
    run.optimizer.step()
    assert run.optimizer.metrics()["skipped"] == 1.0
    check_same_state(state_of(run.optimizer), before)


def test_the_device_is_freed_and_taken_back(tmp_path):
    loop = Loop(make_model=Tower, make_optimizer=torch.optim.NAdam, steps=3)
    plain, offloaded = (offloading.train_and_offload(loop, each, **on_drive(tmp_path, stage=2)) for each in (False, True))
    assert plain[0] == offloaded[0]


# --- State ---


def test_memory_counts_only_what_memory_keeps(tmp_path):
    loop = loop_of(torch.optim.RMSprop)
    stored, memory = loop.run(**on_drive(tmp_path, stage=2)), loop.run(stage=2)
    elements = sum(parameter.numel() for parameter in memory.model.parameters())
    assert memory.optimizer.metrics()["memory_bytes/device"] - stored.optimizer.metrics()["memory_bytes/device"] >= 4 * elements
    assert stored.optimizer.metrics()["memory_bytes/nvme"] >= 2 * 4 * elements


@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_are_added_later_freeze_and_thaw(stage, tmp_path):
    memory = run_ranks(2, bodies.own_step_of_changing_parameters, stage)
    stored = run_ranks(2, bodies.own_step_of_changing_parameters, stage, on_drive(tmp_path))
    for ours, plain in zip(stored, memory):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain))


@pytest.mark.parametrize("kind", [torch.optim.NAdam, UserOptimizer])
def test_a_state_dict_goes_from_memory_to_a_drive_and_back(kind, tmp_path):
    placements = [{"stage": 2}, on_drive(tmp_path, stage=2)]
    longer = loop_of(kind, steps=5)
    expected = longer.run(stage=2, elementwise=True)
    for first in placements:
        for second in placements:
            run = loop_of(kind, steps=3).run(**first, elementwise=True)
            state = run.optimizer.state_dict()
            run.optimizer.close()
            optimizer = ballast.wrap(kind(run.model.parameters(), lr=1e-2), run.model, **second, elementwise=True)
            optimizer.load_state_dict(state)
            for name in ("calls",) if kind is UserOptimizer else ():
                setattr(optimizer, name, 3)
            ended = longer.train(run.model, optimizer, 3)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ended.parameters, expected.parameters))


def test_state_that_was_cleared_begins_again(tmp_path):
    runs = []
    for placement in ({"stage": 2}, on_drive(tmp_path, stage=2)):
        run = loop_of(steps=3).run(**placement)
        run.optimizer.state.clear()
        runs.append(loop_of(steps=5).train(run.model, run.optimizer, 3))
    check_equal(*runs)


# --- Runs ---


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.ASGD])
def test_a_run_resumes_with_values_and_numbers(kind, tmp_path):
    options = {"kind": kind, "tile": 128, **kept_runs.kept_in(tmp_path)}
    _, whole = kept_runs.train(kept_runs.Layers(), 0, 5, kind=kind, stage=3)
    assert kept_runs.train(kept_runs.Layers(), 0, 2, **options) == (0, whole[:2])
    assert kept_runs.train(kept_runs.Layers(), 0, 3, **options) == (2, whole[2:3])
    assert kept_runs.train(kept_runs.Layers(), 0, 5, **options) == (3, whole[3:])


def test_a_process_that_is_killed_in_a_step_resumes_before_it(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=kept_runs.train_until_stopped, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    _, whole = kept_runs.train(kept_runs.Layers(), 0, 5, kind=torch.optim.NAdam, stage=3)
    options = {"kind": torch.optim.NAdam, "tile": 128, **kept_runs.kept_in(tmp_path)}
    assert kept_runs.train(kept_runs.Layers(), 0, 5, **options) == (2, whole[2:])


class Numbered(torch.optim.RMSprop):
    """Keeps another number for each parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["text"] = f"{number} " + "x" * 40_000


def test_numbers_for_which_a_commit_has_no_room_are_refused(tmp_path):
    options = {"kind": Numbered, "elementwise": True, **kept_runs.kept_in(tmp_path)}
    with pytest.raises(ballast.UsageError, match="its numbers differ from parameter to parameter"):
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
    assert any("state nvme" in record.getMessage() or "nvme" in record.getMessage() for record in caplog.records)


# --- Failures and refusals ---


def refusal(optimizer, **options):
    with pytest.raises(ballast.UsageError) as raised:
        ballast.wrap(optimizer, elementwise=True, **options)
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


@pytest.mark.parametrize(
    ("kind", "said"),
    [
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
        loop_of(Surprising).run(**on_drive(tmp_path, stage=2), elementwise=True)
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
