"""Tests of the trainings: their plans fit the machine of the day, and small ones train on an emulated GPU, through `run`."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from on_a_gpu.cases import CASES
from on_a_gpu.machine import ROOT

BUILD = Path(os.environ.get("BALLAST_BUILD", ROOT / "build" / "release"))
EMULATED = BUILD / "tests" / "emulated_cuda" / "torch"
PLANNED = [name for name, case in CASES.items() if case.system == "ballast"]


@pytest.fixture
def package(monkeypatch):
    if not any((BUILD / "python" / "ballast").glob("_core*.so")):
        pytest.skip("the package is not built")
    monkeypatch.syspath_prepend(BUILD / "python")


@pytest.mark.parametrize("name", PLANNED)
def test_a_case_fits_the_machine_of_the_day(package, name, tmp_path):
    from on_a_gpu.trainings import EXPECTED, forecast

    case = CASES[name]
    plan = forecast(case, EXPECTED, tmp_path)
    assert plan.fits
    assert case.steps * plan.seconds < 0.7 * case.estimate_s  # the rest is the start of the process, and of the training


def test_the_largest_model_has_32_billion_parameters(package, tmp_path):
    from on_a_gpu.trainings import EXPECTED, forecast

    assert forecast(CASES["32b"], EXPECTED, tmp_path).parameters > 32e9


def test_a_forecast_takes_the_rates_and_the_efficiency_that_were_measured(package, tmp_path):
    from on_a_gpu.trainings import forecasts

    case = CASES["8b-host-compact"]
    here = {"1b-bf16": {"passes_seconds": 0.2}, "host": {"stream": 60.0, "cores": 16}}
    slow = {**here, "gpu: download at once": {"value": 5.0}}
    found, slower = (forecasts(case, figures, tmp_path) for figures in (here, slow))
    assert found["forecast_seconds"] == slower["forecast_seconds"] < found["forecast_here_seconds"]
    assert found["forecast_here_seconds"] < slower["forecast_here_seconds"]
    assert "forecast_here_seconds" not in forecasts(case, {}, tmp_path)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OUT": str(folder / "out"), "BALLAST_BUILD": str(BUILD)}
    command = [sys.executable, str(ROOT / "tests" / "on_a_gpu" / "run"), "--emulated", str(folder / "work"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_rehearsal_trains_on_an_emulated_gpu_and_continues_after_a_cut(tmp_path):
    if not (EMULATED / "python" / "libballast_emulated_torch.so").exists():
        pytest.skip("emulated GPUs are not built")
    steps = ["train-1b-masters", "train-1b-host", "train-32b"]
    chosen = [word for step in steps for word in ("--only", step)]
    cut = run(tmp_path, *chosen, "--minutes", "0.3")  # 18 s, of which the estimate of the largest model is more
    assert cut.returncode == 4, cut.stdout + cut.stderr
    assert "train-32b: left for another call" in cut.stdout
    ended = run(tmp_path, *chosen)
    assert ended.returncode == 0, ended.stdout + (tmp_path / "out" / "summary.txt").read_text()
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    figures = {name: found for line in lines if line["result"] == "passed" for name, found in line["figures"].items()}
    for name in ("1b-masters", "1b-host", "32b"):
        assert figures[name]["losses"][-1] < figures[name]["losses"][0]
    assert figures["32b"]["gb_per_second/upload"] > 0 and figures["32b"]["planned_bytes"] > 0
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        timelines = [name for name in archive.getnames() if name.startswith("timelines/")]
        assert timelines == ["timelines/timeline-1b-host.json", "timelines/timeline-32b.json"]
        assert json.load(archive.extractfile(timelines[1]))
    page = (tmp_path / "out" / "page.md").read_text()
    assert page.startswith("# A rehearsal") and "| 32b learns | " in page and "finite, and falls | holds |" in page
