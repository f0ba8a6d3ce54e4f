"""Tests of the report behind every suite: the lines that it reads and stores, the table, and the comparison with a baseline."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
import report
import suite

RECORD = {
    "suite": "kernels",
    "case": 'adamw "split"',
    "value": 46.5,
    "unit": "GB/s",
    "against": "copy",
    "ratio": 0.75,
    "machine": "A processor, 2 cores",
    "commit": "0123abc",
}


def item(case: str, ratio: float | None, against: str = "copy") -> report.Record:
    fields = {"suite": "kernels", "case": case, "value": 1.0, "unit": "GB/s", "against": against, "ratio": ratio}
    return report.record_of(json.dumps(fields), "here") | {"ratio": ratio}


def described(findings: list[report.Finding]) -> list[str]:
    return [finding.describe() for finding in findings]


# --- Lines ---


def test_a_record_is_one_line_with_its_eight_fields_and_no_others():
    assert report.stored(RECORD | {"spread": 0.1, "against_value": 62.0}) == (
        r'{"suite":"kernels","case":"adamw \"split\"","value":46.5,"unit":"GB/s","against":"copy","ratio":0.75,'
        r'"machine":"A processor, 2 cores","commit":"0123abc"}'
    )


def test_a_limit_has_no_ratio():
    line = report.stored(RECORD | {"ratio": None})
    assert '"ratio":null' in line
    assert report.record_of(line, "here")["ratio"] is None


def test_a_measurement_is_read_as_it_was_written():
    written = RECORD | {"against_value": 62.0, "spread": 0.125}
    assert report.record_of(json.dumps(written), "here") == written


@pytest.mark.parametrize(
    "line",
    [
        "",
        "adamw 46 GB/s",
        "[]",
        '{"suite":"kernels","case":"a"}',
        '{"suite":"kernels","case":"a","value":"fast","unit":"GB/s"}',
    ],
)
def test_a_line_that_is_not_a_record_is_refused_with_its_file_and_number(line: str):
    with pytest.raises(SystemExit, match="runs.jsonl, line 7"):
        report.record_of(line, "runs.jsonl, line 7")


# --- The table ---


def test_numbers_keep_three_digits():
    values = (0.0456, 0.9994, 1.234, 9.999, 46.123, 99.96, 1234.5, -46.123)
    assert [report.number(value) for value in values] == ["0.046", "0.999", "1.23", "10.0", "46.1", "100", "1234", "-46.1"]


def shown(case: str, value: float, **fields: object) -> str:
    return report.row(report.MISSING | {"case": case, "value": value, "unit": "GB/s"} | fields)


def test_a_row_shows_the_case_the_opponent_and_the_ratio_with_its_spread():
    row = shown("adamw split", 46.1, against="copy", ratio=0.97, against_value=47.5, spread=0.01)
    assert row == (
        "  adamw split                          46.1 GB/s    copy                             47.5 GB/s     0.97 ±0.01"
    )
    assert shown("triad", 42.0) == "  triad                                42.0 GB/s"


def test_columns_align_after_names_of_any_length():
    def column_of(name: str, against: str, what: str) -> int:
        text = shown(name, 123, against=against, ratio=10.5, against_value=456)
        assert text.find(name) == 2 and against in text
        at = text.find(what)
        return at - (text.rfind("\n", 0, at + 1) + 1)

    just_fits, other_fits = 34 * "n", 30 * "a"
    for what in ("123", "456", "10.5", "±"):
        column = column_of("short", "copy", what)
        assert column_of(just_fits, other_fits, what) == column
        assert column_of(just_fits + "n", "copy", what) == column
        assert column_of("short", other_fits + "a", what) == column
        assert column_of(just_fits + just_fits, other_fits + other_fits, what) == column
    assert column_of("short", other_fits, other_fits) == column_of(just_fits + "n", other_fits, other_fits)
    assert "\n" not in shown(just_fits, 1)


# --- Baselines ---


def test_a_case_counts_as_worse_only_beyond_the_tolerance():
    recorded = [item("a", 1.00), item("b", 1.00), item("c", 1.00), item("d", 1.00)]
    now = [item("a", 0.94), item("b", 0.96), item("c", 1.00), item("d", 5.00)]
    findings = report.compare(recorded, now, 0.05)
    assert described(findings) == ["worse    a vs. copy: 0.94, recorded 1.00"] and report.any_worse(findings)
    assert report.compare(recorded, now, 0.07) == []


def test_values_are_not_compared_only_ratios():
    assert report.compare([item("a", 0.97)], [item("a", 0.97) | {"value": 0.5}], 0) == []


def test_missing_and_new_cases_are_reported_and_do_not_count_as_worse():
    recorded = [item("gone", 0.5), item("a", 1.0, "copy")]
    now = [item("a", 1.0, "scale"), item("a", 1.0, "copy"), item("new", 0.9)]
    findings = report.compare(recorded, now, 0.05)
    assert described(findings) == [
        "missing  gone vs. copy: recorded 0.50, not measured now",
        "new      a vs. scale: 1.00, not in the record",
        "new      new vs. copy: 0.90, not in the record",
    ]
    assert not report.any_worse(findings)


def test_limits_are_not_compared_and_a_ratio_of_nan_counts_as_worse():
    assert report.compare([item("triad", None)], [item("triad", None)], 0) == []
    assert report.compare([item("triad", None)], [], 0) == []
    assert report.any_worse(report.compare([item("a", 1.0)], [item("a", math.nan)], 0.05))


def test_a_recorded_run_is_read_with_its_command_and_date():
    header = report.baseline_header("./run-benchmarks kernels", "2030-01-31")
    lines = [header, report.stored(item("a", 0.9)), "", report.stored(item("b", None))]
    baseline = report.read_baseline(lines, "runs.jsonl")
    assert (baseline.command, baseline.date) == ("./run-benchmarks kernels", "2030-01-31")
    assert [(record["case"], record["ratio"]) for record in baseline.records] == [("a", 0.9), ("b", None)]


def test_a_run_without_a_header_is_readable_and_a_broken_line_is_named():
    plain = report.stored(item("a", 0.9))
    assert len(report.read_baseline([plain], "runs.jsonl").records) == 1
    with pytest.raises(SystemExit, match="runs.jsonl, line 2"):
        report.read_baseline([plain, '{"suite":'], "runs.jsonl")


def test_every_recorded_run_can_be_compared():
    for file in (Path(report.__file__).parents[1] / "results").glob("*.jsonl"):
        first = json.loads(file.read_text().partition("\n")[0])
        if "curve" not in first:  # runs that are kept have other fields
            assert report.read_baseline(file.read_text().splitlines(), file.name).records


def test_a_run_is_recorded_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(ratio: float, *options: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(item("a", ratio) | {"against_value": 2.0}) + "\n"))
        monkeypatch.setattr(sys, "argv", ["report", "--commit", "0123abc", *options])
        return report.main()

    file = tmp_path / "made" / "kernels.jsonl"
    assert run(1.0, "--record", str(file), "--command", "./run-benchmarks kernels") == 0
    assert json.loads(file.read_text().splitlines()[1])["machine"] == suite.machine_name()
    assert run(0.95, "--compare", str(file)) == 0
    assert "Nothing is worse than recorded." in capsys.readouterr().out
    assert run(0.85, "--compare", str(file)) == 1
    assert "worse    a vs. copy: 0.85, recorded 1.00" in capsys.readouterr().out
    assert run(0.85, "--compare", str(file), "--tolerance", "0.2") == 0
