"""Tests of the module that the suites in Python share."""

import argparse
import json

import pytest
import suite

CASES = ["adamw split", "adamw compact", "copy"]


def choose(monkeypatch: pytest.MonkeyPatch, *options: str) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", ["suite", *options])
    parser = argparse.ArgumentParser()
    return suite.choose(parser, CASES, lambda case: f"{case}, vs. copy")


def test_all_cases_are_chosen_or_those_whose_line_has_the_text(monkeypatch):
    assert choose(monkeypatch).cases == CASES
    assert choose(monkeypatch, "--only", "adamw").cases == CASES[:2]
    assert choose(monkeypatch, "--only", "vs.").cases == CASES
    assert choose(monkeypatch, "--only", "lamb", "--only", "adamw").cases == CASES[:2]


def test_a_text_that_no_line_has_is_an_error(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        choose(monkeypatch, "--only", "lamb")
    assert ended.value.code == 2
    assert '"lamb"' in capsys.readouterr().err


def test_list_names_the_chosen_cases_and_stops(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        choose(monkeypatch, "--list", "--only", "compact")
    assert ended.value.code == 0
    assert capsys.readouterr().out == "adamw compact, vs. copy\n"


def test_a_ratio_is_the_median_of_the_rounds_ratios_and_above_one_is_better():
    fields = suite.comparison([1.0, 2.0, 4.0], [2.0, 2.0, 20.0], lambda seconds: 10 / seconds)
    assert fields["ratio"] == 2.0  # the median of 2, 1 and 5; the ratio of the medians is 1
    assert fields["value"] == 5.0
    assert fields["against_value"] == 5.0
    assert fields["spread"] == pytest.approx((3.5 - 1.5) / 2 / 2.0)


def test_rates_are_compared_round_by_round():
    """The machine is three times slower for both in some rounds. A disturbance affects the case alone in one round."""
    rates = {"rates": [2.0, 2 / 3, 2 / 30, 2.0, 2 / 3], "against_rates": [1.0, 1 / 3, 1 / 3, 1.0, 1 / 3]}
    line = suite.summary({"case": "a", **rates})
    assert (line["value"], line["against_value"]) == pytest.approx((2 / 3, 1 / 3))
    assert (line["ratio"], line["spread"]) == pytest.approx((2.0, 0.0))
    limit = suite.summary({"case": "a", "rates": [9.0, 1.0, 2.0], "against_rates": []})
    assert limit == {"case": "a", "value": 2.0, "ratio": None}
    with pytest.raises(ValueError):
        suite.summary({"rates": [1.0, 2.0], "against_rates": [1.0]})


def test_of_one_round_nothing_is_spread():
    fields = suite.comparison([1.0], [3.0], lambda seconds: seconds)
    assert (fields["ratio"], fields["spread"]) == (3.0, 0.0)


def test_rounds_that_did_not_all_run_are_not_compared():
    with pytest.raises(ValueError):
        suite.comparison([1.0, 1.0], [1.0], lambda seconds: seconds)


def test_rows_are_lines_of_json():
    rows = [{"case": "a"}, {"case": "b", "seconds": 0.5}]
    assert [json.loads(line) for line in suite.lines(rows).splitlines()] == rows
    assert suite.lines([]) == ""


def test_each_line_has_the_name_of_its_suite(capsys):
    rate = lambda seconds: 3 / seconds
    suite.emit("comm", [suite.line("a", 0.5, "s"), suite.versus("b", "a", "GB/s", [1.0], [2.0], value_of=rate)])
    alone, compared = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert alone == {"suite": "comm", "case": "a", "value": 0.5, "unit": "s", "against": "", "ratio": None}
    wanted = {"value": 3.0, "against": "a", "against_value": 1.5, "ratio": 2.0, "spread": 0.0}
    assert compared == {"suite": "comm", "case": "b", "unit": "GB/s", **wanted}


def test_the_machine_is_named_by_its_processor_and_cores(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9554: 64\nprocessor\t: 1\nmodel name\t: other\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    assert suite.machine_name(cpuinfo) == "AMD EPYC 9554: 64, 2 cores"
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    cpuinfo.write_text("processor\t: 0\n")
    assert suite.machine_name(cpuinfo) == "unknown processor, 1 core"
