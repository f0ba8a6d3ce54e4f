"""Lets tests import the modules of the suites by their bare names, as each suite's `run` does."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("forecasts", "hooks", "saving", "training", "peers-training", "losses", "hosts")
sys.path += [str(ROOT / "examples"), *(str(ROOT / "benchmarks" / name) for name in ("harness", *SUITES))]
