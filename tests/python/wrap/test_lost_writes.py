"""Tests that stage 3 refuses writes to parameters that it cannot keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks
from torch import nn


class Writing(nn.Module):
    """A model that writes to a parameter in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.table = nn.Embedding(8, 4, max_norm=0.5)
        self.code = nn.Parameter(torch.ones(4), requires_grad=False)

    def write(self, x: torch.Tensor) -> None:
        """Do nothing: a subclass writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        with torch.no_grad():
            self.write(x)
        result: torch.Tensor = self.last(x * self.code)
        return result


class Renormalizes(Writing):
    def write(self, x: torch.Tensor) -> None:
        self.table(torch.arange(8))


class Clamps(Writing):
    def write(self, x: torch.Tensor) -> None:
        self.second.weight.clamp_(-0.2, 0.2)


class AveragesCode(Writing):
    def write(self, x: torch.Tensor) -> None:
        self.code.mul_(0.9).add_(x.mean(0), alpha=0.1)


class AssignsData(Writing):
    """Assigns the tensor of an average of two modules, as MoCo does."""

    def write(self, x: torch.Tensor) -> None:
        for parameter, other in zip(self.second.parameters(), self.first.parameters()):
            parameter.data = parameter.data * 0.5 + other.data * 0.5


class TakesFromAnotherModule(Writing):
    """Writes in a function of parameters of two modules."""

    def write(self, x: torch.Tensor) -> None:
        self.first.weight.lerp_(self.second.weight, 0.5)


KINDS: dict[type[Writing], str] = {
    Renormalizes: "table.weight",
    Clamps: "second.weight",
    AveragesCode: "code",
    AssignsData: "second.weight",
    TakesFromAnotherModule: "first.weight",
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(model: nn.Module, **options: Any) -> Any:
    trained = [each for each in model.parameters() if each.requires_grad]
    return ballast.wrap(torch.optim.AdamW(trained, lr=0.1), model, **keywords(stage=3, **options))


def said_of_each(rank: int, **options: Any) -> dict[str, str]:
    """Return the error of each kind of model in its first step; empty for one that trains."""
    said = {}
    for kind in KINDS:
        model = kind()
        optimizer = wrapped(model, **options)
        said[kind.__name__] = error_of(lambda model=model, optimizer=optimizer: train(model, optimizer))
        optimizer.close()
    return said


def error_of(body: Callable[[], Any]) -> str:
    try:
        body()
    except ballast.UsageError as error:
        return str(error)
    return ""


LOST = "cannot keep a write to a parameter outside of"


def check_named(said):
    for kind, name in KINDS.items():
        assert LOST in said[kind.__name__] and f"parameter {name}" in said[kind.__name__], kind


@pytest.fixture(params=["device", "drive"])
def options(request, tmp_path):
    where = f"nvme:{tmp_path}"
    return {} if request.param == "device" else {"offload": {"parameters": where, "state": where}}


def test_writes_in_the_forward_pass_are_refused_by_name(options):
    check_named(said_of_each(0, **options))


def test_writes_in_the_forward_pass_are_refused_on_all_ranks():
    for said in run_ranks(2, said_of_each):
        check_named(said)


def test_a_write_after_an_evaluation_is_refused_where_it_would_be_lost(options):
    model = Writing()
    optimizer = wrapped(model, **options)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model.last.weight.zero_()  # its unit is still open
    with pytest.raises(ballast.UsageError, match=f"B1007 {LOST}(.|\n)*parameter last.weight(.|\n)*ballast.gather"):
        train(model, optimizer)
    train(model, optimizer)  # this step has no write
    with ballast.gather(model):
        assert model.last.weight.any()


def test_assigning_data_between_steps_is_refused_until_it_is_inside_of_gather(options):
    model = Writing()
    optimizer = wrapped(model, **options)
    train(model, optimizer)
    with pytest.raises(ballast.UsageError, match="B1007(.|\n)*parameter first.weight(.|\n)*ballast.gather"):
        model.first.weight.data = torch.zeros(4, 4)
    with ballast.gather(model):
        model.first.weight.data = torch.zeros(4, 4)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer)
    with ballast.gather(model):
        assert not model.first.weight.any()


def test_a_write_before_the_end_is_reported(options, caplog):
    model = Writing()
    optimizer = wrapped(model, **options)
    with torch.no_grad():
        model(torch.ones(2, 4))
        model.last.weight.zero_()
    optimizer.close()
    assert any(LOST in each.message and "parameter last.weight" in each.message for each in caplog.records)


def test_other_memory_with_the_same_values_is_no_write(options):
    """Modules cast biases in place, as those of bitsandbytes do."""

    class Casts(Writing):
        def write(self, x):
            self.second.bias.data = self.second.bias.data.to(torch.bfloat16)
            self.second.weight.data = self.second.weight.data.clone()

    assert error_of(lambda: train(model := Casts(), wrapped(model, **options))) == ""
