"""Run a benchmark of kernels, of a GPU or of the host, and say each measurement in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from on_a_gpu.findings import figures_line

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "harness"))
import suite  # noqa: E402


def figures_of(line: str, where: str) -> dict[str, Any]:
    """Return the measurement, and the limit that it is compared with as one of its own. A limit alone has none."""
    measured = suite.summary(json.loads(line))
    found = {f"{where}: {measured['case']}": {name: measured[name] for name in ("value", "unit", "ratio", "against")}}
    if measured["against"]:
        found[f"{where}: {measured['against']}"] = {"value": measured["against_value"], "unit": measured["unit"]}
    return found


def said(line: str) -> str:
    """Return a measurement as text: its value, and relative to its limit."""
    measured = suite.summary(json.loads(line))
    text = f"== {measured['case']}: {measured['value']:,.0f} {measured['unit']}"
    limit = f"{measured.get('against_value', 0):,.0f} {measured['unit']}"
    return f"{text}, {measured['ratio']:.2f} of {measured['against']} ({limit})" if measured["against"] else text


def main() -> int:
    """Take the name of the processor, and the command."""
    where, *command = sys.argv[1:]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        for name, found in figures_of(line, where).items():
            print(figures_line(name, found))
        print(said(line), flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
