"""Tests of weights that go to an inference engine, and of models that generate themselves."""

from importlib.util import find_spec

import pytest
from python.wrap.support import handing_over
from python.wrap.support.ranks import FRAMEWORKS, run_ranks

if find_spec("transformers") is None:  # only the ranks import it
    pytest.skip("transformers is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)


def test_weights_are_handed_over_unit_by_unit():
    every = [{"stage": 2}, {"stage": 3}]
    for rank, (tokens, results) in enumerate(run_ranks(2, handing_over.all_of_them, every, imported=FRAMEWORKS)):
        for options, result in zip(every, results):
            assert result["same"], options
            assert result["first"]
            assert result["units"] <= 1
            assert ("the engine is gone" if rank == 1 else "rank 1") in result["failure"]
            assert result["tokens"] == tokens
        assert results[1]["units"] == 1
