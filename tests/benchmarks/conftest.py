"""Suites import each other's modules by their bare names, as `run` of each lets them."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS / name) for name in ("harness", "training", "peers-training")]
