"""Tests of optimizers that run their own step on state that the library keeps, on drives too."""

from collections import deque

import ballast
import pytest
import torch
from python.wrap.support import bodies
from python.wrap.support.bodies import train_and_offload
from python.wrap.support.custom_optimizers import KINDS, UserOptimizer, check_same_state, on_drive, own_step_loop, state_of
from python.wrap.support.loops import Loop, Tower, check_equal, in_bfloat16, keywords, mlp
from python.wrap.support.ranks import run_ranks

EACH_KIND = {"argvalues": [*KINDS, (UserOptimizer, {})], "ids": lambda value: getattr(value, "__name__", "")}


def placements(path):
    return [
        *(on_drive(path, stage=stage) for stage in (0, 2, 3)),
        {"stage": 3, "offload": f"nvme:{path}"},
        {"stage": 3, "offload": {"state": {"device": 0.3, "host": 0.3, f"nvme:{path}": 0.4}}, "tile": 128},
        {"stage": 2, "offload": {"state": {"device": 0.5, "host": 0.5}}, "tile": 128},
    ]


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
    loop = own_step_loop(UserOptimizer)
    optimizer = loop.run(**on_drive(tmp_path, stage=2), elementwise=True).optimizer
    assert optimizer.calls == optimizer.param_groups[0]["calls"] == loop.steps


class InTheLoop(UserOptimizer):
    """Changes an option of a group where it updates a parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for _ in group["params"]:
                group["updates"] = group["calls"]


def test_a_group_without_elements_in_the_last_tile_keeps_its_options(tmp_path):
    model = mlp()
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = ballast.wrap(InTheLoop(groups), model, **keywords(**on_drive(tmp_path, stage=2), elementwise=True))
    own_step_loop(steps=3).train(model, optimizer)
    assert [group["updates"] for group in optimizer.param_groups] == 4 * [3]


def test_parameters_may_be_plain_tensors(tmp_path):
    trained = []
    for placement in ({"stage": 0}, on_drive(tmp_path, stage=0)):
        tensors = [torch.linspace(-1, 1, 300, device="cpu").requires_grad_() for _ in range(2)]
        optimizer = ballast.wrap(torch.optim.NAdam(tensors, lr=1e-2), **keywords(**placement))
        for _ in range(3):
            sum(each.square().sum() for each in tensors).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([each.detach().clone() for each in tensors])
    assert all(torch.equal(one, other) for one, other in zip(*trained))


class WithAttributes(UserOptimizer):
    """Changes a list, a tensor, a dictionary, a set and a deque in a tuple in each step, and makes an attribute."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.seen, self.total, self.by_name, self.kinds = [], torch.zeros(()), {"last": 0}, {"none"}
        self.recent = (deque(maxlen=2),)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.seen.append(self.calls)
        self.total += 1
        self.by_name["last"] = self.calls
        self.kinds.add(len(self.seen))
        self.recent[0].append(self.calls)
        self.made = getattr(self, "made", 0) + 1


def test_attributes_and_options_change_as_in_one_call(tmp_path):
    found = []
    for placement in ({"stage": 2}, on_drive(tmp_path, stage=2)):
        optimizer = own_step_loop(WithAttributes, steps=3).run(**placement, elementwise=True).optimizer
        attributes = (optimizer.seen, optimizer.total.item(), optimizer.by_name, optimizer.kinds, optimizer.made)
        found.append((*attributes, [*optimizer.recent[0]]))
    assert found[0] == found[1] == ([1, 2, 3], 3.0, {"last": 3}, {"none", 1, 2, 3}, 3, [2, 3])


def test_the_trial_leaves_the_optimizer_as_it_was(tmp_path):
    optimizer = WithAttributes(mlp().parameters())
    random = torch.get_rng_state()
    ballast.wrap(optimizer, **keywords(**on_drive(tmp_path, stage=2), elementwise=True))
    assert torch.equal(torch.get_rng_state(), random)
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
    loop = own_step_loop(Late, steps=4)
    memory, stored = loop.run(stage=2, elementwise=True), loop.run(**on_drive(tmp_path, stage=2), elementwise=True)
    check_same_state(state_of(stored.optimizer), state_of(memory.optimizer))
    after_one = own_step_loop(Late, steps=1).run(**on_drive(tmp_path, stage=2), elementwise=True)
    assert [[*values] for values in state_of(after_one.optimizer)] == 4 * [["mean"]]


def test_a_skipped_step_changes_nothing(tmp_path):
    run = own_step_loop(torch.optim.RMSprop, steps=2).run(**on_drive(tmp_path, stage=2))
    before = state_of(run.optimizer)
    (run.model(torch.ones(20)).sum() * float("inf")).backward()
    run.optimizer.step()
    assert run.optimizer.metrics()["skipped"] == 1.0
    check_same_state(state_of(run.optimizer), before)


def test_the_device_is_freed_and_taken_back(tmp_path):
    loop = Loop(make_model=Tower, make_optimizer=torch.optim.NAdam, steps=3)
    plain, offloaded = (train_and_offload(loop, each, **on_drive(tmp_path, stage=2)) for each in (False, True))
    assert plain[0] == offloaded[0]


