"""Tests of the page "What my loop may do": each row is run with plain torch and in each stage, and does what the row says."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import ballast
import pytest
import torch

PAGE = Path(__file__).parents[3] / "docs/guides/my-loop.md"
STAGES = [0, 2, 3]


class Row(NamedTuple):
    code: str
    below_3: str
    in_3: str


class Net(torch.nn.Module):
    """The model of the page."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)])
        self.head = torch.nn.Linear(8, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            batch = block(batch)
        result: torch.Tensor = self.head(batch)
        return result


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        cells = [each.strip() for each in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[1].startswith("`"):
            yield Row(cells[1].strip("`").replace(r"\|", "|"), *cells[2:])


def trained(code: str, stage: int | None, gathers: bool) -> list[torch.Tensor]:
    """Make steps before and after the code, and return the parameters."""
    model = Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage)
    batches = iter(torch.randn(64, 4, 8, generator=torch.Generator().manual_seed(1)))

    def loss_of() -> torch.Tensor:
        return model(next(batches)).square().mean()

    def step() -> None:
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    names = dict(torch=torch, copy=copy, io=io, model=model, optimizer=optimizer, loss_of=loss_of, step=step)
    try:
        step()
        step()
        with ballast.gather(model) if gathers else nullcontext():
            exec(code, names | {"batch": next(batches)})
        step()
        step()
    finally:
        if stage is not None:
            optimizer.close()
    return [each.detach() for each in model.parameters()]


def outcome(code: str, stage: int, gathers: bool = False) -> str:
    """Return "yes" where the training continues as with plain torch, else the error's code, or "torch" for one of torch."""
    try:
        ours = trained(code, stage, gathers)
    except ballast.Error as error:
        return error.code
    except RuntimeError:
        return "torch"
    for one, other in zip(ours, trained(code, None, False), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    return "yes"


@pytest.mark.parametrize("row", [pytest.param(each, id=each.code) for each in rows()])
def test_a_loop_may_do_what_the_page_says(row):
    for stage in STAGES:
        said = row.in_3 if stage == 3 else row.below_3
        if said.startswith("in `gather()`"):
            assert outcome(row.code, stage, gathers=True) == "yes"
            assert outcome(row.code, stage).startswith("B")
        else:
            assert outcome(row.code, stage) == re.sub(r"\*\*no\*\* \((\w+)\).*", r"\1", said)


def test_the_page_has_the_habits_of_many_loops():
    assert len({*rows()}) >= 40
