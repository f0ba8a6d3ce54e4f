"""Tests of optimizers that run their own step on each rank's shard, as the library has no rule for them."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support import bodies
from python.wrap.support.custom_optimizers import KINDS, UserOptimizer
from python.wrap.support.loops import Loop, check_close, keywords, mean_square, mlp
from python.wrap.support.ranks import run_ranks
from python.wrap.test_one_rank import in_bfloat16


def saved_state_of_custom_optimizer(rank: int, stage: int) -> tuple[dict[str, Any], list[float], list[float]]:
    """Return this rank's state after three steps, the losses of three more, and those of another training that loads it."""
    loop = bodies.loop_of(rank, make_optimizer=torch.optim.RMSprop, steps=3)
    run = loop.run(stage=stage)
    saved = copy.deepcopy(run.optimizer.state_dict())
    with ballast.gather(run.model):
        parameters = {name: value.clone() for name, value in run.model.state_dict().items()}
    longer = bodies.loop_of(rank, steps=6)
    on = longer.train(run.model, run.optimizer, 3).losses
    model = mlp()
    model.load_state_dict(parameters)
    optimizer = ballast.wrap(torch.optim.RMSprop(model.parameters(), lr=1e-2), model, stage=stage)
    optimizer.load_state_dict(saved)
    return saved["state"], on, longer.train(model, optimizer, 3).losses


def own_step_fails(rank: int) -> list[str]:
    """Return the errors of two steps. The optimizer's own step fails on rank 1."""

    class Failing(UserOptimizer):
        def step(self, closure: Any = None) -> None:
            if rank == 1:
                raise ZeroDivisionError("no more batches")
            super().step()

    model = mlp()
    optimizer = ballast.wrap(Failing(model.parameters()), model, tuning=ballast.Tuning(elementwise=True, timeout=20))
    said = []
    for _ in range(2):
        try:
            mean_square(model, torch.ones(20)).backward()
            optimizer.step()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        optimizer.param_groups[0]["params"][0].shape  # a parameter can be read after the error
    return said


STAGES = [{"stage": stage} for stage in (0, 1, 2, 3)]
CONFIGURATIONS = STAGES + [
    {"stage": 0, "offload": "host"},
    {"stage": 2, "offload": {"state": "host"}},
    {"stage": 3, "offload": "host"},
    {"stage": 3, "offload": {"parameters": "host", "state": "host", "gradients": "host"}},
]


def loop_of(kind=torch.optim.RMSprop, **changes):
    return Loop(**{"make_optimizer": kind, "optimizer_options": {"lr": 1e-3}, **changes})


def wrapped(kind=torch.optim.RMSprop, model=None, elementwise=False, **options):
    model = model or mlp()
    return model, ballast.wrap(kind(model.parameters(), lr=1e-2), model, **keywords(elementwise=elementwise, **options))


def parameters_of(run):
    with ballast.gather(run.model):
        return run.parameters


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_one_rank_trains_as_torch_does(kind, options, configuration):
    loop = loop_of(kind, optimizer_options=options, micro_steps=2, clip=0.05)
    run = loop.run(**configuration)
    run.optimizer.close()
    check_close(loop.run(), run, 1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("kind", "options"), [*KINDS, (UserOptimizer, {})], ids=lambda value: getattr(value, "__name__", "")
)
def test_ranks_train_as_one_process_does_with_all_batches(kind, options, ranks):
    configurations = [{**configuration, "elementwise": kind is UserOptimizer} for configuration in CONFIGURATIONS]
    answers = run_ranks(ranks, bodies.custom_optimizers, kind, options, configurations)
    for (losses, parameters), first, *others in ((plain, *runs) for plain, runs in answers):
        torch.testing.assert_close(torch.tensor(first[0]), torch.tensor(losses), atol=1e-6, rtol=1e-6)
        for mine, theirs in zip(first[1], parameters, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1], strict=True))


def test_a_step_of_the_users_own_keeps_its_counts_and_sees_its_groups():
    loop = loop_of(UserOptimizer)
    plain, ours = loop.run(), loop.run(stage=2, elementwise=True)
    check_close(plain, ours, 1e-6)
    assert isinstance(ours.optimizer, UserOptimizer)
    assert ours.optimizer.calls == ours.optimizer.param_groups[0]["calls"] == loop.steps
    ours.optimizer.param_groups[0]["lr"] = 0.0
    before = ours.parameters
    loop.loss(ours.model, loop.batch(0)).backward()
    ours.optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(before, ours.parameters))
    assert [id(each) for each in ours.optimizer.param_groups[0]["params"]] == [id(p) for p in ours.model.parameters()]


