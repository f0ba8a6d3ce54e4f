"""Tests of torch.compile() before and after wrap()."""

import pytest
from python.wrap.support import compiled
from python.wrap.support.ranks import run_ranks


@pytest.fixture(scope="module")
def by_torch():
    losses, _ = compiled.train(0, None, "not")
    return losses


OPTIONS = [{"stage": 0}, {"stage": 2}, {"stage": 2, "overlap_gathers": True}, {"stage": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_compiled_model_is_trained_as_a_plain_one(by_torch, options):
    for trained in run_ranks(2, compiled.train_in_all_configurations, options):
        for configuration, (losses, graphs) in zip(compiled.CONFIGURATIONS, trained):
            assert losses == pytest.approx(by_torch, rel=1e-4), configuration
            assert graphs > 0, configuration


def test_graphs_are_whole(by_torch):
    """No hook cuts a graph below stage 3, or in a block that is compiled in stage 3. `fullgraph` refuses a cut."""
    blocks = [({"stage": 3}, configuration) for configuration in ("blocks before", "blocks after", "layers before")]
    every = [({"stage": 2}, "before"), ({"stage": 1}, "blocks after"), *blocks]
    for trained in run_ranks(2, compiled.train_in_whole_graphs, every):
        for (options, configuration), (losses, graphs) in zip(every, trained):
            assert losses == pytest.approx(by_torch, rel=1e-4), (options, configuration)
            assert graphs > 0


@pytest.mark.parametrize("configuration", ["after", "blocks after"])
def test_the_library_is_not_compiled_with_it(configuration):
    """A wrapped model compiles to as many graphs as a plain one."""
    every = (None, {"stage": 2}, {"stage": 2, "overlap_gathers": True})
    [(_, plain)], *wrapped = (run_ranks(1, compiled.train, options, configuration) for options in every)
    assert [graphs for [(_, graphs)] in wrapped] == [plain, plain]
