"""Tests of the verdicts and of the page, with results that are made up: good, bad, missing and cut ones."""

import math

import pytest
from on_a_gpu.cases import CASES
from on_a_gpu.judge import (
    FAILS,
    GIB,
    HOLDS,
    LANES,
    LOSSES,
    MISSING,
    SHARES,
    SHEETS,
    SPEEDS,
    TESTS,
    judged,
    largest_difference,
)
from on_a_gpu.page import published

RATES = {"gpu: copy": 4300.0, "gpu: upload at once": 52.0, "gpu: download at once": 52.0, "cpu: copy": 110.0}


def good_figures() -> dict:
    """Return the figures of a run in which each claim holds."""
    figures = {name: {"value": rate} for name, rate in RATES.items()}
    figures |= {name: {"value": 1.5 * RATES[other]} for name, other, _ in SHARES if name not in RATES}
    figures |= {"host": {"stream": 120.0, "grown_bytes": 110 * GIB, "cores": 16}, "drive": {"read": 2.0, "write": 1.0}}
    figures |= {"machine": {"nvidia-smi": "NVIDIA H200", "torch": "2.11.0 CUDA 13.0", "cores": "16", "system": "Ubuntu"}}
    for name, case in CASES.items():
        figures[name] = {
            "losses": [10.0, 9.0, 8.0],
            "seconds": 1.0 if case.system == "ballast" else 1.2,
            "tokens": case.tokens,
            "used_bytes": 100 * GIB,
            "device": "cuda",
        }
        if case.system == "ballast":
            figures[name] |= {"forecast_seconds": 1.2, "forecast_here_seconds": 0.95, "planned_bytes": 101 * GIB}
            figures[name] |= {"parameters": 32.8e9, "memory_bytes/host": 100 * GIB, "exposed_seconds": 0.1, "step_seconds": 1.0}
    for case, lane, limit, _ in LANES:
        whole = figures[limit].get("value") or figures[limit].get("stream") or figures[limit]["read"]
        figures[case][f"gb_per_second/{lane}"] = 0.9 * whole
    figures["1b"]["forecast_seconds"] = 1.05
    return figures | {name: figures[name] | {"forecast_seconds": 1.05} for name in CASES if "forecast_seconds" in figures[name]}


PASSED = dict.fromkeys(TESTS, "passed")


def results(figures, outcomes=PASSED) -> list[str]:
    return [each.result for some in judged(figures, outcomes).values() for each in some]


def verdicts(figures, outcomes=PASSED) -> dict[str, str]:
    return {each.what: each.result for some in judged(figures, outcomes).values() for each in some}


def changed_verdicts(figures, outcomes=PASSED) -> dict[str, str]:
    """Return the verdicts that differ from those of the good run."""
    good = verdicts(good_figures())
    return {what: result for what, result in verdicts(figures, outcomes).items() if result != good[what]}


def with_figure(case: str, **more) -> dict:
    figures = good_figures()
    return figures | {case: figures[case] | more}


def test_a_good_run_holds_each_claim():
    assert set(results(good_figures())) == {HOLDS}


def test_a_run_that_measured_nothing_fails_no_claim():
    assert set(results({}, {})) == {MISSING}
    assert "0 hold, 0 fail" in published({}, {}, [], [])


def test_there_is_a_verdict_for_each_bar():
    count = 1 + len(TESTS) + len(LOSSES) + len(CASES) + len(SPEEDS) + len(SHEETS) + len(SHARES) + len(LANES) + 4
    assert len(results({}, {})) == count + sum(case.system == "ballast" for case in CASES.values())


BAD = [
    ("1b", {"losses": [10.0, 9.2, 8.0]}, {"1b vs. 1b-masters", "1b-host vs. 1b", "1b-host-3 vs. 1b", "1b-host-early vs. 1b"}),
    ("1b-host", {"losses": [10.0, 9.0, 8.000001]}, {"1b-host vs. 1b"}),
    ("14b-host-compact", {"losses": [10.0, math.nan, 8.0]}, {"14b-host-compact learns"}),
    ("14b-host-compact", {"losses": [10.0, 9.0, 10.5]}, {"14b-host-compact learns"}),
    ("1b-drive", {"seconds": 2.0}, {"Worst forecast before the day", "Worst forecast with the rates of this machine"}),
    ("8b", {"used_bytes": 102 * GIB}, {"8b: memory of the GPU"}),
    ("8b-host", {"gb_per_second/upload": 20.0}, {"8b-host: upload"}),
    ("gpu: adamw compact, whole", {"value": 1000.0}, {"gpu: adamw compact, whole"}),
    ("gpu: copy", {"value": 3000.0}, {"gpu: copy"}),
    ("1b-fsdp2", {"seconds": 0.9}, {"Speed of 1b vs. 1b-fsdp2"}),
    ("32b", {"parameters": 14e9}, {"All 32B parameters train on one GPU with 128 GiB of host memory"}),
    ("32b", {"memory_bytes/host": 129 * GIB}, {"All 32B parameters train on one GPU with 128 GiB of host memory"}),
]


