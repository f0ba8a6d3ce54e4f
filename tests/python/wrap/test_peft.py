"""Tests with PEFT: two adapters, a module that is trained in full, files of adapters, and merging."""

import pytest
import torch
from python.wrap.support.ranks import run_ranks

WHY = "is not installed: .ci/bootstrap venv frameworks"
pytest.importorskip("peft", reason=f"peft {WHY}")
pytest.importorskip("bitsandbytes", reason=f"bitsandbytes {WHY}")
from python.wrap.support import adapters  # noqa: E402


def test_adapters_train_in_turns_and_are_saved_alone(tmp_path):
    every = [({"stage": 3}, False), ({"stage": 3}, True), ({"stage": 2}, True)]
    ranks = run_ranks(2, adapters.of_ranks, str(tmp_path), every)
    for number, (_, bits) in enumerate(every):
        folder = tmp_path / f"plain {bits}"
        plain = adapters.trained(None, folder, bits=bits)
        for rank in ranks:
            losses = torch.tensor(rank[number]["losses"])
            torch.testing.assert_close(losses, torch.tensor(plain["losses"]), rtol=1e-4, atol=1e-5)
            assert rank[number]["merged"] == pytest.approx(plain["merged"], rel=1e-3)
        expected, found = adapters.saved(folder), adapters.saved(tmp_path / f"ballast {number}")
        for name in expected:
            assert expected[name].keys() == found[name].keys()
            for key, values in expected[name].items():
                torch.testing.assert_close(values, found[name][key], rtol=1e-3, atol=1e-4)
