"""Tests of several optimizers that train one model."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast.checkpoint import manifest
from ballast.checkpoint.weights import state_in
from ballast.tools.command_line import main
from ballast.torch.parameters.managed_parameter import is_without_values
from ballast.torch.training import preconditions
from ballast.torch.training.model_and_optimizer import optimizers_of
from python.wrap.support.loops import Loop, keywords, mlp
from python.wrap.support.ranks import run_ranks
from python.wrap.support.several import Optimizers, Several, rule_and_own_step, same, tower, values_of, with_own_steps


def with_rules(matrices: Any, vectors: Any) -> Optimizers:
    return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)]


def of_one_kind(matrices: Any, vectors: Any) -> Optimizers:
    return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.AdamW(vectors, lr=2e-2, betas=(0.8, 0.9), weight_decay=0.0)]


def with_a_plain_optimizer(rank: int, stage: int, in_data_parallel: bool) -> dict[str, list[str]]:
    """Return what this rank is told if the second optimizer of a model is plain, if its parameters are frozen, if both
    optimizers are wrapped, and if they are wrapped one by one after the first one's plan was made."""
    said: dict[str, list[str]] = {}
    for name in ("plain", "frozen", "all", "one by one"):
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)), torch.nn.LayerNorm(4, bias=False))
        one, other = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[1:]))
        model[1:].requires_grad_(name != "frozen")
        called = torch.nn.parallel.DistributedDataParallel(model) if in_data_parallel else model
        if name == "all":
            one, other = ballast.wrap([one, other], model, stage=stage)
        else:
            one = ballast.wrap(one, model, stage=stage)
        if name == "one by one":
            one.memory()
            other = ballast.wrap(other, model, stage=stage)
        with heard() as said[name]:
            for _ in range(2):
                called(torch.ones(2, 4)).sum().backward()
                one.step(), other.step()
                one.zero_grad(), other.zero_grad()
    return said


