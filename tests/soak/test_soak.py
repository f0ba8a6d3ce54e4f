"""A short soak: random faults under torchrun end with the bits of an undisturbed training."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from soak.outcome import FEWEST, Outcome

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
is_built = any((BUILD / "python" / "ballast").glob("_core*.so")) and find_spec("torch") is not None


@pytest.mark.skipif(not is_built, reason="needs a build of the Python package, and torch")
@pytest.mark.thorough
def test_a_training_that_fails_again_and_again_has_the_bits_of_an_undisturbed_one():
    command = [sys.executable, str(Path(__file__).with_name("run")), "20", "--seed", "7"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the same bits" in ended.stdout
    assert "fault: " in ended.stdout, "there was no fault"


@pytest.mark.parametrize(("samples", "grows"), [([8] * FEWEST, False), ([*range(FEWEST)], True), ([8, 12], False)])
def test_growth_is_a_failure_when_enough_samples_show_it(samples, grows):
    outcome = Outcome(seed=0)
    for files in samples:
        outcome.sample("files in records of 2 rank(s)", files)
    outcome.check_growth()
    assert bool(outcome.failures) == grows
