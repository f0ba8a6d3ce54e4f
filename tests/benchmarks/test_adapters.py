"""Tests of the benchmark of adapters: its base, its lines, and a tiny training. They need the built package."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import suite
from ladder import Llama, Outcome
from python.conftest import BUILT

if not BUILT or any(find_spec(name) is None for name in ("torch", "peft", "transformers")):
    pytest.skip("the Python package is not built, or PEFT is missing", allow_module_level=True)

import adapters  # noqa: E402 (needs both)

TINY = Llama("tiny", layers=2, width=64, inner=128, heads=4, key_value_heads=2)


def test_the_seconds_are_compared_with_reading_the_base_twice():
    case = adapters.Case(adapters.OURS, TINY)
    assert adapters.bytes_of_step(TINY) == 4 * TINY.parameters
    rates = [TINY.parameters * 1.0, TINY.parameters * 3.0]
    seconds, memory = adapters.records(case, Outcome(2.5, 1 << 30), 2 << 30, rates)
    assert (seconds["value"], seconds["against_value"], seconds["ratio"], memory["value"]) == (2.5, 2.0, 0.8, 1)
    [ended] = adapters.records(adapters.Case(adapters.PEFT), Outcome(ended="killed while reading the base"), 2 << 30, [])
    assert ended["case"] == "PEFT, killed while reading the base"


@pytest.mark.parametrize("case", adapters.CASES, ids=lambda case: case.name)
def test_a_tiny_base_gets_adapters(case, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    adapters.write_base(TINY, base)
    command = case._replace(base=base).command("", tmp_path)
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(adapters.__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    own = {"env": environment, "stdout": subprocess.PIPE, "text": True}
    [rank] = suite.start_ranks(1, lambda rank: command, lambda rank: own)
    said = rank.communicate()[0].splitlines()
    assert rank.returncode == 0
    assert said[:4] == ["reading the base", "adding adapters", "wrapping the model", "in forward of step 1"]
    assert sum(line.startswith("loss ") for line in said) == adapters.STEPS + 1