# --- State ---


def test_memory_counts_only_what_memory_keeps(tmp_path):
    loop = own_step_loop(torch.optim.RMSprop)
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


def test_values_that_a_frozen_parameter_does_not_have_yet_stay_absent(tmp_path):
    trained = []
    for placement in ({"stage": 2}, on_drive(tmp_path, stage=2)):
        run = own_step_loop(Late, steps=1).run(**placement, elementwise=True)
        for steps, is_trained in ((3, False), (5, True)):
            run.model[0].requires_grad_(is_trained)
            own_step_loop(Late, steps=steps).train(run.model, run.optimizer, steps - 2)
        trained.append(run.parameters)
    assert all(torch.equal(one, other) for one, other in zip(*trained))


def test_groups_keep_what_their_own_options_make(tmp_path):
    shown = []
    for placement in ({"stage": 2}, on_drive(tmp_path, stage=2)):
        model = mlp()
        groups = [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[2].parameters(), "centered": True}]
        optimizer = ballast.wrap(torch.optim.RMSprop(groups, lr=1e-3), model, **keywords(**placement))
        own_step_loop(steps=2).train(model, optimizer)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(300))], "momentum": 0.5, "centered": True})
        added = optimizer.param_groups[2]["params"][0]
        (model(torch.ones(20)).sum() + added.square().sum()).backward()
        optimizer.step()
        shown.append(state_of(optimizer))
    check_same_state(*shown)


def test_a_state_dict_stays_current(tmp_path):
    run = own_step_loop(steps=2).run(**on_drive(tmp_path, stage=2))
    taken = run.optimizer.state_dict()["state"][0]
    own_step_loop(steps=4).train(run.model, run.optimizer, 2)
    assert taken["step"] == 4
    assert torch.equal(taken["exp_avg"] * 1, run.optimizer.state[run.model[0].weight]["exp_avg"] * 1)


class Sometimes(UserOptimizer):
    """Its state is None at first."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["last"] = None if self.calls == 1 else parameter.clone()


def test_state_that_is_none_at_first_is_kept_when_it_comes(tmp_path):
    for steps in (1, 3):
        loop = own_step_loop(Sometimes, steps=steps)
        memory, stored = (loop.run(**each, elementwise=True) for each in ({"stage": 2}, on_drive(tmp_path, stage=2)))
        for mine, theirs in zip(stored.model.parameters(), memory.model.parameters()):
            one, other = stored.optimizer.state[mine]["last"], memory.optimizer.state[theirs]["last"]
            assert (one is None and other is None) if steps == 1 else torch.equal(one, other)


class Scaled(torch.nn.Module):
    """Has a parameter without dimensions, and one of one element."""

    def __init__(self):
        super().__init__()
        self.body, self.scale, self.shift = mlp(), torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(1))

    def forward(self, batch):
        return self.body(batch) * self.scale + self.shift


def test_checkpoints_of_scalar_parameters_go_between_memory_and_drives(tmp_path):
    placements = [{"stage": 2}, on_drive(tmp_path, stage=2)]
    expected = own_step_loop(make_model=Scaled, steps=4).run(stage=2)
    for number, first in enumerate(placements):
        run = own_step_loop(make_model=Scaled, steps=2).run(**first)
        ballast.save(tmp_path / str(number), run.model, run.optimizer)
        for second in placements:
            model = Scaled()
            optimizer = ballast.wrap(torch.optim.NAdam(model.parameters(), lr=1e-2), model, **keywords(**second))
            ballast.load_checkpoint(tmp_path / str(number), model, optimizer)
            ended = own_step_loop(steps=4).train(model, optimizer, 2)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ended.parameters, expected.parameters))
            check_same_state(state_of(optimizer), state_of(expected.optimizer))


@pytest.mark.parametrize("kind", [torch.optim.NAdam, UserOptimizer])
def test_a_state_dict_goes_from_memory_to_a_drive_and_back(kind, tmp_path):
    placements = [{"stage": 2}, on_drive(tmp_path, stage=2)]
    longer = own_step_loop(kind, steps=5)
    expected = longer.run(stage=2, elementwise=True)
    for first in placements:
        for second in placements:
            run = own_step_loop(kind, steps=3).run(**first, elementwise=True)
            state = run.optimizer.state_dict()
            run.optimizer.close()
            optimizer = ballast.wrap(kind(run.model.parameters(), lr=1e-2), run.model, **keywords(**second, elementwise=True))
            optimizer.load_state_dict(state)
            for name in ("calls",) if kind is UserOptimizer else ():
                setattr(optimizer, name, 3)
            ended = longer.train(run.model, optimizer, 3)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ended.parameters, expected.parameters))


def test_state_that_was_cleared_begins_again(tmp_path):
    runs = []
    for placement in ({"stage": 2}, on_drive(tmp_path, stage=2)):
        run = own_step_loop(steps=3).run(**placement)
        run.optimizer.state.clear()
        runs.append(own_step_loop(steps=5).train(run.model, run.optimizer, 3))
    check_equal(*runs)
