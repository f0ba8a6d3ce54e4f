"""Lets tests import the modules of the suites by their bare names, as each suite's `run` does."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SUITES = ("forecasts", "hooks", "saving", "training", "peers-training", "losses", "hosts")
sys.path += [str(BENCHMARKS / name) for name in ("harness", *SUITES)]