def test_hooks_run_once_with_full_parameters():
    model, optimizer = wrapped()
    seen = []
    hook = lambda *_: seen.append([tuple(each.shape) for each in optimizer.param_groups[0]["params"]])
    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    model(torch.ones(20)).square().sum().backward()
    optimizer.step()
    assert seen == 2 * [[tuple(parameter.shape) for parameter in model.parameters()]]


def test_gradient_scalers_skip_and_scale_also_where_the_step_would_do_it_itself():
    outcomes = []
    for wrap in (False, True):
        model = mlp()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1, fused=True)
        if wrap:
            optimizer = ballast.wrap(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            loss = model(torch.ones(20)).square().sum() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert int(optimizer.state[model[0].weight]["step"]) == 4
        outcomes.append((scaler.get_scale(), [parameter.detach() for parameter in model.parameters()]))
    assert outcomes[0][0] == outcomes[1][0] == 512.0
    for mine, theirs in zip(outcomes[0][1], outcomes[1][1]):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_gradients_that_are_not_finite_skip_the_step():
    model, optimizer = wrapped(UserOptimizer, elementwise=True)
    before = [parameter.clone() for parameter in model.parameters()]
    (model(torch.ones(20)).sum() * float("inf")).backward()
    optimizer.step()
    assert optimizer.metrics()["skipped"] == 1.0
    assert optimizer.calls == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("offload", [None, "host"])
def test_bfloat16_parameters_keep_updates_that_rounding_would_lose(offload):
    options = {"lr": 1e-5}  # bfloat16 alone would round the updates away
    small = in_bfloat16(make_optimizer=torch.optim.RMSprop, optimizer_options=options, steps=100)
    exact = Loop(make_optimizer=torch.optim.RMSprop, optimizer_options=options, make_model=lambda: mlp(64), steps=100)
    assert math.isclose(small.run(stage=2, offload=offload).losses[-1], exact.run().losses[-1], rel_tol=0.03)


@pytest.mark.parametrize("offload", [None, "host"])
def test_training_continues_from_written_parameters(offload):
    loop = loop_of(steps=2)
    plain, ours = loop.run(), loop.run(stage=2, offload=offload)
    with torch.no_grad():
        for run in (plain, ours):
            run.model[0].weight.mul_(0.5)
    longer = loop_of(steps=5)
    check_close(longer.train(plain.model, plain.optimizer, 2), longer.train(ours.model, ours.optimizer, 2))


# --- State ---


def test_state_is_torchs():
    loop = loop_of(torch.optim.NAdam)
    plain, ours = loop.run(), loop.run(stage=2)
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters()):
        state, expected = ours.optimizer.state[mine], plain.optimizer.state[theirs]
        assert set(state) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-6)


def test_a_state_dict_goes_to_the_plain_optimizer_and_back():
    saved = []
    for configuration in ({}, {"stage": 2}):
        run = loop_of(torch.optim.NAdam, steps=3).run(**configuration)
        saved.append((run, copy.deepcopy(run.model.state_dict()), copy.deepcopy(run.optimizer.state_dict())))
    longer = loop_of(torch.optim.NAdam, steps=6)
    expected = longer.train(saved[0][0].model, saved[0][0].optimizer, 3)
    check_close(longer.train(saved[1][0].model, saved[1][0].optimizer, 3), expected)
    for wrap, (_, parameters, state) in ((True, saved[0]), (False, saved[1]), (True, saved[1])):
        model = mlp()
        model.load_state_dict(parameters)
        optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
        if wrap:
            optimizer = ballast.wrap(optimizer)
        given = copy.deepcopy(state)
        optimizer.load_state_dict(given)
        check_close(longer.train(model, optimizer, 3), expected)
        if wrap:
            assert optimizer.steps == 6
            for number, values in state["state"].items():  # the tensors that were given are not written to
                assert all(torch.equal(given["state"][number][name], value) for name, value in values.items())


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_state_dict_that_was_loaded_is_there_before_the_next_step(kind):
    first, second = loop_of(kind, steps=1).run(stage=2), loop_of(kind, steps=4).run(stage=2)
    expected = copy.deepcopy(first.optimizer.state_dict()["state"])
    for optimizer in (wrapped(kind=kind)[1], second.optimizer):
        optimizer.load_state_dict(first.optimizer.state_dict())
        state = optimizer.state_dict()["state"]
        assert len(state) == len(expected)
        for number, values in expected.items():
            assert all(torch.equal(state[number][name] * 1, value) for name, value in values.items())


