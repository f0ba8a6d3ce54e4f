"""Tests of the optimizer's state: it is read, saved, loaded and removed as in torch."""

import copy
from collections import defaultdict

import ballast
import pytest
import torch
from python.wrap.support.loops import Loop, Run, check_close, check_equal, keywords, mlp


def test_state_is_read_as_torchs():
    plain, ours = Loop().run(), Loop().run(stage=2)
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters()):
        state, expected = ours.optimizer.state[mine], plain.optimizer.state[theirs]
        assert set(state) == set(expected)
        assert state["step"] == expected["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].shape == expected[name].shape
            torch.testing.assert_close(state[name] * 1, expected[name])
    with pytest.raises(ballast.UsageError, match="load_state_dict"):
        state["exp_avg"].zero_()


def test_a_state_dict_goes_to_the_plain_optimizer_and_back(tmp_path):
    first = Loop(steps=3).run(stage=2)
    torch.save(first.optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt")
    assert type(saved["state"][0]["exp_avg"]) is torch.Tensor
    loop = Loop(steps=6)
    there = loop.train(first.model, first.optimizer, 3)

    plain_model = mlp()
    again = Loop(steps=3).run(stage=2)
    plain_model.load_state_dict(again.model.state_dict())
    plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2)
    plain.load_state_dict(saved)
    check_close(there, loop.train(plain_model, plain, 3))

    model = mlp()
    model.load_state_dict(again.model.state_dict())
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    optimizer.load_state_dict(torch.load(tmp_path / "state.pt"))  # torch has updated the tensors of `saved`
    back = loop.train(model, optimizer, 3)
    assert back.losses == there.losses
    assert optimizer.state[model[0].weight]["step"] == 6


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RAdam])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_dict_before_the_first_step_is_as_torchs(kind, stage, tmp_path):
    def trained(stage):
        loop, model = Loop(steps=2), mlp()
        optimizer = kind(model.parameters(), lr=1e-2, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
        optimizer = optimizer if stage is None else ballast.wrap(optimizer, model, stage=stage)
        entries = []
        for is_between_passes in (True, False, True):
            loss = model(torch.ones(20)).sum()
            saved = optimizer.state_dict()
            entries.append([*saved["state"]])
            if is_between_passes:
                optimizer.load_state_dict(saved)
            else:
                loss.backward()
                optimizer.zero_grad()
        if stage is not None:
            ballast.save(tmp_path, model, optimizer)
            ballast.load_checkpoint(tmp_path, model, optimizer)
        entries.append([*optimizer.state_dict()["state"]])
        return loop.train(model, optimizer), entries + [[*optimizer.state_dict()["state"]]]

    (plain, expected), (ours, entries) = trained(None), trained(stage)
    assert entries == expected
    with ballast.gather(ours.model):
        check_close(plain, ours)


def test_an_empty_state_dict_is_loaded_between_a_backward_pass_and_the_first_step():
    runs = []
    for loads in (False, True):
        loop, model = Loop(steps=1), mlp()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=2)
        loop.loss(model, loop.batch(0)).backward()
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        runs.append(Run(model, optimizer, []))
    check_equal(*runs)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_that_no_step_has_updated_has_no_entry(stage):
    """Its moments are as those of a new one after a freeze, and after other state of the optimizer is loaded."""

    def trained(stage):
        model = torch.nn.ModuleDict({"used": mlp(), "later": mlp()})
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = optimizer if stage is None else ballast.wrap(optimizer, model, stage=stage)
        entries, losses = [], []
        for number in range(8):
            model["used"][0].requires_grad_(number not in (2, 3))
            model["later"][2].requires_grad_(number != 2)
            loss = model["used"](torch.ones(20)).square().sum()
            if number > 4:
                loss = loss + model["later"](torch.ones(20)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            saved = copy.deepcopy(optimizer.state_dict())
            entries.append({key: float(values["step"]) for key, values in saved["state"].items()})
            if number == 3:
                optimizer.load_state_dict(saved)
        return Run(model, optimizer, losses), entries

    (plain, expected), (ours, entries) = trained(None), trained(stage)
    assert entries == expected
    with ballast.gather(ours.model):
        check_close(plain, ours)


def test_loaded_state_of_no_step_has_entries():
    run = Loop(steps=1).run(stage=2)
    count_from_zero(run.optimizer, [*run.model.parameters()])
    run.model(torch.ones(20))
    saved = copy.deepcopy(run.optimizer.state_dict())["state"]
    assert all(values["step"] == 0 and values["exp_avg"].any() for values in saved.values()) and len(saved) == 4
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": {}})
    run.model(torch.ones(20))
    assert run.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RAdam])
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3}, {"stage": 2, "offload": {"state": "nvme:."}}], ids=str)
def test_a_kept_state_dict_is_live_and_its_copy_is_a_snapshot(kind, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = Loop(make_optimizer=kind, steps=2)
    run = loop.run(**options)
    kept = run.optimizer.state_dict()
    snapshot = copy.deepcopy(kept)
    values = {name: value.clone() for name, value in snapshot["state"][0].items()}
    with ballast.gather(run.model):
        weights = copy.deepcopy(run.model.state_dict())
    loop.steps = 4
    first = loop.train(run.model, run.optimizer, 2)
    assert kept["state"][0]["step"] == 4
    assert not torch.equal(kept["state"][0]["exp_avg"] * 1, values["exp_avg"])
    assert all(torch.equal(snapshot["state"][0][name], value) for name, value in values.items())
    with ballast.gather(run.model):
        run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(snapshot)
    assert loop.train(run.model, run.optimizer, 2).losses == first.losses


def clear(optimizer):
    optimizer.state.clear()


def replace(optimizer, *_):
    optimizer.state = defaultdict(dict)


def load_a_first(optimizer):
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})


