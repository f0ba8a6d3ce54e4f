"""Tests of the runner: order, limits, and continuing after a cut."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from on_a_gpu.machine import ROOT, Machine
from on_a_gpu.results import Results
from on_a_gpu.runner import ALL_PASSED, NO_GPU, NOT_ALL_RUN, SOME_FAILED, Runner
from on_a_gpu.steps import Step


class WithoutGpu(Machine):
    no_gpu_because = "no GPU: this is a test"


def step(name: str, code: str = "", **more) -> Step:
    """Return a step that runs Python code."""
    given = {"limit_s": 60, "needs_gpu": False} | more
    return Step(name, f"about {name}", command=(sys.executable, "-c", code), **given)


class WithGpu(Machine):
    no_gpu_because = ""


class Run:
    """A run of steps in a folder. Each call of start() is a call of the command."""

    def __init__(self, folder: Path, *steps: Step):
        self.folder, self.steps = folder, steps
        self.work, self.out = folder / "work", folder / "out"
        self.machine: Machine = WithoutGpu(self.work)

    def start(self, *, again: bool = False, seconds: float = float("inf")) -> int:
        results = Results(self.work, self.out)
        return Runner(self.machine, results, self.steps, time.monotonic() + seconds).run(self.steps, again)

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in (self.work / "results.jsonl").read_text().splitlines()]

    def given(self) -> list[tuple[str, str]]:
        return [(line["step"], line["result"]) for line in self.lines()]


@pytest.fixture(autouse=True)
def signals_as_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def counting(path: Path) -> str:
    return f"open({str(path)!r}, 'a').write('x')"


def test_each_result_is_there_before_the_next_step_begins(tmp_path):
    out = tmp_path / "out"
    look = f"assert 'first' in open({str(out / 'results.jsonl')!r}).read()\n"
    look += f"assert 'passed' in open({str(out / 'summary.txt')!r}).read()"
    run = Run(tmp_path, step("first"), step("second", look))
    assert run.start() == ALL_PASSED
    assert run.given() == [("first", "passed"), ("second", "passed")]


def test_a_failed_step_has_a_result_and_the_others_run(tmp_path):
    run = Run(tmp_path, step("bad", "print('== the reason'); raise SystemExit(7)"), step("good"))
    assert run.start() == SOME_FAILED
    assert run.given() == [("bad", "FAILED"), ("good", "passed")]
    assert "== the reason" in (tmp_path / "out" / "summary.txt").read_text()


def test_a_step_without_a_telling_line_fails_with_its_last_lines(tmp_path):
    run = Run(tmp_path, step("bad", "print('the end'); raise SystemExit(1)"))
    run.start()
    assert "the end" in run.lines()[0]["said"]


def test_a_missing_program_is_a_failure(tmp_path):
    run = Run(tmp_path, Step("bad", "", 10, ("/there/is/no/program",), needs_gpu=False))
    assert run.start() == SOME_FAILED
    assert "cannot start" in "".join(run.lines()[0]["said"])


def test_a_step_is_skipped_if_the_one_before_it_has_not_passed(tmp_path):
    run = Run(tmp_path, step("build", "raise SystemExit(1)"), step("test", after="build"))
    assert run.start() == SOME_FAILED
    assert run.given() == [("build", "FAILED"), ("test", "skipped")]


def test_without_a_gpu_the_rest_runs(tmp_path):
    run = Run(tmp_path, step("kernels", "raise SystemExit(1)", needs_gpu=True), step("facts"))
    assert run.start() == NO_GPU
    assert run.given() == [("kernels", "no GPU"), ("facts", "passed")]
    assert "no GPU: this is a test" in (tmp_path / "out" / "summary.txt").read_text()


def test_tests_that_cannot_use_the_gpu_of_the_driver_fail(tmp_path):
    skips = "print('test skipped: no usable GPU: a reason')"
    run = Run(tmp_path, step("kernels", skips, needs_gpu=True), step("rest", "print('fine')", needs_gpu=True))
    run.machine = WithGpu(run.work)
    assert run.start() == SOME_FAILED
    assert run.given() == [("kernels", "FAILED"), ("rest", "passed")]


def test_missing_programs_and_modules_are_named(tmp_path):
    run = Run(tmp_path, step("a", program="no-such-program"), step("b", module="no_such_module"))
    assert run.start() == ALL_PASSED
    assert [line["said"] for line in run.lines()] == [["no-such-program is missing"], ["Python has no module no_such_module"]]


def test_a_finished_step_is_not_repeated_unless_again(tmp_path):
    count = tmp_path / "count"
    run = Run(tmp_path, step("one", counting(count)))
    for _ in range(2):
        assert run.start() == ALL_PASSED
    assert count.read_text() == "x"
    run.start(again=True)
    assert count.read_text() == "xx"


AFTER = [
    pytest.param([step("test", after="build", needs_gpu=True)], 2, id="an unfinished step needs it"),
    pytest.param([step("test", after="build")], 1, id="what needs it is finished"),
    pytest.param([], 2, id="it was chosen alone"),
]


@pytest.mark.parametrize("later, built", AFTER)
def test_a_build_whose_product_is_gone_is_repeated_if_it_is_needed(tmp_path, later, built):
    product, count = tmp_path / "program", tmp_path / "count"
    run = Run(tmp_path, step("build", f"{counting(count)}; {counting(product)}", product=product), *later)
    run.start()
    run.start()
    assert count.read_text() == "x"
    product.unlink()
    run.start()
    assert count.read_text() == built * "x"


def test_skipped_steps_and_those_without_a_gpu_are_tried_again(tmp_path):
    run = Run(tmp_path, step("gpu", needs_gpu=True), step("tool", program="no-such-program"))
    run.start()
    run.start()
    assert len(run.lines()) == 4


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path):
    child = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
    child += "print('== child', p.pid, flush=True); time.sleep(1000)"
    run = Run(tmp_path, step("slow", child, limit_s=3), step("next"))
    assert run.start() == SOME_FAILED
    assert run.given() == [("slow", "timed out"), ("next", "passed")]
    pid = int(run.lines()[0]["said"][0].split()[-1])
    assert has_ended(pid)


def has_ended(pid: int) -> bool:
    for _ in range(500):  # a killed process may stay for a moment
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_run_ends_after_its_time_and_the_next_one_repeats_the_step(tmp_path):
    slow_once = f"import os, time; p = {str(tmp_path / 'begun')!r}\n"
    slow_once += "if not os.path.exists(p): open(p, 'w'); time.sleep(1000)"
    run = Run(tmp_path, step("slow", slow_once), step("last"))
    assert run.start(seconds=3) == NOT_ALL_RUN
    assert run.given() == [("slow", "cut")]
    assert run.start() == ALL_PASSED
    assert run.given() == [("slow", "cut"), ("slow", "passed"), ("last", "passed")]


def test_a_step_that_would_not_end_in_time_is_left_for_the_next_call_and_a_shorter_one_runs(tmp_path):
    run = Run(tmp_path, step("first"), step("long", estimate_s=3000), step("short", estimate_s=1))
    assert run.start(seconds=1000) == NOT_ALL_RUN
    assert run.given() == [("first", "passed"), ("short", "passed")]
    assert run.start(seconds=4000) == ALL_PASSED
    assert run.given()[2:] == [("long", "passed")]


def test_figures_of_a_step_are_kept_and_given_to_the_steps_after_it(tmp_path):
    look = f"import json; assert json.load(open({str(tmp_path / 'work' / 'figures.json')!r})) == {{'a': {{'x': 1}}}}"
    run = Run(tmp_path, step("first", "print('figures {\"a\": {\"x\": 1}}')"), step("second", look))
    assert run.start() == ALL_PASSED
    assert run.lines()[0]["figures"] == {"a": {"x": 1}}
    assert (tmp_path / "out" / "page.md").read_text().startswith("# Ballast on one GPU")


PROGRAM = """
import sys, time
from pathlib import Path
from on_a_gpu.test_runner import Run, step, counting
folder = Path(sys.argv[1])
wait = f"import time; {counting(folder / 'begun')}; time.sleep(1000 if len(open({str(folder / 'begun')!r}).read()) == 1 else 0)"
sys.exit(Run(folder, step("first", counting(folder / "first")), step("second", wait)).start())
"""


@pytest.mark.parametrize("number, code, given", [(signal.SIGKILL, -signal.SIGKILL, []), (signal.SIGTERM, NOT_ALL_RUN, ["cut"])])
def test_a_run_that_is_ended_from_outside_continues_with_the_step_that_ran(tmp_path, number, code, given):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    begun = tmp_path / "begun"
    while not begun.exists() or not begun.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == code
    assert subprocess.run(command, env=environment).returncode == ALL_PASSED
    results = [json.loads(line)["result"] for line in (tmp_path / "work" / "results.jsonl").read_text().splitlines()]
    assert results == ["passed", *given, "passed"]
    assert (tmp_path / "first").read_text() == "x"
