"""Tests of parameters that are not trained in every step, and of those with one element or none."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import ballast
import pytest
import torch
from python.wrap.support import frozen_base
from python.wrap.support.bodies import evaluated, freeze_a_layer, step_on_ones
from python.wrap.support.frozen_base import model_of, moved, train, values_of
from python.wrap.support.loops import mean_square_in_bfloat16, mlp, mlp_in_bfloat16
from python.wrap.support.ranks import run_ranks


def bytes_of_files(folder):
    """Return the bytes on the drive of the files there that this process has open; those of scratch have no name."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.exists(entry) and os.readlink(entry).startswith(f"{folder}/"):
            found += os.stat(entry).st_blocks * 512
    return found


def in_each_tier(rank, folder, tile):
    results = {}
    for tier in ("device", "host", "nvme"):
        model = model_of()
        optimizer = frozen_base.wrapped(model, offload=moved(tier, folder), tile=tile)
        losses = train(model, optimizer, rank)
        metrics = optimizer.metrics()
        kept = {each: int(metrics[f"memory_bytes/{each}"]) for each in ("device", "host", "nvme")}
        results[tier] = (losses, values_of(model), kept, bytes_of_files(folder))
        optimizer.close()
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), results[tier][1]))
    return results


def resumes(rank, folder):
    """Return the losses and values of a training, and those of one that is resumed in the middle."""
    options = {"offload": moved("nvme", folder), "tile": 4096}
    plain = model_of()
    optimizer = frozen_base.wrapped(plain, **options)
    expected = train(plain, optimizer, rank, steps=4)
    optimizer.close()
    losses = []
    for first in (0, 2):
        model = model_of()
        optimizer = frozen_base.wrapped(model, run="adapters", **options)
        losses += train(model, optimizer, rank, first, steps=2)
        assert optimizer.steps == first + 2
        values = values_of(model)
        optimizer.close()
    return expected, list(plain.parameters()), losses, values


def wrapped(model, stage):
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return optimizer if stage is None else ballast.wrap(optimizer, model, stage=stage)


class Scaled(torch.nn.Module):
    """A model scaled by a parameter of one element, as CLIP's logits are. Another parameter is empty."""

    def __init__(self):
        super().__init__()
        self.linear = mlp()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.nothing = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return self.linear(x) * self.scale + self.nothing.sum()


def scaled(stage):
    """Train a Scaled whose scale is frozen and thawed."""
    model = Scaled()
    optimizer, losses = wrapped(model, stage), []
    for number in range(6):
        model.scale.requires_grad_(number not in (2, 3))
        loss = model(torch.ones(20)).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def under_input(stage):
    """Train with a frozen first layer. The gradient of the input needs it after the last gradient of a parameter."""
    model = mlp()
    freeze_a_layer(model, None)
    optimizer, x, losses = wrapped(model, stage), torch.ones(20, requires_grad=True), []
    for _ in range(3):
        loss = model(x).square().sum()
        loss.backward()
        losses += [loss.item(), x.grad.norm().item()]
        x.grad = None
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_turns(stage):
    """Train a model and its input in turns. The model is frozen while the input is trained, like a critic of an actor."""
    model = mlp()
    optimizer, x, losses = wrapped(model, stage), torch.nn.Parameter(torch.ones(20)), []
    other = torch.optim.SGD([x], lr=1e-2)
    for begins_frozen in (True, False, False, False):
        for is_frozen in (begins_frozen, not begins_frozen):
            model.requires_grad_(not is_frozen)
            loss = model(x if is_frozen else x.detach()).square().sum()
            loss.backward()
            losses.append(loss.item())
            (other if is_frozen else optimizer).step()
            (other if is_frozen else optimizer).zero_grad()
    return losses


