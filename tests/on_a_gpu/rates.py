"""Run the benchmark of a GPU and say each measurement in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "harness"))
import suite  # noqa: E402


def said(line: str) -> str:
    """Return a measurement as text: its value, and relative to its limit."""
    measured = suite.summary(json.loads(line))
    value, limit = (f"{rate:,.0f} {measured['unit']}" for rate in (measured["value"], measured["against_value"]))
    return f"== {measured['case']}: {value}, {measured['ratio']:.2f} of {measured['against']} ({limit})"


def main() -> int:
    process = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        print(said(line), flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
