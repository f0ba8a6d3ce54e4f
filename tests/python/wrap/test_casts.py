"""Tests of casts and moves of a model: they are allowed before training begins, and refused afterwards."""

import ballast
import pytest
import torch
from python.wrap.support.loops import Tower, keywords, mean_square, mlp

CONFIGURATIONS = [{"stage": 0}, {"stage": 1}, {"stage": 2, "offload": "host"}, {"stage": 3}, {"stage": 3, "offload": "host"}]
every_configuration = pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
CASTS = {
    "half()": lambda model: model.half(),
    "bfloat16()": lambda model: model.bfloat16(),
    "double()": lambda model: model.double(),
    "to(float16)": lambda model: model.to(torch.float16),
    "to(meta)": lambda model: model.to("meta"),
}
every_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
REFUSAL = r"(cast|moved?)(.|\n)*training (has begun|began)(.|\n)*before ballast.wrap\(\)(.|\n)*close\(\)"


def wrapped(configuration, make=mlp):
    model = make()
    return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**configuration))


def backward(model):
    dtype = next(model.parameters()).dtype
    mean_square(model, torch.ones(20, dtype=dtype)).backward()


def step(model, optimizer):
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


def values(model):
    with ballast.gather(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@every_configuration
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_cast_between_wrap_and_the_first_step(configuration, dtype):
    model, optimizer = wrapped(configuration)
    model.to(dtype)
    step(model, optimizer)
    assert {parameter.dtype for parameter in values(model)} == {dtype}


@every_configuration
@every_cast
def test_a_cast_in_the_middle_of_a_step_is_refused_and_changes_nothing(configuration, cast):
    (model, optimizer), (other, undisturbed) = wrapped(configuration), wrapped(configuration)
    for each in (model, other):
        step(each, optimizer if each is model else undisturbed)
        backward(each)
    weight = model[0].weight
    with pytest.raises(ballast.UsageError, match=REFUSAL) as refused:
        cast(model)
    assert "DistributedDataParallel" not in str(refused.value)
    model[0].weight = weight  # a cast by to("meta") replaces the Parameter
    for each in (optimizer, undisturbed):
        each.step()
        each.zero_grad()
    step(model, optimizer)
    step(other, undisturbed)
    assert all(map(torch.equal, values(model), values(other)))


@pytest.mark.parametrize("configuration", [each for each in CONFIGURATIONS if each["stage"] == 3], ids=str)
@every_cast
def test_a_cast_between_steps_is_refused_where_parameters_are_sharded(configuration, cast):
    model, optimizer = wrapped(configuration, Tower)
    step(model, optimizer)
    before = values(model)
    with pytest.raises(ballast.UsageError, match="B1007.*" + REFUSAL):
        cast(model)
    assert all(map(torch.equal, before, values(model)))
    step(model, optimizer)


@every_configuration
@pytest.mark.parametrize("move", [lambda model: model.to("cpu"), lambda model: model.float(), lambda model: model.cpu()])
def test_a_move_to_where_a_model_is_changes_nothing(configuration, move):
    (model, optimizer), (other, undisturbed) = wrapped(configuration, Tower), wrapped(configuration, Tower)
    for _ in range(2):
        for each in (model, other):
            backward(each)
        assert move(model) is model
        for each in (optimizer, undisturbed):
            each.step()
        move(model)
        for each in (optimizer, undisturbed):
            each.zero_grad()
    assert all(map(torch.equal, values(model), values(other)))


@pytest.mark.parametrize("configuration", [each for each in CONFIGURATIONS if each["stage"] < 3], ids=str)
@pytest.mark.parametrize("name", ["half()", "double()"])
def test_training_does_not_continue_with_a_model_that_was_cast(configuration, name, tmp_path):
    model, optimizer = wrapped(configuration)
    step(model, optimizer)
    CASTS[name](model)
    with torch.no_grad():
        model(torch.ones(20, dtype=model[0].weight.dtype))  # an evaluation is allowed
    backward(model)
    for call in (optimizer.step, lambda: ballast.save(tmp_path, model, optimizer)):
        with pytest.raises(ballast.UsageError, match="B1005.*" + REFUSAL) as refused:
            call()
        assert "from torch.float32" in str(refused.value) and "parameter 0.weight" in str(refused.value)
    optimizer.zero_grad()
    model.float()
    step(model, optimizer)  # trains on the values that the cast has left
    assert optimizer.steps == 2


def test_gradients_are_dropped_although_a_parameter_was_cast():
    """The write to the other parameter survives, and the step that follows refuses the cast."""
    model, optimizer = wrapped({"stage": 2, "offload": "host"})
    step(model, optimizer)
    backward(model)
    optimizer.clip_grad_norm_(1.0)
    with torch.no_grad():
        model[2].bias.fill_(0.5)
    model[0].weight.data = model[0].weight.data.half()
    optimizer.zero_grad()
    assert model[2].bias.tolist() == [0.5] * len(model[2].bias)
    model[0].weight.data = model[0].weight.data.float()
    step(model, optimizer)
    assert optimizer.steps == 2


def test_a_parameter_that_gets_another_shape_is_refused():
    model, optimizer = wrapped({"stage": 2})
    step(model, optimizer)
    backward(model)
    model[2].bias.data = torch.ones(3)
    with pytest.raises(ballast.UsageError, match=r"B1005 cannot continue: a parameter changed its shape(.|\n)*2.bias"):
        optimizer.step()


@every_configuration
@pytest.mark.parametrize("in_a_step", [True, False])
def test_a_model_can_be_cast_after_close(configuration, in_a_step):
    model, optimizer = wrapped(configuration)
    step(model, optimizer)
    if configuration["stage"] < 3:
        model.half()
    if in_a_step:
        backward(model)
    optimizer.close()
    model.half()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**configuration))
    step(model, optimizer)
    assert {parameter.dtype for parameter in values(model)} == {torch.float16}


def test_a_model_without_values_says_where_a_cast_belongs():
    """Nothing has recorded how to make the values."""
    with torch.device("meta"):
        model = mlp(80)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    with pytest.raises(ballast.UsageError, match=r"cast(.|\n)*when training begins(.|\n)*before ballast.wrap\(\)"):
        model.half()
    assert optimizer.steps == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_that_is_offloaded_cannot_be_cast(stage):
    model, optimizer = wrapped({"stage": stage})
    step(model, optimizer)
    optimizer.offload()
    with pytest.raises(ballast.UsageError, match=REFUSAL):
        model.half()
    optimizer.reload()
    step(model, optimizer)
