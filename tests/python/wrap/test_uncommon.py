"""Tests of uncommon models and training loops: they train as in torch, or are refused with a reason."""

from __future__ import annotations

import weakref
from typing import Any

import ballast
import numpy
import pytest
import torch
from ballast.torch.training.metrics import read_throughput
from python.wrap.support.loops import Loop, Tower, keywords, mean_square, mlp
from python.wrap.support.models import UsedByMethod, small_batch
from python.wrap.support.ranks import run_ranks
from torch import nn


class Attends(nn.Module):
    """A model that reads parameters of its submodules directly: torch's attention does, and so does its own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(16, 2)
        self.old, self.new = nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x, x, x)[0]
        apart = (self.old.weight.square().mean() * self.new.weight[0, 0]).tanh()
        return nn.functional.linear(x, torch.cat([self.old.weight, self.new.weight])) * (1 + apart)


class Expert(nn.Module):
    """A model in which the rank selects one of two experts."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.rank = rank
        self.first = nn.Linear(16, 16)
        self.experts = nn.ModuleList([nn.Linear(16, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.experts[self.rank](self.first(x))
        return chosen


def overflows_on_one_rank(rank: int, stage: int) -> list[float]:
    """Return a GradScaler's scale after each step. Rank 0's gradients overflow in the second."""
    model = Expert(rank)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(3):
        loss = model(small_batch(step, rank)).square().mean() * (float("inf") if (rank, step) == (0, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


def clips_without_a_batch(rank: int, stage: int) -> tuple[list[float], list[torch.Tensor]]:
    """Clip in three steps, of which rank 1 has no batch in the second. Return the norms and the parameters at the end."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model, stage=stage)
    norms = []
    for step in range(3):
        if (rank, step) != (1, 1):
            (100 * model(small_batch(step, rank)).square().mean()).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, [parameter.detach().clone() for parameter in model.parameters()]


def scales_by_its_own_factor(rank: int) -> str:
    model = Expert(rank)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    (100 * model(small_batch(0, rank)).square().sum()).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5 / (1 + rank))
    try:
        optimizer.step()
    except ballast.UsageError as error:
        return str(error)
    return ""


def begins_with_its_own_values(rank: int, stage: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].running_mean.normal_()
    model[0].requires_grad_(False)
    first = {name: values.clone() for name, values in model.state_dict().items()}
    ballast.wrap(torch.optim.SGD(model[2].parameters(), lr=0.1), model, stage=stage)
    return {"first": first, "now": {name: values.clone() for name, values in model.state_dict().items()}}


class LooksTwice(torch.nn.Module):
    """A model that uses a view of a parameter before other modules run and, if `late` is set, after them too."""

    def __init__(self, late: bool):
        super().__init__()
        self.tied = torch.nn.Linear(16, 16)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
        self.late = late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(x) @ self.tied.weight.t()
        view = self.tied.weight.t() if self.late else None
        for block in self.blocks:
            x = block(x)
        return x if view is None else x @ view


every_stage = pytest.mark.parametrize("stage", [None, 0, 2, 3])


def trained(make_model, stage, body, **options):
    """Return the losses of four steps. Without a stage, torch trains alone."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, **keywords(stage=stage, **options))
    losses = []
    for step in range(4):
        losses.append(body(model, optimizer, small_batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def follows_torch(make_model, stage, body):
    assert trained(make_model, stage, body) == pytest.approx(trained(make_model, None, body), rel=1e-5)


def small():
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def with_loss(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    return loss.item()


@every_stage
def test_parameters_of_several_modules_are_used_together(stage):
    follows_torch(Attends, stage, with_loss)


@every_stage
def test_a_model_is_used_by_a_method_and_never_called(stage):
    def body(model, optimizer, batch):
        loss = model.loss(batch)
        loss.backward()
        return loss.item()

    follows_torch(UsedByMethod, stage, body)


@pytest.mark.parametrize("late", [False, True])
def test_a_view_that_outlives_gathered_values_is_reported(caplog, late):
    model = LooksTwice(late)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    for _ in range(2):
        with torch.no_grad():
            model(torch.ones(16))
        model(torch.ones(16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    said = [record.message for record in caplog.records if "a view of" in record.message]
    assert len(said) == late
    assert all("parameter tied.weight" in line for line in said)


@pytest.mark.parametrize(
    "stage, said",
    [
        (2, "first in blocks.2.down.weight (unit position to head.bias)"),  # all parameters are in one unit
        (3, "first in blocks.2.down.weight (unit blocks.2)"),
    ],
)
def test_the_first_gradient_that_is_not_finite_is_named(caplog, stage, said):
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.blocks[2].down.weight.register_hook(lambda gradient: gradient * float("inf"))
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    assert said in caplog.text


def test_a_printed_parameter_says_where_its_values_are():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    model(torch.ones(20)).sum().backward()
    assert repr(model[0].weight) == (
        "Parameter of (24, 20), torch.float32, gathered where it is used: with ballast.gather(model): ..."
    )
    assert f"{model[0].weight}" == repr(model[0].weight)
    with ballast.gather(model):
        assert "tensor(" in repr(model[0].weight)
    optimizer.step()


@every_stage
def test_a_penalty_on_parameters_is_computed_where_they_are_gathered(stage):
    def body(model, optimizer, batch):
        loss = model(batch).square().mean()
        with ballast.gather(model):
            loss = loss + 0.1 * sum(parameter.square().sum() for parameter in model.parameters())
        loss.backward()
        return loss.item()

    follows_torch(small, stage, body)


@every_stage
def test_an_evaluation_in_inference_mode_comes_first(stage):
    def body(model, optimizer, batch):
        with torch.inference_mode():
            model(batch)
        return with_loss(model, optimizer, batch)

    follows_torch(small, stage, body)


def wide():
    return torch.nn.Sequential(torch.nn.Linear(16, 80), torch.nn.Tanh(), torch.nn.Linear(80, 20))


def deferred():
    with ballast.deferred():
        model = wide()
    assert any(parameter.is_meta for parameter in model.parameters())
    return model


def by_hand(model, optimizer):
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.empty(parameter.shape)
        parameter.grad.copy_(torch.linspace(-1, number, parameter.numel()).view(parameter.shape))


def by_a_penalty(model, optimizer):
    sum(parameter.square().sum() for parameter in model.parameters()).backward()


def by_a_clipped_penalty(model, optimizer):
    by_a_penalty(model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_hand_and_call(model, optimizer):
    by_hand(model, optimizer)
    model(small_batch(9)).sum().backward()


def by_penalty_and_call(model, optimizer):
    by_a_penalty(model, optimizer)
    model(small_batch(9)).sum().backward()


@pytest.mark.parametrize("tier", ["device", "host", "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("gradients", "make_model"),
    [
        *((each, wide) for each in (by_hand, by_a_penalty, by_a_clipped_penalty, by_hand_and_call, by_penalty_and_call)),
        *((each, deferred) for each in (by_hand, by_hand_and_call)),
    ],
)
def test_gradients_come_before_the_first_call(gradients, make_model, stage, tier, tmp_path):
    def body(model, optimizer, batch):
        if not optimizer.state:
            gradients(model, optimizer)
            return 0.0
        return with_loss(model, optimizer, batch)

    options = {} if tier == "device" else {"offload": "host" if tier == "host" else f"nvme:{tmp_path}"}
    expected = trained(wide, None, body)
    assert expected[0] == 0.0 != expected[1]
    assert trained(make_model, stage, body, **options) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("backward_too", [False, True])
def test_gradients_are_put_in_their_places_by_hand(stage, backward_too):
    def body(model, optimizer, batch):
        loss = model(batch).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=backward_too)
        if backward_too:
            (3 * loss).backward()
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient
        return loss.item()

    follows_torch(small, stage, body)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_all_is_cleared_where_a_part_was_cleared_by_hand(stage):
    def body(model, optimizer, batch):
        (3 * model(batch).square().mean()).backward()
        next(model.parameters()).grad = None
        optimizer.zero_grad()
        return with_loss(model, optimizer, batch)

    follows_torch(small, stage, body)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_of_a_loaded_state_are_known_before_the_next_one(stage):
    plain = torch.optim.AdamW(mlp().parameters())
    for group in plain.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    plain.step()
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    assert optimizer.steps == 0
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.steps == 1
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 2


@pytest.mark.parametrize(
    "option",
    [
        {"threads": "2"},
        {"threads": -1},
        {"timeout": -1},
        {"timeout": "60"},
        {"timeout": float("inf")},
        {"offload": False},
        {"max_grad_norm": "1"},
        {"mesh": 3},
    ],
)
def test_impossible_values_of_options_are_refused_by_name(option):
    [(name, value)] = option.items()
    with pytest.raises(ballast.UsageError, match=f"B1001 cannot use {name}={value!r}: "):
        ballast.wrap(torch.optim.AdamW(mlp().parameters()), **keywords(**option))


def test_numbers_of_numpy_are_accepted():
    model = mlp()
    options = {"threads": numpy.int64(1), "max_grad_norm": numpy.float32(1), "verify": numpy.int64(2)}
    options |= {"timeout": numpy.int64(60)}
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, **keywords(**options))
    model(torch.ones(20)).sum().backward()
    optimizer.step()


def threads_of(value):
    optimizer = ballast.wrap(torch.optim.AdamW(mlp().parameters()), tuning=ballast.Tuning(threads=value))
    optimizer.close()
    return optimizer._ballast.options.tuning.threads


COUNTS = {
    "ranks": lambda value: ballast.plan("gpt2", ranks=value).ranks,
    "fragments": lambda value: ballast.DiLoCo(every=8, fragments=value).fragments,
    "tokens": lambda value: read_throughput(value, None, None).tokens,
    "threads": threads_of,
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_may_be_of_numpy_but_is_no_truth_value(name):
    count = COUNTS[name](numpy.int64(2))
    assert (type(count), count) == (int, 2)
    for value in (True, 2.0, "2"):
        with pytest.raises(ballast.UsageError, match=f"cannot use {name}={value!r}: it is not a whole number"):
            COUNTS[name](value)


def test_a_class_of_modules_is_named_without_a_list():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3, tuning=ballast.Tuning(units="Linear"))
    model(torch.ones(20)).sum().backward()
    optimizer.step()


def test_momentum_that_is_set_after_wrap_is_refused():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ballast.UsageError, match="cannot turn momentum on after"):
        model(torch.ones(20)).sum().backward()
    optimizer.param_groups[0]["momentum"] = 0


@pytest.mark.parametrize("has_stepped", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_loaded_momentum_that_sgd_did_not_have_is_refused_at_the_load(stage, has_stepped):
    loop = Loop(steps=2)
    with_momentum = torch.optim.SGD(mlp().parameters(), lr=0.5, momentum=0.9)

    def trained(**options):
        model = mlp()
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
        losses = loop.train(model, optimizer, 0 if has_stepped else 2).losses
        if options["loads"]:
            with pytest.raises(ballast.UsageError, match="B1005 cannot turn momentum on after (.|\n)*load_state_dict"):
                optimizer.load_state_dict(with_momentum.state_dict())
            assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0)
        return losses + loop.train(model, optimizer, 0).losses

    assert trained(loads=True) == trained(loads=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_of_a_wrapped_optimizer_are_not_wrapped_again(stage):
    model = mlp()
    first = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    with pytest.raises(ballast.UsageError, match="another wrapped optimizer trains"):
        ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    first.close()
    ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_unreachable_optimizer_does_not_block_the_next_one(stage):
    """The next wrap() collects an optimizer in a cycle, in the middle of a step, as when a notebook's cell is run again."""
    model = mlp()
    first = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    model(torch.ones(20)).sum().backward()
    training = weakref.ref(first._ballast.current)
    first.cycle = first
    del first
    second = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    assert training() is None
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(20)).sum().backward()
    second.step()


def test_two_optimizers_share_a_model_below_stage_3():
    model = mlp()
    first = ballast.wrap(torch.optim.AdamW(model[0].parameters()), model, stage=2)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ballast.UsageError, match="another wrapped optimizer trains"):
        ballast.wrap(second, model, stage=3)
    second = ballast.wrap(second, model, stage=2)
    model(torch.ones(20)).sum().backward()
    first.step()
    second.step()


def test_frozen_parameters_that_cannot_be_partitioned_are_named():
    model = mlp()
    model[0].bias = torch.nn.Parameter(torch.zeros(24).to_sparse(), requires_grad=False)
    optimizer = ballast.wrap(torch.optim.AdamW([model[2].weight]), model, stage=3)
    with pytest.raises(ballast.UsageError, match="parameter 0.bias"):
        model(torch.ones(20))
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_scales_stay_the_same_where_gradients_overflow_on_one_rank(stage):
    scales = run_ranks(2, overflows_on_one_rank, stage)
    assert scales == [[1024.0, 512.0, 512.0]] * 2


def test_a_rank_without_a_batch_clips_as_the_others():
    (norms, parameters), other = run_ranks(2, clips_without_a_batch, 0)
    assert norms == other[0] and all(map(torch.equal, parameters, other[1]))
    for stage_2 in run_ranks(2, clips_without_a_batch, 2):
        assert stage_2[0] == norms and all(map(torch.equal, parameters, stage_2[1]))


def test_ranks_that_scale_by_different_factors_are_refused_with_a_remedy():
    for said in run_ranks(2, scales_by_its_own_factor):
        assert "different factors" in said and "optimizer.clip_grad_norm_(max_norm)" in said


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_and_buffers_begin_as_rank_0_has_them(stage):
    ranks = run_ranks(2, begins_with_its_own_values, stage)
    assert not torch.equal(ranks[0]["first"]["0.weight"], ranks[1]["first"]["0.weight"])
    for rank in ranks:
        for name, values in rank["now"].items():
            assert torch.equal(values, ranks[0]["first"][name]), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_in_channels_last_become_contiguous_with_a_warning(stage, caplog):
    """Computation in that format continues where the inputs have it."""

    def convolutions():
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Tanh(), torch.nn.Conv2d(8, 4, 3))
        return model.to(memory_format=torch.channels_last)

    def body(model, optimizer, batch):
        images = batch.repeat(6, 1)[: 2 * 3 * 8].reshape(2, 3, 8, -1).contiguous(memory_format=torch.channels_last)
        found = model(images)
        assert found.is_contiguous(memory_format=torch.channels_last) and not found.is_contiguous()
        found.square().mean().backward()
        return found.square().mean().item()

    follows_torch(convolutions, stage, body)
    [said] = [record.message for record in caplog.records if "channels_last" in record.message]
    assert "parameter 0.weight (and 1 more) loses torch.channels_last" in said and "inputs.to(memory_format=" in said


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("weight_decay", None, "weight_decay is None, which is no number"),
        ("lr", torch.tensor([0.1, 0.2]), r"lr is tensor\(\[0.1000, 0.2000\]\), which is no number"),
        ("betas", 0.9, "betas is 0.9, which is not two numbers"),
    ],
)
def test_an_option_that_is_no_number_is_named_in_the_step(option, value, said, stage):
    model = mlp()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    optimizer = ballast.wrap(optimizer, model, stage=stage)
    mean_square(model, torch.ones(20)).backward()
    optimizer.step(), optimizer.zero_grad()
    given, optimizer.param_groups[1][option] = optimizer.param_groups[1][option], value
    mean_square(model, torch.ones(20)).backward()
    message = rf"B1001 cannot use the options of a parameter group: {said}(.|\n)*param_groups\[1\]"
    with pytest.raises(ballast.UsageError, match=message):
        optimizer.step()
    optimizer.param_groups[1][option] = given
    optimizer.step()  # the gradients are those of the refused step
    assert optimizer.steps == 2


def test_an_option_that_a_group_lacks_is_named_in_the_step():
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    optimizer.load_state_dict(torch.optim.SGD(mlp().parameters()).state_dict())
    with pytest.raises(ballast.UsageError, match="B1001 cannot use the options of a parameter group: they lack 'betas'"):
        mean_square(model, torch.ones(20)).backward()


@every_stage
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("change", ["nothing", "freezes"])
def test_a_functional_call_replaces_a_parameter_for_one_call(stage, gradients, change, tmp_path):
    """The call is the first of a partition, and the parameter that it replaces is trained by the steps after it."""

    def run(stage):
        torch.manual_seed(0)
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if stage is not None:
            optimizer = ballast.wrap(optimizer, model, stage=stage)
        losses = []
        if change == "freezes":
            losses.append(with_loss(model, optimizer, small_batch(0)))
            optimizer.step()
            optimizer.zero_grad()
            model[2].bias.requires_grad_(False)
        replacement = torch.full((8, 16), 0.1, requires_grad=gradients)
        with torch.set_grad_enabled(gradients):
            loss = torch.func.functional_call(model, {"0.weight": replacement}, small_batch(1)).square().mean()
        losses.append(loss.item())
        if gradients:
            loss.backward()
            losses.append(replacement.grad.norm().item())
            optimizer.step()
            optimizer.zero_grad()
        assert type(replacement) is torch.Tensor and model[0].weight is optimizer.param_groups[0]["params"][0]
        for step in range(2):
            losses.append(with_loss(model, optimizer, small_batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        with ballast.gather(model):
            kept = [each.detach().clone() for each in model.parameters()]
        if stage is not None:
            ballast.save(tmp_path, model, optimizer)
            other = small()
            ballast.load(other, tmp_path)
            assert all(map(torch.equal, kept, other.parameters()))
        return [*losses, *(each.norm().item() for each in kept)]

    assert run(stage) == pytest.approx(run(None), rel=1e-5)


def test_a_parameter_that_left_the_model_is_named_where_training_begins():
    model = small()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    replacement = torch.nn.Parameter(torch.ones(8, 16))
    with pytest.raises(ballast.UsageError, match=r"B1007(.|\n)*parameter 0.weight(.|\n)*before functional_call"):
        torch.func.functional_call(model, {"0.weight": replacement}, small_batch(0))
    with_loss(model, optimizer, small_batch(0))
    torch.func.functional_call(model, {"0.weight": replacement}, small_batch(0)).sum().backward()
    optimizer.step()
    model[0].weight = replacement
    model[2].bias.requires_grad_(False)
    with pytest.raises(ballast.UsageError, match=r"another Parameter in its place(.|\n)*parameter 0.weight"):
        model(small_batch(0))
