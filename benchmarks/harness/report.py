"""The program behind every suite: it reads measurements as lines of JSON, prints the table, and writes and compares records.

Exit codes: 0 if all is well, 1 if something is worse than recorded, 2 for wrong arguments and errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import suite

FIELDS = ("suite", "case", "value", "unit", "against", "ratio", "machine", "commit")  # those that are stored, and no others
MISSING = {"against": "", "ratio": None, "machine": "", "commit": "", "against_value": 0.0, "spread": 0.0}
NAME_WIDTH, AGAINST_WIDTH = 34, 30
AGAINST_BEGINS = NAME_WIDTH + 18

# A suite's line has the stored fields without machine and commit, and values that only the table shows: against_value, and the
# spread of the ratio, relative to it. The ratio says how many times faster the case is than `against`, the subject that it ran
# in turn with: above 1 is better, whatever the unit. Limits have no ratio. A line of a suite in C++ has the rates of all rounds
# instead of the value and the ratio.
Record = dict[str, Any]


def record_of(line: str, place: str) -> Record:
    """Read both kinds of line; fields that a line lacks get their defaults. `place` is named in the error."""
    try:
        record = MISSING | json.loads(line)
        record = suite.summary(record) if "rates" in record else record
        numbers = [float(record[name]) for name in ("value", "against_value", "spread")]
        if not all(isinstance(record[name], str) for name in ("suite", "case", "unit")) or isinstance(record["value"], str):
            raise TypeError("a field has another type")
        return record | dict(zip(("value", "against_value", "spread"), numbers))
    except (ValueError, TypeError, KeyError) as problem:
        needed = "a JSON object with suite, case, value and unit"
        raise SystemExit(f"{place}: a line is not the record of a benchmark case; needed: {needed}; {problem!r}") from None


def stored(record: Record) -> str:
    fields = {name: record.get(name) for name in FIELDS}
    finite = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()}
    return json.dumps(finite, separators=(",", ":"), ensure_ascii=False)


# --- The table ---


def number(value: float) -> str:
    """Write three significant digits.

    >>> number(0.1234), number(1.234), number(12.34), number(123.4)
    ('0.123', '1.23', '12.3', '123')
    """
    size = abs(value)
    decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{decimals}f}"


def row(record: Record) -> str:
    """Return a line with fixed columns, so that it can be printed when the case is measured:

    adamw split                          46.1 GB/s    copy                             47.5 GB/s     0.97 ±0.01
    """
    line = f"  {in_column(record['case'], 2, NAME_WIDTH)} {number(record['value']):>6} {record['unit']:<6}"
    if record["ratio"] is not None:
        against, theirs = in_column(record["against"], AGAINST_BEGINS, AGAINST_WIDTH), number(record["against_value"])
        line += f"  {against} {theirs:>6} {record['unit']:<6}"
        line += f"  {record['ratio']:>5.2f} ±{record['ratio'] * record['spread']:.2f}"
    return line.rstrip(" ")


def in_column(name: str, begin: int, width: int) -> str:
    """Pad a name. One that is longer than its column has a line of its own, and the row continues below it."""
    return f"{name:<{width}}" if len(name) <= width else f"{name}\n{'':{begin + width}}"


# --- Baselines ---


class Baseline(NamedTuple):
    """A recorded run: a line with the command and the date first (files made by --json go without), then one for each case."""

    command: str
    date: str
    records: list[Record]


def baseline_header(command: str, date: str) -> str:
    return json.dumps({"command": command, "date": date}, separators=(",", ":"), ensure_ascii=False)


def read_baseline(lines: Iterable[str], file: str) -> Baseline:
    command, date, records = "", "", []
    for place, line in enumerate(lines, start=1):
        if line.startswith('{"command"'):
            header = json.loads(line)
            command, date = header["command"], header.get("date", "")
        elif line.strip():
            records.append(record_of(line, f"{file}, line {place}"))
    return Baseline(command, date, records)


class Finding(NamedTuple):
    """A case that differs from its record. Ratios are 0 where there is none."""

    kind: str  # "worse", "missing" or "new"
    case: str
    against: str
    recorded: float = 0.0
    now: float = 0.0

    def describe(self) -> str:
        what = f"{self.kind:<9}{self.case} vs. {self.against}"
        if self.kind == "worse":
            return f"{what}: {self.now:.2f}, recorded {self.recorded:.2f}"
        if self.kind == "missing":
            return f"{what}: recorded {self.recorded:.2f}, not measured now"
        return f"{what}: {self.now:.2f}, not in the record"


def compare(recorded: Sequence[Record], now: Sequence[Record], tolerance: float) -> list[Finding]:
    """Return what is worse, missing or new. The comparison is one-sided: better cases are not reported.

    It compares ratios, not values, because the machine's speed of the day is in both sides of a ratio. Cases belong together if
    suite, case and `against` are equal. A case without a ratio (a limit of the machine) is not judged. `tolerance` is the part
    of the recorded ratio that may be lost.
    """
    before, after = ratios_of(recorded), ratios_of(now)
    findings = []
    for key, was in before.items():
        if key not in after:
            findings.append(Finding("missing", *key[1:], was))
        elif not after[key] >= was * (1 - tolerance):  # written so that NaN is worse
            findings.append(Finding("worse", *key[1:], was, after[key]))
    return findings + [Finding("new", *key[1:], 0.0, ratio) for key, ratio in after.items() if key not in before]


def ratios_of(records: Iterable[Record]) -> dict[tuple[str, str, str], float]:
    """Return the ratios by suite, case and `against`."""
    judged = (record for record in records if record["ratio"] is not None)
    return {(record["suite"], record["case"], record["against"]): record["ratio"] for record in judged}


def any_worse(findings: Iterable[Finding]) -> bool:
    return any(finding.kind == "worse" for finding in findings)


# --- The program ---


def show(lines: Iterable[str], commit: str) -> list[Record]:
    """Print each case as it arrives."""
    machine = suite.machine_name()
    print(f"  {machine}, commit {commit}", flush=True)
    records = []
    for line in lines:
        records.append(record_of(line, "standard input") | {"machine": machine, "commit": commit})
        print(row(records[-1]), flush=True)
    return records


def write(file: Path, header: str, records: Sequence[Record]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(header + "".join(f"{stored(record)}\n" for record in records))


def compare_with(file: Path, records: Sequence[Record], tolerance: float) -> int:
    baseline = read_baseline(file.read_text().splitlines(), str(file))
    command = f", {baseline.command}" if baseline.command else ""
    print(f"\nCompared with {file} ({baseline.date or 'no date'}{command}), tolerance {100 * tolerance:.0f} %:")
    if records and baseline.records and records[0]["machine"] != baseline.records[0]["machine"]:
        print(f"  recorded on another machine: {baseline.records[0]['machine']}")
    findings = compare(baseline.records, records, tolerance)
    print("".join(f"  {finding.describe()}\n" for finding in findings), end="")
    print(f"  {'Worse than recorded.' if any_worse(findings) else 'Nothing is worse than recorded.'}")
    return int(any_worse(findings))


def tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("a part from 0 to 1 is needed")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints, records and compares the measurements that a benchmark suite writes")
    parser.add_argument("--json", type=Path, help="write one line of JSON for each case")
    parser.add_argument("--record", type=Path, help="the same, after a line with the command and the date: a baseline")
    parser.add_argument("--compare", type=Path, help="report what is worse than in this baseline")
    parser.add_argument("--tolerance", type=tolerance, default=0.1, help="how much of a recorded ratio may be lost (0.1)")
    parser.add_argument("--commit", default="unknown", help="the commit that is measured")
    parser.add_argument("--command", default="", help="the command that a record names")
    options = parser.parse_args()
    if options.compare and not options.compare.is_file():
        parser.error(f"there is no file {options.compare}")
    records = show(sys.stdin, options.commit)
    if options.json:
        write(options.json, "", records)
    if options.record:
        today = f"{datetime.now(timezone.utc):%Y-%m-%d}"
        write(options.record, f"{baseline_header(options.command, today)}\n", records)
    return compare_with(options.compare, records, options.tolerance) if options.compare else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SystemExit as end:
        if not isinstance(end.code, str):
            raise
        print(end.code, file=sys.stderr)
        sys.exit(2)
    except OSError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
