"""Tests with PEFT: two adapters, a module that is trained in full, files of adapters, and merging."""

from importlib.util import find_spec

import pytest
import torch
from python.wrap.support import adapters
from python.wrap.support.ranks import FRAMEWORKS, run_ranks

if any(find_spec(name) is None for name in ("bitsandbytes", "peft", "transformers")):  # only the ranks import them
    pytest.skip("PEFT is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)


def test_adapters_train_in_turns_and_are_saved_alone(tmp_path):
    every = [(None, False), (None, True), ({"stage": 3}, False), ({"stage": 3}, True), ({"stage": 2}, True)]
    ranks = run_ranks(2, adapters.of_ranks, str(tmp_path), every, imported=FRAMEWORKS)
    for number, (options, bits) in enumerate(every):
        of_plain = every.index((None, bits))
        folder, plain = tmp_path / str(of_plain), ranks[0][of_plain]
        for rank in ranks if options is not None else ():
            losses = torch.tensor(rank[number]["losses"])
            torch.testing.assert_close(losses, torch.tensor(plain["losses"]), rtol=1e-4, atol=1e-5)
            assert rank[number]["merged"] == pytest.approx(plain["merged"], rel=1e-3)
        expected, found = adapters.saved(folder), adapters.saved(tmp_path / str(number))
        for name in expected:
            assert expected[name].keys() == found[name].keys()
            for key, values in expected[name].items():
                torch.testing.assert_close(values, found[name][key], rtol=1e-3, atol=1e-4)


def test_a_deferred_base_gets_adapters(tmp_path):
    every = [(None, ""), *(({"stage": stage}, where) for stage in (2, 3) for where in ("inside", "outside"))]
    for plain, *ours in run_ranks(2, adapters.of_deferred_base, str(tmp_path), every, imported=FRAMEWORKS):
        for losses in ours:
            assert losses == pytest.approx(plain, rel=1e-4)