@pytest.mark.parametrize("empty", [clear, replace, load_a_first])
@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {"stage": 0}),
        (torch.optim.AdamW, {"stage": 3}),
        (torch.optim.AdamW, {"stage": 2, "offload": "nvme", "run": "named"}),
        (torch.optim.RAdam, {"stage": 2}),
    ],
    ids=str,
)
def test_an_optimizer_whose_state_is_emptied_begins_again(empty, kind, options, tmp_path):
    def trained(**options):
        loop, model = Loop(steps=3), mlp()
        optimizer = kind(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options)) if options else optimizer
        losses = loop.train(model, optimizer).losses
        empty(optimizer)
        loop.steps = 6
        run = loop.train(model, optimizer, 3)
        return Run(model, optimizer, losses + run.losses)

    where = {"offload": f"nvme:{tmp_path}"} if "offload" in options else {}
    plain, ours = trained(), trained(**{**options, **where})
    with ballast.gather(ours.model):
        check_close(plain, ours)
    assert {values["step"].item() for values in ours.optimizer.state.values()} == {3}


def replace_a_moment(optimizer, parameters):
    for each in parameters:
        optimizer.state[each]["exp_avg"] = torch.zeros(each.shape)


def count_from_zero(optimizer, parameters):
    for each in parameters:
        optimizer.state[each]["step"] = torch.tensor(0.0)


def replace_entries(optimizer, parameters):
    for each in parameters:
        optimizer.state[each] = {}


def clear_one_entry(optimizer, parameters):
    optimizer.state[parameters[-1]].clear()


@pytest.mark.parametrize("change", [replace_a_moment, count_from_zero, replace_entries, clear_one_entry])
@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {"stage": 2}),
        (torch.optim.AdamW, {"stage": 3, "offload": "nvme:.", "tile": 128, "run": "named"}),
        (torch.optim.NAdam, {"stage": 3, "offload": {"state": "nvme:."}, "tile": 128}),
        (torch.optim.NAdam, {"stage": 2}),
    ],
    ids=str,
)
def test_values_that_the_user_puts_into_the_state_count(change, kind, options, tmp_path, monkeypatch):
    def trained(**options):
        loop, model = Loop(steps=3), mlp()
        optimizer = kind(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options)) if options else optimizer
        losses = loop.train(model, optimizer).losses
        change(optimizer, [*model.parameters()])
        loop.steps = 6
        run = loop.train(model, optimizer, 3)
        return Run(model, optimizer, losses + run.losses), [float(optimizer.state[each]["step"]) for each in model.parameters()]

    monkeypatch.chdir(tmp_path)
    (plain, expected), (ours, steps) = trained(), trained(**options)
    with ballast.gather(ours.model):
        check_close(plain, ours)
    assert steps == expected


def put_entries(optimizer, parameters):
    for each in parameters[:-1]:
        moments = {name: torch.full(each.shape, 0.5) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[each] = {"step": torch.tensor(7.0), **moments}


def remove_entries(optimizer, parameters):
    for each in parameters:
        optimizer.state.pop(each, None)


CHANGES = [put_entries, remove_entries, replace_a_moment, count_from_zero, replace_entries, clear_one_entry, replace]


def loaded_and_changed(change, options, steps):
    """Load the state after this many steps, change it before the next step, and train."""
    loop, model = Loop(steps=steps), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ballast.wrap(optimizer, model, **keywords(**options)) if options else optimizer
    loop.train(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    change(optimizer, [*model.parameters()])
    loop.steps = steps + 3
    run = loop.train(model, optimizer, steps)
    return run, [float(optimizer.state[each]["step"]) for each in model.parameters()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3}, {"stage": 2, "offload": {"state": "nvme:."}}], ids=str)
