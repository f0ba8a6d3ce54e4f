"""Tests of what a run writes."""

import json
import tarfile
from pathlib import Path

from on_a_gpu.results import LOG_BYTES, Result, Results, read
from on_a_gpu.steps import Step

STEPS = [Step("build", "compile it", 10, ()), Step("test", "test it", 10, ()), Step("rates", "measure it", 10, ())]


def test_the_page_shows_each_step_with_its_result(tmp_path):
    results = Results(tmp_path, tmp_path)
    results.add(Result("build", "passed", 12.3, commit="abc"), STEPS)
    results.add(Result("test", "FAILED", 4, ["5 tests failed"]), STEPS)
    page = (tmp_path / "summary.txt").read_text().splitlines()
    assert page[2:4] == ["commit abc", "steps: 1 FAILED, 1 passed, 1 not yet run"]
    assert page[5].split() == ["passed", "12", "s", "build", "compile", "it"]
    assert page[6].split() == ["FAILED", "4", "s", "test", "test", "it"]
    assert page[7].strip() == "5 tests failed"
    assert page[8].split() == ["-", "rates", "measure", "it"]


def test_the_last_result_of_a_step_counts(tmp_path):
    results = Results(tmp_path, tmp_path)
    results.add(Result("test", "FAILED"), STEPS)
    results.add(Result("test", "passed"), STEPS)
    assert results.of("test").result == "passed"
    assert Results(tmp_path, tmp_path).of("test").result == "passed"


def test_an_unfinished_line_is_ignored(tmp_path):
    Results(tmp_path, tmp_path).add(Result("build", "passed"), STEPS)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"step": "te')
    results = Results(tmp_path, tmp_path)
    results.add(Result("test", "passed"), STEPS)
    assert [result.step for result in read(tmp_path / "results.jsonl")] == ["build", "test"]


def test_results_stay_when_the_packed_builds_are_extracted_again(tmp_path):
    """pack_built has its own file in the archive."""
    build = '{"step": "build", "result": "passed", "log": "01-build.log"}\n'
    assert 'results.jsonl" >"$copy/$folder/built.jsonl"' in Path(__file__).with_name("pack_built").read_text()
    for _ in range(2):
        (tmp_path / "built.jsonl").write_text(build)
        results = Results(tmp_path, tmp_path)
        assert results.of("build").result == "passed"
        results.add(Result("test", "passed"), STEPS)
    results.add(Result("build", "FAILED"), STEPS)
    assert [Results(tmp_path, tmp_path).of(step).result for step in ("build", "test")] == ["FAILED", "passed"]


def test_another_folder_receives_copies_and_the_ends_of_the_logs(tmp_path):
    work, out = tmp_path / "work", tmp_path / "out"
    results = Results(work, out)
    (results.logs / "01-build.log").write_text("begin" + "x" * LOG_BYTES + "end")
    results.add(Result("build", "passed"), STEPS)
    assert sorted(path.name for path in out.iterdir()) == ["logs.tar.gz", "page.md", "results.jsonl", "summary.txt"]
    assert json.loads((out / "results.jsonl").read_text())["step"] == "build"
    with tarfile.open(out / "logs.tar.gz") as archive:
        kept = archive.extractfile("logs/01-build.log").read()
    assert len(kept) == LOG_BYTES and kept.endswith(b"xend")
