"""Tests of the cases of the hooks, and of the lines computed from measurements. They need the built package."""

from importlib.util import find_spec

import pytest
from python.conftest import BUILT

if not BUILT or find_spec("torch") is None:
    pytest.skip("the Python package is not built, or torch is missing", allow_module_level=True)

import chunked_loss  # noqa: E402 (both need it)
import hooks  # noqa: E402


def test_each_case_has_two_lines():
    names = [case.name for case in hooks.CASES]
    assert len(set(names)) == len(names) == 4 * len(hooks.EVENTS)
    compared, added = hooks.rows_of(hooks.CASES[0], [3e-6, 5e-6, 4e-6], [1e-6, 1e-6, 2e-6])
    assert (compared["value"], compared["against_value"]) == pytest.approx((4.0, 1.0))
    assert compared["ratio"] == pytest.approx(1 / 3)
    assert added["value"] == pytest.approx(2.0)
    assert added["case"] == compared["case"] + ": added" and added["ratio"] is None


@pytest.mark.parametrize("event", hooks.EVENTS, ids=lambda event: event.name)
def test_events_are_counted_in_models_that_train(event):
    assert [row["unit"] for row in hooks.measure(event, [0, 3], rounds=1)] == ["us"] * 4


def test_the_loss_in_chunks_has_lines_of_seconds_and_memory(monkeypatch):
    for name, value in {"WORDS": 3000, "TOKENS": 64, "CHUNK": 16}.items():
        monkeypatch.setattr(chunked_loss, name, value)
    monkeypatch.setattr(chunked_loss, "in_own_process", chunked_loss.train)
    seconds, memory = chunked_loss.measure(1)
    assert (seconds["unit"], memory["unit"]) == ("s", "MiB") and seconds["value"] > 0
    ours, plain = ([{"seconds": 2.0 * each, "peak": each * 2.0**20}] for each in (1, 3))
    seconds, memory = chunked_loss.rows_of(ours, plain)
    assert (seconds["value"], seconds["ratio"], memory["against_value"]) == (2.0, 3.0, 3.0)