@pytest.mark.parametrize("case, more, failing", BAD)
def test_a_bad_figure_fails_its_claims_alone(case, more, failing):
    found = changed_verdicts(with_figure(case, **more))
    assert set(found) == failing
    assert set(found.values()) == {FAILS}


@pytest.mark.parametrize("ratio, fails", [(1.1, False), (0.8, True), (1.2, True)])
def test_forecasts_are_judged_by_their_median(ratio, fails):
    figures = good_figures()
    for name in CASES:
        if "forecast_here_seconds" in figures[name]:
            figures[name] = figures[name] | {"forecast_here_seconds": figures[name]["seconds"] / ratio}
    what = "Error of the forecasts with the rates of this machine"
    assert changed_verdicts(figures) == ({what: FAILS} if fails else {})


@pytest.mark.parametrize("outcome, result", [("FAILED", FAILS), ("timed out", FAILS), ("cut", MISSING), ("no GPU", MISSING)])
def test_a_test_that_did_not_pass_is_no_proof(outcome, result):
    assert changed_verdicts(good_figures(), PASSED | {"memcheck": outcome}) == {TESTS["memcheck"]: result}


def test_a_rehearsal_proves_no_headline_and_says_so():
    figures = with_figure("32b", device="emulated")
    assert changed_verdicts(figures) == {"All 32B parameters train on one GPU with 128 GiB of host memory": MISSING}
    assert published(figures, PASSED, [], []).startswith("# A rehearsal without a GPU: these figures mean nothing\n")


def test_a_training_that_was_cut_leaves_its_forecast():
    figures = good_figures()
    figures["32b"] = {name: figures["32b"][name] for name in ("forecast_seconds", "planned_bytes", "parameters")}
    assert set(changed_verdicts(figures).values()) == {MISSING}
    page = published(figures, PASSED, ["abc"], ["2027-01-01"])
    assert "128 GiB of host memory**: not measured." in page
    assert f"| 32b: {CASES['32b'].about} | - | - | 1.050 s | - | - | - | - | - | - |" in page


def test_losses_that_are_not_finite_differ_infinitely():
    assert largest_difference([1.0], [math.nan]) == math.inf
    assert largest_difference([], []) == math.inf
    assert largest_difference([1.0, 2.0], [1.0, 1.6, 5.0]) == pytest.approx(0.25)


def test_the_page_has_the_headline_the_machine_and_all_trainings():
    page = published(good_figures(), PASSED, ["abc"], ["2027-01-01"])
    assert page.startswith("# Ballast on one GPU\n\n- commit abc, 2027-01-01\n- GPU: NVIDIA H200\n")
    assert "**All 32B parameters train on one GPU with 128 GiB of host memory**: holds. 8,192 tokens/s" in page
    assert "- host: 16 cores, 110 GiB of memory used at once, 120 GB/s" in page
    assert all(f"| {name}: {case.about} | " in page for name, case in CASES.items())
    assert "Claims that fail" not in page


def test_the_page_names_what_fails_before_all_tables():
    page = published(with_figure("8b-host", **{"gb_per_second/upload": 20.0}), PASSED, [], [])
    fails = "- 8b-host: upload: 20.0 GB/s, 0.38; needed: 0.80 of upload at once"
    assert page.index(fails) < page.index("## Trainings")
    assert "| 8b-host: upload | 20.0 GB/s, 0.38 | 0.80 of upload at once | **fails** |" in page


def test_the_page_can_be_published():
    page = published(good_figures(), PASSED, ["abc"], ["2027-01-01"])
    assert not any(word in page for word in ("/work", "/root", "/tmp", "None", "nan"))
    widths = {}
    for line in page.splitlines():
        if line.startswith("|---"):
            width = line.count("|")
        elif line.startswith("| "):
            widths.setdefault(line.count("|"), line)
    assert set(widths) <= {5, 11}, width
