"""Tests of torch.compile() before and after wrap()."""

import pytest
from python.wrap.support import compiled
from python.wrap.support.compiled import Case
from python.wrap.support.ranks import COMPILER, run_ranks

OVERLAPPING = {"stage": 2, "overlap_gathers": True}
# No hook cuts a graph below stage 3, or in a block that is compiled in stage 3: `whole` refuses a cut.
CASES = [
    *(Case({"stage": 0}, what) for what in ("before", "after", "blocks before", "blocks after")),
    Case({"stage": 1}, "blocks after", whole=True),
    Case({"stage": 2}, "before", whole=True),
    *(Case({"stage": 2}, what) for what in ("after", "blocks before", "blocks after")),
    *(Case(OVERLAPPING, what) for what in ("before", "after", "blocks before", "blocks after")),
    *(Case({"stage": 3}, what) for what in ("before", "after")),
    *(Case({"stage": 3}, what, whole=True) for what in ("blocks before", "blocks after", "layers before")),
]


@pytest.fixture(scope="module")
def trained():
    """Return the losses and graphs of each case, on each of two ranks."""
    return run_ranks(2, compiled.train_all, CASES, imported=COMPILER)


@pytest.fixture(scope="module")
def by_torch():
    """Return the same of a model that torch alone trains, by what is compiled."""
    [plain] = run_ranks(1, compiled.train_by_torch, ("nothing", "after", "blocks after"), imported=COMPILER)
    return plain


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_a_compiled_model_is_trained_as_a_plain_one(by_torch, trained, number):
    expected, _ = by_torch["nothing"]
    for rank in trained:
        losses, graphs = rank[number]
        assert losses == pytest.approx(expected, rel=1e-4)
        assert graphs > 0


@pytest.mark.parametrize("what", ["after", "blocks after"])
def test_the_library_is_not_compiled_with_it(by_torch, trained, what):
    """A wrapped model compiles to as many graphs as a plain one."""
    _, plain = by_torch[what]
    for rank in trained:
        for options in ({"stage": 2}, OVERLAPPING):
            _, graphs = rank[CASES.index(Case(options, what))]
            assert graphs == plain