def test_an_optimizer_that_has_trained_continues_when_wrapped():
    run, longer = loop_of(steps=3).run(), loop_of(steps=6)
    ours, plain = longer.train(run.model, ballast.wrap(run.optimizer), 3), longer.run()
    plain.losses = plain.losses[3:]
    check_close(plain, ours)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_dict_holds_a_ranks_shard_and_resumes(stage):
    answers = run_ranks(2, saved_state_of_custom_optimizer, stage)
    kept = [sum(values["square_avg"].numel() for values in state.values()) for state, _, _ in answers]
    assert all(0 < count < 20 * 24 + 24 + 24 * 5 + 5 for count in kept)
    assert sum(kept) == 20 * 24 + 24 + 24 * 5 + 5
    for _, losses, loaded_losses in answers:
        assert losses == loaded_losses


@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_are_added_later_freeze_and_thaw(stage):
    expected = run_ranks(2, bodies.own_step_of_changing_parameters, None)
    for ours, plain in zip(run_ranks(2, bodies.own_step_of_changing_parameters, stage), expected):
        for mine, theirs in zip(ours, plain):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_steps_are_counted_where_the_state_does_not_count_them():
    model, optimizer = wrapped(UserOptimizer, elementwise=True)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(False)
        model(torch.ones(20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.steps == 4


@pytest.mark.parametrize(("offload", "tier"), [(None, "device"), ("host", "host")])
def test_memory_counts_the_optimizers_own_state(offload, tier):
    run = loop_of(torch.optim.NAdam).run(stage=2, offload=offload)
    elements = sum(parameter.numel() for parameter in run.model.parameters())
    plain = Loop(make_optimizer=torch.optim.SGD).run(stage=2, offload=offload).optimizer
    more = run.optimizer.metrics()[f"memory_bytes/{tier}"] - plain.metrics()[f"memory_bytes/{tier}"]
    # Each element has two moments. Each parameter has a step count and a product.
    assert more == 8 * elements + 8 * len(list(run.model.parameters()))
    assert "own state" in run.optimizer.memory()


# --- Ends ---


def test_a_step_that_fails_says_so_and_ends_the_training_on_all_ranks():
    others, failed = run_ranks(2, own_step_fails)
    assert failed[0] == "ZeroDivisionError: no more batches"
    assert failed[1].startswith("UsageError: B1001 the optimizer's own step has failed: ZeroDivisionError")
    assert any("B3301" in said and "no more batches" in said for said in others)


def test_an_optimizer_that_is_deleted_or_closed_leaves_nothing():
    for close in (False, True):
        model, optimizer = wrapped()
        model(torch.ones(20)).square().sum().backward()
        optimizer.step()
        core = weakref.ref(optimizer._ballast.current)
        gc.disable()
        try:
            if close:
                optimizer.close()
                assert not optimizer._ballast.updates._parts
            else:
                del optimizer
            assert core() is None
        finally:
            gc.enable()


# --- Refusals ---


def refusal(optimizer, **options):
    with pytest.raises(ballast.UsageError) as raised:
        ballast.wrap(optimizer, **keywords(**options))
    return str(raised.value)


def weights():
    return [torch.nn.Parameter(torch.ones(2, 2))]


@pytest.mark.parametrize("elementwise", [True, False])
def test_optimizers_that_need_full_parameters_are_refused_with_the_reason(elementwise):
    class MyMuon(torch.optim.Muon):
        pass

    class Adafactor(UserOptimizer):
        pass

    class Shampoo(UserOptimizer):
        pass

    for kind, reason in [
        (torch.optim.LBFGS, "again and again"),
        (Adafactor, "rows and columns"),
        (MyMuon, "orthogonalizes"),
        (Shampoo, "whole matrices"),
        (torch.optim.SparseAdam, "sparse"),
    ]:
        said = refusal(kind(weights()), elementwise=elementwise)
        assert "B1005" in said
        assert kind.__name__ in said
        assert reason in said
        assert "torch.optim.Adafactor and torch.optim.Muon themselves are wrapped" in said


def test_unknown_optimizers_have_to_be_declared():
    class Mine(torch.optim.AdamW):
        pass

    for kind in (UserOptimizer, Mine):
        said = refusal(kind(weights()))
        assert "B1005" in said
        assert kind.__name__ in said
        assert "elementwise=True" in said
        ballast.wrap(kind(weights()), tuning=ballast.Tuning(elementwise=True))


def test_options_that_an_own_step_cannot_have_are_refused():
    for options, word in [({"state_format": "bf16"}, "state_format='bf16'"), ({"verify": 2}, "verify=2")]:
        said = refusal(torch.optim.RMSprop(weights()), **options)
        assert "B1001" in said
        assert word in said
        assert "its own step" in said