def test_changes_of_loaded_state_before_the_next_step_count(change, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for steps in (3, 0):
        if steps == 0 and change not in (put_entries, remove_entries):
            continue  # there is nothing to change before the first step
        (plain, expected), (ours, counted) = loaded_and_changed(change, {}, steps), loaded_and_changed(change, options, steps)
        with ballast.gather(ours.model):
            check_close(plain, ours)
        assert counted == expected


def test_state_that_moves_to_another_device_or_is_extended_changes_no_partition():
    run = Loop(steps=1).run(stage=2)
    partition = run.optimizer._ballast.current
    for values in run.optimizer.state.values():
        values.update({name: value.to("meta") for name, value in values.items()}, noted=torch.ones(3))
    run = Loop(steps=3).train(run.model, run.optimizer, 1)
    assert run.optimizer._ballast.current is partition
    assert run.losses == Loop(steps=3).run(stage=2).losses[1:]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_parameter_takes_the_place_and_the_state_of_another(stage):
    """A parameter grows in training, and its moments grow with it."""

    def grow(model, optimizer):
        old, group = model[2].weight, optimizer.param_groups[0]
        state = optimizer.state.pop(old)
        more = lambda values: torch.cat([values, torch.zeros(3, 24)])
        with ballast.gather(model):
            grown = torch.nn.Parameter(more(old.detach()))
        model[2].weight = grown
        model[2].bias.requires_grad_(False)
        model[2].forward = lambda batch: batch @ model[2].weight.T
        group["params"] = [model[2].weight if each is old else each for each in group["params"]]
        optimizer.state[model[2].weight] = {
            "step": state["step"],
            "exp_avg": more(state["exp_avg"]),
            "exp_avg_sq": more(state["exp_avg_sq"]),
        }

    def trained(**options):
        loop, model = Loop(steps=3), mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options)) if options else optimizer
        loop.train(model, optimizer)
        grow(model, optimizer)
        loop.steps = 6
        return loop.train(model, optimizer, 3)

    plain, ours = trained(), trained(stage=stage)
    with ballast.gather(ours.model):
        check_close(plain, ours)
    assert torch.equal(plain.optimizer.state[plain.model[2].weight]["step"], torch.tensor(6.0))


@pytest.mark.parametrize("change", [clear, lambda optimizer: replace_a_moment(optimizer, [*optimizer.state])])
def test_state_that_changes_before_the_step_is_refused(change):
    run = Loop(steps=1).run(stage=0)
    run.model(torch.ones(20)).sum().backward()
    change(run.optimizer)
    with pytest.raises(ballast.UsageError, match="B1007(.|\n)*between a backward pass and its step"):
        run.optimizer.step()


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 3}, {"stage": 2, "offload": "nvme:.", "run": "named"}], ids=str)
def test_a_state_dict_is_not_loaded_between_a_backward_pass_and_its_step(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop, loaded = Loop(steps=2), Loop(steps=1).run(stage=2).optimizer.state_dict()
    run, expected = loop.run(**options), loop.run(stage=2)
    for each in (run, expected):
        loop.loss(each.model, loop.batch(2)).backward()
    with pytest.raises(ballast.UsageError, match="B1007 cannot load a state_dict\\(\\) between a backward pass and its step"):
        run.optimizer.load_state_dict(loaded)
    for each in (run, expected):
        each.optimizer.step()
    with ballast.gather(run.model):
        check_equal(run, Run(expected.model, expected.optimizer, run.losses))
    run.optimizer.zero_grad()
    loop.loss(run.model, loop.batch(3)).backward()
    run.model.zero_grad()
    run.optimizer.load_state_dict(loaded)
    assert run.optimizer.steps == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_state_without_a_moment_is_refused(stage):
    ours, plain = Loop().run(stage=stage), Loop().run()
    state = plain.optimizer.state_dict()
    del state["state"][1]["exp_avg_sq"]
    with pytest.raises(ballast.UsageError, match=r"B1001 [^$]*no exp_avg_sq[^$]*\[\"state\"\]\[1\]"):
        ours.optimizer.load_state_dict(state)
    state["state"][1] = {}
    ours.optimizer.load_state_dict(state)
