"""Runs steps one after another. Each has a limit, a log of its own, and a result as soon as it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from on_a_gpu.findings import figures_in, findings, has_run_no_test, last_lines
from on_a_gpu.machine import ROOT, Machine
from on_a_gpu.results import Result, Results
from on_a_gpu.steps import Step

ALL_PASSED, SOME_FAILED, NO_GPU, NOT_ALL_RUN = 0, 1, 3, 4
GRACE_S = 5  # the time between the request to end and the kill


class Cut(Exception):
    """The run ends before the step: its time is used up, or it was told to end."""


@dataclass
class Runner:
    machine: Machine
    results: Results
    steps: Sequence[Step]  # all of them, for the page
    deadline: float = float("inf")  # a time of time.monotonic()
    patience: float = 1  # multiplies the limits of all steps

    def run(self, chosen: Sequence[Step], again: bool) -> int:
        """Run the chosen steps, except for those that are finished already. Return the exit code."""
        signal.signal(signal.SIGTERM, end_the_run)
        try:
            self._run_all(chosen, again)
        except Cut:  # the cut came between two steps
            pass
        self.results.publish(self.steps)
        return exit_code([self.results.of(step.name) for step in chosen])

    def _run_all(self, chosen: Sequence[Step], again: bool) -> None:
        commit = commit_of(ROOT, self.machine.pack)
        for step in chosen:
            if self.results.is_finished(step, chosen) and not again:
                print(f"{step.name}: {self.results.of(step.name).result} in an earlier run", flush=True)
                continue
            left = self.deadline - time.monotonic()
            if left <= 0:
                break
            if left < step.estimate_s * self.patience:
                print(f"{step.name}: left for another call, as it takes {step.estimate_s * self.patience:.0f} s", flush=True)
                continue
            print(f"{step.name}: {step.about}", flush=True)
            began, result = datetime.now(timezone.utc).isoformat(timespec="seconds"), self._result(step)
            self.results.add(Result(**{**vars(result), "began": began, "commit": commit}), self.steps)
            print(f"  {result.result} after {result.seconds:.0f} s", *result.said, sep="\n    ", flush=True)
            if result.result == "cut":
                break

    def _result(self, step: Step) -> Result:
        result, why = self._refusal(step)
        return Result(step.name, result, said=[why]) if result else self._ran(step)

    def _refusal(self, step: Step) -> tuple[str, str]:
        """Return the result of a step that cannot run, and the reason; two empty strings for one that can."""
        if step.needs_gpu and self.machine.no_gpu_because:
            return "no GPU", self.machine.no_gpu_because
        before = self.results.of(step.after) if step.after else None
        if step.after and (before is None or before.result != "passed"):
            return "skipped", f"{step.after} has not passed"
        if step.program and self.machine.program(step.program) is None:
            return "skipped", f"{step.program} is missing"
        if step.module and not self.machine.has_module(step.module):
            return "skipped", f"Python has no module {step.module}"
        return "", ""

    def _ran(self, step: Step) -> Result:
        log = self.results.logs / f"{self.steps.index(step) + 1:02}-{step.name}.log"
        began = time.monotonic()
        own_limit = step.limit_s * self.patience
        limit = min(own_limit, self.deadline - began)
        with log.open("w") as file:
            file.write(f"$ {' '.join(step.command)}\n")
            file.flush()
            outcome = run_command(step.command, file.fileno(), limit, self.machine.environment())
        if outcome == "timed out" and limit < own_limit:
            outcome = "cut"
        text = log.read_text(errors="replace")
        if outcome == "passed" and not self.machine.no_gpu_because and has_run_no_test(text):
            outcome = "FAILED"  # the driver has a GPU, but no test could use it
        said = findings(text) or (last_lines(text, 5) if outcome != "passed" else [])
        seconds = round(time.monotonic() - began, 1)
        return Result(step.name, outcome, seconds, said, log.name, figures=figures_in(text))


def run_command(command: Sequence[str], output: int, limit_s: float, environment: dict[str, str]) -> str:
    """Run a command in a process group of its own. After its limit the whole group is ended."""
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    except OSError as error:
        os.write(output, f"error: cannot start {command[0]}: {error}\n".encode())
        return "FAILED"
    try:
        return "passed" if process.wait(limit_s) == 0 else "FAILED"
    except subprocess.TimeoutExpired:
        return "timed out"
    except (Cut, KeyboardInterrupt):
        return "cut"
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process group: also the children of a command that has ended."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def end_the_run(*_: object) -> None:
    raise Cut


def exit_code(results: Sequence[Result | None]) -> int:
    names = [result.result if result else "cut" for result in results]
    if "FAILED" in names or "timed out" in names:
        return SOME_FAILED
    if "cut" in names:
        return NOT_ALL_RUN
    return NO_GPU if "no GPU" in names else ALL_PASSED


def commit_of(tree: Path, pack: Path) -> str:
    """Return the commit of the tree, or that of the pack where git or its folder is missing, or nothing."""
    try:
        asked = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=tree, capture_output=True, text=True, timeout=20)
        if asked.returncode == 0:
            return asked.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        pass
    packed = pack / "commit.txt"
    return packed.read_text().strip() if packed.exists() else ""