def all_frozen(stage):
    """Make steps while all parameters are frozen, before the first step and after it."""
    model = mlp()
    optimizer, losses = wrapped(model, stage), []
    for _ in range(2):
        model.requires_grad_(False)
        x = torch.ones(20, requires_grad=True)
        model(x).square().sum().backward()
        losses.append(x.grad.norm().item())
        if stage is not None:
            assert optimizer.clip_grad_norm_(1.0) == 0.0
        optimizer.step()
        optimizer.zero_grad()
        model.requires_grad_(True)
        loss = model(torch.ones(20)).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def with_a_dropped_pass(stage):
    """Freeze or thaw a layer, and drop a backward pass between the forward and the backward pass of another loss."""
    model = mlp()
    optimizer, losses = wrapped(model, stage), []
    for is_frozen in (False, True, False):
        model[0].requires_grad_(not is_frozen)
        for drops in (True, False):
            kept = model(torch.ones(20)).square().sum()
            if drops:
                model(torch.ones(20)).sum().backward()
                optimizer.zero_grad()
            kept.backward()
            losses.append(kept.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def frozen_between_passes(stage):
    """Freeze a layer between two backward passes of a step, which updates it with the gradient of the first one."""
    model = mlp()
    optimizer, losses = wrapped(model, stage), []
    for _ in range(3):
        for is_frozen in (False, True):
            model[0].requires_grad_(not is_frozen)
            loss = model(torch.full((20,), 1.0 + is_frozen)).square().sum()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("train", [scaled, under_input, in_turns, with_a_dropped_pass, all_frozen, frozen_between_passes])
def test_as_torch_trains_it(train, stage):
    assert train(stage) == pytest.approx(train(None), rel=1e-5)


def all_of_them(rank, stage):
    return [train(stage) for train in (scaled, under_input, in_turns, with_a_dropped_pass, all_frozen)]


def test_ranks_train_it_as_one_does():
    alone = all_of_them(0, 3)
    assert run_ranks(2, all_of_them, 3) == [alone, alone]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_frozen_after_an_evaluation_with_gradients_keep_their_values(stage):
    model, optimizer = evaluated(stage=stage)
    model(torch.ones(20))
    with ballast.gather(model):
        before = model[0].weight.detach().clone()
    freeze_a_layer(model, optimizer)
    step_on_ones(model, optimizer)
    with ballast.gather(model):
        assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("begins_inside", [False, True])
def test_a_model_is_evaluated_inside_of_gather_after_a_layer_was_frozen_or_thawed(stage, begins_inside):
    model, optimizer = evaluated(stage=stage)
    expected = model(torch.ones(20))
    for trains in (False, True):
        if not begins_inside:
            model[0].requires_grad_(trains)
        with ballast.gather(model), torch.no_grad():
            if begins_inside:
                model[0].requires_grad_(trains)
            assert torch.equal(model(torch.ones(20)), expected)
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2


def values_after(evaluation, stage):
    """Return the values of a model in bfloat16 whose layers are frozen for an evaluation after each step."""
    model, batch = mlp_in_bfloat16(), torch.linspace(-1, 1, 20, dtype=torch.bfloat16)
    optimizer = wrapped(model, stage)
    for _ in range(5):
        mean_square_in_bfloat16(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in (model[0], model[2]):
            layer.requires_grad_(False)
            with torch.no_grad(), evaluation(model):
                model(batch)
            layer.requires_grad_(True)
    with ballast.gather(model):
        return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("evaluation", [nullcontext, ballast.gather])
def test_a_layer_that_was_frozen_for_an_evaluation_keeps_the_bits_of_its_masters(evaluation):
    expected = values_after(evaluation, 0)
    for stage in (2, 3):
        assert all(map(torch.equal, values_after(evaluation, stage), expected))


def test_a_step_below_stage_3_of_a_model_of_which_nothing_is_trained_has_no_partition():
    model = mlp().requires_grad_(False)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=2)
    optimizer.step()
    with pytest.raises(ballast.UsageError, match="B1007 cannot begin to train: all parameters of the optimizer are frozen"):
        optimizer.memory()


@pytest.mark.parametrize("calls", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_model_of_which_nothing_is_trained_is_partitioned_when_it_is_called(calls, is_deferred):
    expected = mlp(80)(torch.ones(20))
    with ballast.deferred() if is_deferred else nullcontext():
        model = mlp(80).requires_grad_(False)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    with calls():
        assert torch.equal(model(torch.ones(20)), expected)
    with pytest.raises(ballast.UsageError, match="B1007"):
        model[0].weight.sum()  # it is sharded
    model.requires_grad_(True)
    step_on_ones(model, optimizer)
    assert optimizer.steps == 1


def test_a_layer_is_frozen_after_an_interrupt():
    model, optimizer = evaluated()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(20))
    hook.remove()
    freeze_a_layer(model, optimizer)
    step_on_ones(model, optimizer)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_parameter_of_no_module_is_named():
    model, other = mlp(), torch.nn.Parameter(torch.ones(5))
    optimizer = ballast.wrap(torch.optim.AdamW([*model.parameters(), other]), model, stage=3)
    with pytest.raises(ballast.UsageError, match=r"B1001(.|\n)*no module of the model(.|\n)*params\[4\](.|\n)*stage=2"):
        (model(torch.ones(20)) * other).sum().backward()
    optimizer.close()


def test_parameters_of_a_module_that_is_gone_are_left_alone():
    model, optimizer = evaluated()
    gone = model[0]
    model[0] = torch.nn.Identity()
    model[2] = torch.nn.Linear(20, 5)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    step_on_ones(model, optimizer)
    partition, before = optimizer._ballast.current, gone.weight.clone()
    step_on_ones(model, optimizer)
    assert optimizer._ballast.current is partition
    assert torch.equal(gone.weight, before)


def without_a_group(stage):
    """Train on after the optimizer has lost a group. Its parameters collect gradients, as torch's do."""
    model = mlp()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1e-2)
    optimizer = optimizer if stage is None else ballast.wrap(optimizer, model, stage=stage)
    losses = []
    for number in range(4):
        if number == 2:
            optimizer.param_groups.pop(0)
        loss = model(torch.ones(20)).square().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(each.norm().item() for each in (model[0].weight, model[0].weight.grad))]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_of_a_group_that_is_removed_are_left_to_torch(stage):
    assert without_a_group(stage) == pytest.approx(without_a_group(None), rel=1e-5)


