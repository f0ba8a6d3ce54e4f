"""Tests of a parameter's state: the allowed transitions, and the states in the course of a training."""

import ballast
import pytest
import torch
from ballast.torch.parameters.managed_parameter import (
    TRANSITIONS,
    ManagedParameter,
    ParameterState,
    managed,
    require_transition,
)
from python.wrap.support.loops import mlp

MISSING = [(a, b) for a in ParameterState for b in ParameterState if a is not b and b not in TRANSITIONS[a]]


def test_every_state_has_its_transitions():
    assert set(TRANSITIONS) == set(ParameterState)
    for before in ParameterState:
        for after in TRANSITIONS[before]:
            require_transition(before, after)


@pytest.mark.parametrize(("before", "after"), MISSING, ids=lambda state: state.name)
def test_an_impossible_transition_names_both_states(before, after):
    with pytest.raises(ballast.Error, match=f"B1999 cannot change a parameter from {before.name} to {after.name}"):
        require_transition(before, after)


def test_staying_in_a_state_is_always_possible():
    for state in ParameterState:
        require_transition(state, state)


def test_a_managed_parameter_refuses_impossible_transitions():
    parameter = torch.nn.Parameter(torch.ones(3))
    full = ManagedParameter(parameter, ParameterState.FULL)
    with pytest.raises(ballast.Error, match="B1999 (.|\n)*from FULL to GATHERED"):
        full.gather(torch.zeros(3))
    assert torch.equal(parameter, torch.ones(3)) and full.state is ParameterState.FULL
    full.release()
    with pytest.raises(ballast.Error, match="B1999 (.|\n)*from RELEASED to FULL(.|\n)*the end"):
        full.fill(torch.zeros(3))


def states(model):
    found = [managed(parameter) for parameter in model.parameters()]
    return {None if each is None else each.state.name for each in found}


def trained(stage, make=mlp):
    model = make()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_states_of_stage_3():
    def make():
        with ballast.deferred():
            return torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.Tanh(), torch.nn.Linear(100, 100, bias=False))

    model, optimizer = trained(3, make)
    assert "DEFERRED" in states(model)
    step(model, optimizer)
    assert states(model) == {"SHARDED"}
    with ballast.gather(model):
        assert states(model) == {"GATHERED"}
    assert states(model) == {"SHARDED"}
    optimizer.offload()
    assert states(model) == {"OFFLOADED"}
    optimizer.reload()
    assert states(model) == {"SHARDED"}
    optimizer.close()
    assert states(model) == {None}
    assert all(torch.isfinite(each).all() for each in model.parameters())


def test_the_states_below_stage_3():
    model, optimizer = trained(2)
    step(model, optimizer)
    assert states(model) == {None}  # a FULL parameter is an ordinary one of torch
    optimizer.offload()
    assert states(model) == {"OFFLOADED"}
    optimizer.reload()
    assert states(model) == {None}
    optimizer.offload()
    optimizer.close()
    assert states(model) == {None}


def test_lost_and_pending_parameters():
    parameter = torch.nn.Parameter(torch.ones(3))
    sharded = ManagedParameter(parameter, ParameterState.SHARDED)
    sharded.lose()
    with pytest.raises(ballast.Error, match="B1999 (.|\n)*from LOST to GATHERED"):
        sharded.gather(torch.zeros(3))
    with torch.device("meta"):
        model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    assert states(model) == {"DEFERRED"}
    managed(model[0].weight).expect()
    optimizer.close()
    assert states(model) == {"DEFERRED"}  # its pending values do not arrive any more
    assert all(managed(each).lacks_values for each in model.parameters())
