"""Tests of torch.compile() before and after wrap()."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import Tower, keywords, mean_square
from python.wrap.support.ranks import COMPILER, run_ranks
from torch._dynamo.utils import counters

Result = tuple[list[float], int]  # the losses, and the number of graphs


@dataclass(frozen=True)
class Case:
    """A training with wrap(). Without options, torch alone trains on all ranks' batches."""

    options: dict[str, Any] | None
    what: str  # the compiled part, and when it is compiled relative to wrap()
    whole: bool = False  # whether a graph may not be cut

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in (self.options or {}).items())
        return f"{options} {self.what}{' whole' if self.whole else ''}"


def train_all(rank: int, cases: list[Case]) -> list[Result]:
    results = []
    for case in cases:
        try:
            results.append(train(rank, case))
        except Exception as error:
            raise AssertionError(f"{case} failed") from error
    return results


def train_by_torch(rank: int, every: Iterable[str]) -> dict[str, Result]:
    return {what: train(rank, Case(None, what)) for what in every}


def train(rank: int, case: Case) -> Result:
    torch._dynamo.reset()
    counters.clear()
    model = Tower(depth=3)
    called = compile_parts(model, case) if case.what.endswith("before") else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if case.options is not None:
        optimizer = ballast.wrap(optimizer, model, **keywords(**case.options))
    if case.what.endswith("after"):
        called = compile_parts(model, case)
    calls = calls_of(model)
    losses = []
    for step in range(3):
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
        loss = mean_square(called, batch if case.options is None else batch[4 * rank : 4 * rank + 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(mean_square(called, batch).item())
    if case.options is not None:
        optimizer.close()
        assert calls_of(model) == calls
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in called.modules())
    return losses, counters["stats"]["unique_graphs"]


def calls_of(model: torch.nn.Module) -> list[Any]:
    """Return the compiled code of each module, which stage 3 replaces until the end."""
    return [module._compiled_call_impl for module in model.modules()]


def compile_parts(model: Tower, case: Case) -> torch.nn.Module:
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": case.whole}
    if case.what.startswith("blocks"):
        for block in model.blocks:
            block.compile(**options)
        return model
    if case.what.startswith("layers"):  # torchtitan's recipe
        for number, block in enumerate(model.blocks):
            model.blocks[number] = torch.compile(block, **options)
        return model
    return torch.compile(model, **options)


WAITING = {"stage": 2, "overlap_gathers": False}  # two ranks overlap them otherwise
# No hook cuts a graph below stage 3, or in a block that is compiled in stage 3: `whole` refuses a cut.
CASES = [
    *(Case({"stage": 0}, what) for what in ("before", "after", "blocks before", "blocks after")),
    Case({"stage": 1}, "blocks after", whole=True),
    Case({"stage": 2}, "before", whole=True),
    *(Case({"stage": 2}, what) for what in ("after", "blocks before", "blocks after")),
    *(Case(WAITING, what) for what in ("after", "blocks after")),
    *(Case({"stage": 3}, what) for what in ("before", "after")),
    *(Case({"stage": 3}, what, whole=True) for what in ("blocks before", "blocks after", "layers before")),
]


@pytest.fixture(scope="module")
def trained():
    """Return the losses and graphs of each case, on each of two ranks."""
    return run_ranks(2, train_all, CASES, imported=COMPILER)


@pytest.fixture(scope="module")
def by_torch():
    """Return the same of a model that torch alone trains, by what is compiled."""
    [plain] = run_ranks(1, train_by_torch, ("nothing", "after", "blocks after"), imported=COMPILER)
    return plain


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_a_compiled_model_is_trained_as_a_plain_one(by_torch, trained, number):
    expected, _ = by_torch["nothing"]
    for rank in trained:
        losses, graphs = rank[number]
        assert losses == pytest.approx(expected, rel=1e-4)
        assert graphs > 0


@pytest.mark.parametrize("options", [{"stage": 2}, WAITING], ids=str)
def test_the_library_is_not_compiled_with_it(by_torch, trained, options):
    """A wrapped model compiles to as many graphs as a plain one."""
    for what in ("after", "blocks after"):
        _, plain = by_torch[what]
        for rank in trained:
            _, graphs = rank[CASES.index(Case(options, what))]
            assert graphs == plain