@contextmanager
def heard() -> Iterator[list[str]]:
    """Return the warnings of Ballast inside the block, and its error that ends the block."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ballast").addHandler(handler)
    try:
        yield lines
    except ballast.Error as error:
        lines.append(str(error))
    finally:
        logging.getLogger("ballast").removeHandler(handler)


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    """Return what two ranks do: trainings in several configurations, and a checkpoint of one of them."""
    training = Several(rule_and_own_step, loop=Loop(rank=rank, ranks=dist.get_world_size()))
    found: dict[str, Any] = {"plain": training.run()}
    drive = {"parameters": f"nvme:{folder}", "state": "host"}
    for name, options in {
        "stage 0": {"stage": 0},
        "stage 2": {"stage": 2, "offload": "host"},
        "stage 3": {"stage": 3},
        "drive": {"stage": 3, "offload": {**drive, "state": f"nvme:{folder}"}},
    }.items():
        found[name] = training.run(**options)
    alternating = replace(training, every=2)
    model, optimizers = alternating.begin(stage=3)
    alternating.train(model, optimizers, 0, 3)  # the first one has gradients of a step that it has not made
    optimizers[0].zero_grad()
    with ballast.gather(model), torch.no_grad():
        model.blocks[1].up.weight.mul_(2.0)  # no optimizer has it
    ballast.save(f"{folder}/saved", model, optimizers, extra={"rank": rank})
    states = [copy.deepcopy(each.state_dict()) for each in optimizers]
    found["longer"] = training.train(model, optimizers, 4, 2)
    again, resumed = training.begin(stage=2)
    found["extra"] = ballast.load_checkpoint(f"{folder}/saved", again, resumed)
    found["steps"] = [each.steps for each in resumed]
    found["resumed"] = training.train(again, resumed, 4, 2)
    third, optimizers = training.begin(stage=3)
    ballast.load(third, f"{folder}/saved")  # the parameters alone: the states come as state_dict()
    for optimizer, state in zip(optimizers, states):
        optimizer.load_state_dict(state)
    found["reloaded"] = training.train(third, optimizers, 4, 2)
    return found


def trains_a_head_itself(rank: int, ranks: int, stage: int, directory: str) -> list[torch.Tensor]:
    """Train a model whose head a plain optimizer has, which begins frozen. Save and load in the middle. Return the parameters.
    Without a stage, one rank trains with plain torch on the batches of all."""
    loop = Loop(ranks=ranks)

    def begin() -> tuple[torch.nn.Module, list[Any]]:
        model = mlp()
        body = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        head = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
        return model, [body if stage < 0 else ballast.wrap(body, model, stage=stage, tuning=ballast.Tuning(timeout=20)), head]

    model, optimizers = begin()
    for step in range(6):
        model[2].requires_grad_(step > 0)
        model[0].bias.requires_grad_(step != 1)  # makes another partition
        for each in [rank] if stage >= 0 else range(ranks):
            (loop.loss(model, replace(loop, rank=each).batch(step)) / (1 if stage >= 0 else ranks)).backward()
        for parameter in model[2].parameters() if stage >= 0 and step > 0 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 3 and stage >= 0:
            ballast.save(directory, model, optimizers[0], extra=optimizers[1].state_dict())
            model, optimizers = begin()
            optimizers[1].load_state_dict(ballast.load_checkpoint(directory, model, optimizers[0]))
    assert stage < 0 or all(type(each) is torch.nn.Parameter for each in model[2].parameters())
    with ballast.gather(model):
        return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_two_optimizers_have_the_bits_of_torch(stage, every):
    """Also where one of them makes every second step, with the gradients of two."""
    training = Several(with_own_steps, every=every)
    plain = training.run()
    assert same(training.run(stage=stage), plain)
    assert same(training.run(stage=stage, one_by_one=True), plain)


@pytest.mark.parametrize("make", [with_rules, of_one_kind, rule_and_own_step])
def test_two_optimizers_follow_torch(make):
    training = Several(make, clip=0.05, micro_steps=2)
    plain, full, sharded = training.run(), training.run(stage=2), training.run(stage=3)
    assert same(full, sharded)
    torch.testing.assert_close(plain[0], sharded[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(plain[1], sharded[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{"checkpointing": "reentrant"}, {"checkpointing": "not reentrant"}, {"autocast": True}, {"deferred": True, "width": 40}],
    ids=str,
)
def test_stage_3_finds_saved_parameters_of_each_optimizer(changes):
    training = Several(rule_and_own_step, **changes)
    assert same(training.run(stage=2), training.run(stage=3))


def freeze(step, model, optimizers):
    """Freeze and thaw a block, and add parameters to both optimizers."""
    if step in (1, 3):
        model.blocks[0].requires_grad_(step == 3)
    if step == 2:
        optimizers[0].add_param_group({"params": [model.blocks[1].up.weight.requires_grad_(True)], "lr": 1e-3})
        optimizers[1].add_param_group({"params": [model.blocks[1].up.bias.requires_grad_(True)]})


def test_parameters_change_below_stage_3():
    training = Several(with_own_steps, change=freeze)
    assert same(training.run(stage=2), training.run(stage=0))


def freeze_in_stage_3(step, model, optimizers):
    if step in (1, 3):
        model.blocks[0].requires_grad_(step == 3)
    if step == 2:  # the first one keeps the parameters that no optimizer has
        optimizers[0].add_param_group({"params": [model.blocks[1].up.bias.requires_grad_(True)]})


def test_parameters_change_in_stage_3():
    training = Several(with_own_steps, change=freeze_in_stage_3)
    assert same(training.run(stage=3), training.run(stage=2))


def test_two_ranks_train_save_and_resume(tmp_path):
    for rank, found in enumerate(run_ranks(2, on_ranks, str(tmp_path))):
        for name in ("stage 2", "stage 3", "drive"):
            assert same(found[name], found["stage 0"]), name
        torch.testing.assert_close(found["stage 0"], found["plain"], atol=1e-6, rtol=1e-6)
        assert found["extra"] == {"rank": rank} and found["steps"] == [1, 3]
        assert found["longer"] == found["resumed"] == found["reloaded"]
    training = Several(rule_and_own_step)
    model, optimizers = training.begin(stage=3)  # the checkpoint is loaded on one rank, and on drives
    ballast.load_checkpoint(tmp_path / "saved", model, optimizers)
    on_drives = training.begin(stage=2, offload={"state": f"nvme:{tmp_path}"})
    ballast.load_checkpoint(tmp_path / "saved", *on_drives)
    assert training.train(model, optimizers, 4, 2) == training.train(*on_drives, 4, 2)
    assert [each.steps for each in optimizers] == [3, 5]


def test_clipping_over_one_and_over_all():
    """The second norm counts what the first clipping has left of one optimizer's gradients."""
    plain, ours = [Several(with_own_steps).begin(**options) for options in ({}, {"stage": 3})]
    for model, _ in (plain, ours):
        Several().backward(model, 0, 0, 1)
    of_one = torch.nn.utils.clip_grad_norm_(plain[1][1].param_groups[0]["params"], 0.01)
    torch.testing.assert_close(ours[1][1].clip_grad_norm_(0.01), of_one)
    of_all = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02) for model, _ in (plain, ours)]
    torch.testing.assert_close(of_all[1], of_all[0])
    assert of_all[0] > of_one.clamp(max=0.01)
    for _, optimizers in (plain, ours):
        for optimizer in optimizers:
            optimizer.step()
    with ballast.gather(ours[0]):
        torch.testing.assert_close(values_of(ours[0]), values_of(plain[0]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_a_scaler_skips_the_optimizer_whose_gradients_overflow(stage, unscales):
    model, optimizers = Several(with_own_steps).begin(**({} if stage is None else {"stage": stage}))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = values_of(model)
    position = next(number for number, each in enumerate(model.parameters()) if each is model.position)
    model.position.register_hook(lambda gradient: gradient * float("inf"))
    scaler.scale(Loop().loss(model, Loop().batch(0))).backward()
    for optimizer in optimizers:
        if unscales:
            scaler.unscale_(optimizer)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    if stage is None:
        return
    with ballast.gather(model):
        changed = [not torch.equal(*both) for both in zip(before, values_of(model))]
    matrices = {id(each) for each in optimizers[0].param_groups[0]["params"]}
    assert changed == [id(each) in matrices for each in model.parameters()] and not changed[position]


def test_each_optimizer_has_its_own_figures_and_memory():
    training = Several(rule_and_own_step, every=2)
    model, optimizers = training.begin(stage=3)
    training.train(model, optimizers)
    assert [each.steps for each in optimizers] == [2, 4]
    assert [each.metrics()["step"] for each in optimizers] == [2.0, 4.0]
    assert all("parameters" in each.memory() for each in optimizers)
    with pytest.raises(ballast.UsageError, match="ballast.gather"):
        model.blocks[1].up.weight.sum()  # no optimizer has it, and the first one keeps its shards
    with torch.no_grad():
        before = model(Loop().batch(0))
    for optimizer in optimizers:
        optimizer.offload()
    with pytest.raises(ballast.UsageError, match="off its device"):
        model(Loop().batch(0))
    for optimizer in optimizers:
        optimizer.reload()
    with torch.no_grad():
        assert torch.equal(model(Loop().batch(0)), before)


@pytest.mark.parametrize("first", [0, 1])
def test_one_optimizer_continues_after_the_other_is_closed(first):
    training = Several(with_own_steps)
    (model, optimizers), (plain, of_plain) = training.begin(stage=3), training.begin()
    training.train(model, optimizers, 0, 2), training.train(plain, of_plain, 0, 2)
    optimizers[first].close()
    for step in (2, 3):
        for each in (model, plain):
            training.backward(each, step, 0, 1)
        for left in (optimizers[1 - first], of_plain[1 - first]):
            left.step()
        model.zero_grad(), plain.zero_grad()
    with ballast.gather(model):
        assert all(map(torch.equal, values_of(model), values_of(plain)))
    optimizers[1 - first].close()
    assert not [name for name in vars(model) if name.startswith("ballast")]


def test_an_interrupted_call_leaves_nothing_behind():
    training = Several(with_own_steps)
    model, optimizers = training.begin(stage=3)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = model.blocks[2].up.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(Loop().batch(0))
    handle.remove()
    losses = training.train(model, optimizers)
    assert losses == training.run()[0]
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_module_with_parameters_of_one_optimizer_may_be_called_first():
    model, optimizers = Several(with_own_steps).begin(stage=3)
    model.blocks[2].norm(torch.ones(16)).sum().backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    for optimizer in optimizers:
        optimizer.step()


def test_an_infinite_gradient_of_any_optimizer_is_found():
    """Torch's scaler looks at the gradients of one optimizer; others look at those of a model."""
    model, _optimizers = Several(with_own_steps).begin(stage=3)
    model.last.weight.register_hook(lambda gradient: gradient * float("inf"))
    Several().backward(model, 0, 0, 1)
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones(1))
    assert found.item() == 1.0


@pytest.mark.parametrize("stage", [2, 3])
def test_the_first_optimizer_offloads_activations(stage, tmp_path):
    training, options = Several(with_own_steps), {"stage": stage, "activations": f"nvme:{tmp_path}"}
    assert same(training.run(**options), training.run())
    with pytest.raises(ballast.UsageError, match="activations= is of the one that is wrapped first"):
        training.begin(one_by_one=True, **options)


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_and_pickles_of_the_model_have_no_optimizer(stage):
    model, optimizers = Several(with_own_steps).begin(stage=stage)
    Several().train(model, optimizers, 0, 1)
    with ballast.gather(model):
        copies = [copy.deepcopy(model) if stage == 3 else pickle.loads(pickle.dumps(model))]
    for each in copies:
        optimizer = ballast.wrap(torch.optim.AdamW(each.parameters()), each, stage=stage)
        assert len(optimizers_of(each)) == 1
        optimizer.close()
    assert len(optimizers_of(model)) == 2


UNAVERAGED = {
    False: "no wrapped optimizer has 5 of the model's parameters, so nothing averages .*: 1.weight, 1.bias, 2.weight and 2",
    True: "B1001 cannot make a step: no wrapped optimizer has 5 (.|\n)*1.weight, 1.bias, 2.weight and 2 more(.|\n)*wrap",
}


@pytest.mark.parametrize("in_data_parallel", [False, True])
@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_that_nothing_averages_are_told_once_or_refused(stage, in_data_parallel):
    one, other = run_ranks(2, with_a_plain_optimizer, stage, in_data_parallel)
    for rank, said in enumerate((one, other)):
        assert len(said["plain"]) == (1 if in_data_parallel or rank == 0 else 0)
        assert all(re.match(UNAVERAGED[in_data_parallel], line) for line in said["plain"])
        assert said["frozen"] == said["all"] == said["one by one"] == []


def test_a_single_rank_averages_nothing(caplog):
    model = mlp()
    one, _ = halves(model)
    one = ballast.wrap(one, model)
    model(torch.ones(20)).sum().backward()
    one.step()
    assert caplog.text == ""


# --- Refused calls ---


def halves(model):
    return torch.optim.AdamW(model[0].parameters(), lr=1e-2), torch.optim.SGD(model[2].parameters(), lr=0.1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_belongs_to_one_optimizer(stage):
    model = mlp()
    one, other = halves(model)
    other.add_param_group({"params": [model[0].bias]})
    with pytest.raises(ballast.UsageError, match="another wrapped optimizer trains(.|\n)*parameter 0.bias"):
        ballast.wrap([one, other], model, stage=stage)
    assert type(one) is torch.optim.AdamW and not vars(model).get("ballast_siblings")
    del other.param_groups[1]
    one, other = ballast.wrap([one, other], model, stage=stage)
    with pytest.raises(ballast.UsageError, match="cannot add a parameter group: another(.|\n)*parameter 0.bias"):
        other.add_param_group({"params": [model[0].bias]})
    assert len(other.param_groups) == 1


def test_a_refused_list_leaves_deferred_parameters_to_the_next_one():
    with ballast.deferred():
        model = mlp(500)
    assert model[0].weight.is_meta and model[2].weight.is_meta
    one, other = halves(model)
    other.defaults["lr"] = other.param_groups[0]["lr"] = -1.0
    with pytest.raises(ballast.UsageError, match="lr"):
        ballast.wrap([one, other], model, stage=3)
    other.param_groups[0]["lr"] = 0.1
    one = ballast.wrap(one, model, stage=3)
    with pytest.raises(ballast.UsageError, match="in stage 3, and not in stage 2"):
        ballast.wrap(other, model, stage=2)
    other = ballast.wrap(other, model, stage=3)
    assert "parameters" in one.memory() and is_without_values(model[2].weight)  # its values come when its own optimizer begins
    with ballast.gather(model):
        assert all(map(torch.equal, values_of(model), values_of(mlp(500))))
    with pytest.raises(ballast.UsageError, match="ballast.gather"):
        model[0].weight.sum()


def test_a_refused_optimizer_gives_deferred_parameters_back(monkeypatch):
    with ballast.deferred():
        model = mlp(500)
    one, other = halves(model)
    one = ballast.wrap(one, model, stage=3)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(preconditions, "begin_with_same_values", lambda *_: 1 // 0)
        ballast.wrap(other, model, stage=3)
    with ballast.gather(model):
        assert all(map(torch.equal, values_of(model), values_of(mlp(500))))
    assert one.steps == 0


@pytest.mark.parametrize("stages", [(2, 3), (3, 2), (3, 3)])
def test_stage_3_refuses_an_optimizer_of_a_part_of_the_model(stages):
    model = torch.nn.Sequential(mlp(), torch.nn.Linear(5, 5))
    part = ballast.wrap(torch.optim.SGD(model[0][0].parameters(), lr=0.1), model[0], stage=stages[0])
    with pytest.raises(ballast.UsageError, match="as a part of another one(.|\n)*0.0.weight"):
        ballast.wrap(torch.optim.SGD(model[1].parameters(), lr=0.1), model, stage=stages[1])
    part.close()


def test_stage_3_wraps_all_optimizers_before_training_begins():
    model = mlp()
    one, other = halves(model)
    model[2].weight.requires_grad_(False)
    one = ballast.wrap(one, model, stage=3)
    model(torch.ones(20)).sum().backward()
    with pytest.raises(ballast.UsageError, match="training has begun(.|\n)*parameter 2.weight"):
        ballast.wrap(other, model, stage=3)


@pytest.mark.parametrize("wraps", [False, True])
def test_an_optimizer_of_whole_parameters_is_wrapped_when_training_has_begun(wraps):
    loop, values = Loop(), []
    for wrap in (lambda each, model: each, lambda each, model: ballast.wrap(each, model, stage=3)):
        model = mlp()
        one, other = halves(model)
        one = wrap(one, model)
        for step in range(4):
            other = wrap(other, model) if step == 2 and wraps else other
            loop.loss(model, loop.batch(step)).backward()
            for each in (one, other):
                each.step()
                each.zero_grad()
        with ballast.gather(model):
            values.append(values_of(model))
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": "auto"}, "chooses for one"),
        ({"memory": "1GiB"}, "memory= limits"),
        ({"max_grad_norm": 1.0}, "max_grad_norm= clips(.|\n)*clip_grad_norm_"),
        ({"outer": ballast.DiLoCo(every=2)}, "outer= exchanges"),
    ],
    ids=str,
)
def test_options_of_one_optimizer_are_refused_for_a_list(options, said):
    model = mlp()
    with pytest.raises(ballast.UsageError, match=said):
        ballast.wrap(halves(model), model, **keywords(**options))


def test_a_list_without_an_optimizer_is_refused():
    with pytest.raises(ballast.UsageError, match="no optimizer"):
        ballast.wrap([], mlp())


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_hold_all_optimizers_or_none(stage, tmp_path):
    training = Several(rule_and_own_step)
    model, optimizers = training.begin(stage=stage)
    training.train(model, optimizers, 0, 1)
    with pytest.raises(ballast.UsageError, match="without one of its optimizers(.|\n)*position"):
        ballast.save(tmp_path, model, optimizers[0])
    ballast.save(tmp_path, model, optimizers)
    with pytest.raises(ballast.UsageError, match="AdamW into RMSprop"):
        ballast.load_checkpoint(tmp_path, model, optimizers[::-1])
    one = tower()
    alone = ballast.wrap(torch.optim.AdamW([each for each in one.parameters() if each.requires_grad]), one)
    with pytest.raises(ballast.UsageError, match="has 2 optimizers: AdamW, RMSprop"):
        ballast.load_checkpoint(tmp_path, one, alone)


def test_commands_know_each_optimizer_of_a_checkpoint(tmp_path, capsys):
    training = Several(rule_and_own_step)
    model, optimizers = training.begin(stage=2)
    training.train(model, optimizers, 0, 1)
    ballast.save(tmp_path, model, optimizers)
    assert main(["inspect", str(tmp_path)]) == 0
    summary = capsys.readouterr().out
    assert "optimizer   AdamW; moments: exp_avg, exp_avg_sq\n" in summary
    assert "optimizer   RMSprop; state of its own step: square_avg, step\n" in summary
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["format"], content["optimizer"], content["others"][0]["optimizer"]) == (1, "AdamW", "RMSprop")
    state = state_in(manifest.read(tmp_path))
    assert set(state["first.weight"]) == {"exp_avg", "exp_avg_sq"}
    assert set(state["position"]) == {"square_avg", "step"}


# --- Parameters that no wrapped optimizer has ---


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_plain_optimizer_trains_the_parameters_that_no_wrapped_one_has(stage, ranks, tmp_path):
    expected = trains_a_head_itself(0, ranks, -1, "")
    for mine in run_ranks(ranks, trains_a_head_itself, ranks, stage, str(tmp_path)):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