@pytest.mark.parametrize("was_trained", [True, False])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_layer_that_thaws_between_two_backward_passes_of_a_step_is_named(stage, was_trained):
    model = mlp()
    model[0].requires_grad_(was_trained)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
    step_on_ones(model, optimizer)
    freeze_a_layer(model, optimizer)
    model(torch.ones(20)).square().sum().backward()
    model[0].requires_grad_(True)
    with pytest.raises(ballast.UsageError, match=r"B1007 cannot take a gradient(.|\n)*parameter 0\.(weight|bias)"):
        model(torch.ones(20)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2


@pytest.mark.parametrize("is_foreign", [False, True])
def test_a_checkpoint_that_is_loaded_while_all_parameters_are_frozen_is_refused(is_foreign, tmp_path):
    plain = mlp()
    model, optimizer = evaluated(stage=2)
    if is_foreign:
        of_plain = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        step_on_ones(plain, of_plain)
        torch.save({"model": plain.state_dict(), "optimizer": of_plain.state_dict()}, tmp_path / "saved.pt")
    else:
        ballast.save(tmp_path, model, optimizer)
    path = tmp_path / "saved.pt" if is_foreign else tmp_path
    model.requires_grad_(False)
    with pytest.raises(ballast.UsageError, match="B1007 cannot load a checkpoint: all parameters of the optimizer are frozen"):
        ballast.load_checkpoint(path, model, optimizer)
    model.requires_grad_(True)  # the refusal has changed nothing
    step_on_ones(model, optimizer)
    assert optimizer.steps == 2
    ballast.load_checkpoint(path, model, optimizer)
    assert optimizer.steps == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters_are_where_the_mapping_puts_parameters(ranks, tmp_path):
    for results in run_ranks(ranks, in_each_tier, str(tmp_path), 4096):
        expected = results["device"]
        for tier, (losses, values, kept, on_drive) in results.items():
            assert losses == expected[0]
            assert all(torch.equal(one, other) for one, other in zip(values, expected[1]))
            assert kept[tier] > frozen_base.BASE / ranks
            for other in set(kept) - {tier, "device"}:
                assert kept[other] < frozen_base.BASE / ranks / 2
            assert tier == "device" or kept["device"] < frozen_base.BASE * 3 // 4  # units that are in use
            assert (on_drive > frozen_base.BASE / ranks) if tier == "nvme" else on_drive == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_forecasts_where_frozen_parameters_are(ranks, tmp_path):
    offload = {"parameters": "nvme", "state": "nvme"}
    plan = ballast.plan(frozen_base.model_of(), ranks=ranks, stage=3, offload=offload, host_memory="64GiB", drive_space="64GiB")
    assert plan.memory["nvme"]["frozen"] > frozen_base.BASE / ranks
    for results in run_ranks(ranks, in_each_tier, str(tmp_path), 0):
        assert results["nvme"][2]["nvme"] == sum(plan.memory["nvme"].values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_with_frozen_parameters_on_drives_is_resumed(ranks, tmp_path):
    for expected, expected_values, losses, values in run_ranks(ranks, resumes, str(tmp_path)):
        assert losses == expected
        assert all(torch.equal(one, other) for one, other in zip(values, expected_values))


def test_frozen_parameters_on_drives_are_written_and_loaded(tmp_path):
    offload = frozen_base.moved("nvme", tmp_path)
    model = frozen_base.model_of()
    optimizer = frozen_base.wrapped(model, offload=offload, tile=4096)
    frozen_base.train(model, optimizer)
    with ballast.gather(model), torch.no_grad():
        model[1].base.weight.mul_(2)
    frozen_base.train(model, optimizer)
    values = frozen_base.values_of(model)
    ballast.save(tmp_path / "saved", model, optimizer)
    other = frozen_base.model_of(seed=1)
    loaded = frozen_base.wrapped(other, offload=offload, tile=4096)
    ballast.load_checkpoint(tmp_path / "saved", other, loaded)
    assert all(torch.equal(one, other) for one, other in zip(values, frozen_base.values_of(other)))
    assert frozen_base.train(other, loaded) == frozen_base.train(model, optimizer)
    loaded.close()
    optimizer.offload()
    optimizer.reload()
    model.requires_grad_(False)  # frozen parameters alone
    with torch.no_grad():
        model(torch.ones(1, frozen_base.WIDE))
    found = frozen_base.values_of(model)
    model[0].up.requires_grad_(True)
    frozen_base.train(model, optimizer, steps=1)
    assert all(torch.equal(one, other) for one, other in zip(found[3:], frozen_base.values_of(model)[3:]))


@pytest.mark.parametrize("names_parameters", [False, True])
def test_a_tier_without_kinds_warns_of_a_frozen_base_that_stays(names_parameters, tmp_path, caplog):
    model = frozen_base.model_of()
    optimizer = frozen_base.wrapped(
        model, offload=frozen_base.moved("nvme", tmp_path) if names_parameters else f"nvme:{tmp_path}", tile=4096
    )
    frozen_base.train(model, optimizer, steps=1)
    optimizer.close()
    said = [record.getMessage() for record in caplog.records if "frozen parameters" in record.getMessage()]
    assert len(said) == (0 if names_parameters else 1)
    assert names_parameters or f'offload={{"parameters": "nvme:{tmp_path}"' in said[0]


@pytest.mark.parametrize("when", ["before the first step", "after it"])
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_by_hand_of_frozen_parameters_are_refused(stage, is_alone, when):
    """Torch would make the step with them."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.Linear(8, 4))
    model[0].requires_grad_(False)
    trained = model[0] if is_alone else model
    optimizer = ballast.wrap(torch.optim.SGD(trained.parameters(), lr=0.1), model, stage=stage)
    if when == "after it":
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weight = model[0].weight
    weight.grad = torch.ones(8, 20)
    with pytest.raises(ballast.UsageError, match=r"B1007 cannot make a step: a frozen(.|\n)*parameter 0.weight"):
        optimizer.step()
    weight.grad = None
    optimizer.step()
    optimizer.close()
