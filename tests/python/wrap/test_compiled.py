"""Tests of torch.compile() before and after wrap()."""

import pytest
from python.wrap.support import compiled
from python.wrap.support.ranks import run_ranks


@pytest.fixture(scope="module")
def by_torch():
    losses, _ = compiled.train(0, None, "not")
    return losses


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_compiled_model_is_trained_as_a_plain_one(by_torch, stage):
    for trained in run_ranks(2, compiled.train_in_all_configurations, stage):
        for configuration, (losses, graphs) in zip(compiled.CONFIGURATIONS, trained):
            assert losses == pytest.approx(by_torch, rel=1e-4), configuration
            assert graphs > 0, configuration


def test_the_library_is_not_compiled_with_it():
    """A wrapped model compiles to as many graphs as a plain one."""
    [(_, wrapped)], [(_, plain)] = (run_ranks(1, compiled.train, stage, "after") for stage in (2, None))
    assert wrapped == plain
