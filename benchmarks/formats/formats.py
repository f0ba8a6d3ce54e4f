"""Compare the losses of a GPT of 30 million parameters in each state format and gradient format with those in fp32.

Each run that ends is added to a file, and a run in the file is not repeated. The suite can be stopped at any time, and
continues the run that was stopped. A run of 2,000 steps takes ten minutes of one core with bf16 arithmetic, and hours without
it. All variants of a seed have the same start and the same batches. A line's value is the mean of the last losses of all seeds;
variants that lack a seed have no line.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path

import loss_table
import runs
import suite
from variants import CASES, SEEDS, START, TASKS, Case, Task


class Trainer:
    """Trains cases, each on the text of its task, and keeps the parameters that fine-tuning begins with."""

    def __init__(self, options: argparse.Namespace):
        import loss_run
        import loss_training
        import torch
        from texts import TEXTS

        torch.set_num_threads(1)
        self._run = loss_run.Run
        self._options = options
        self._texts = {task.name: TEXTS[task.text]() for task in TASKS}
        self.settings: dict[str, str] = {}
        for task in TASKS:
            text = f"text {self._texts[task.name].digest}"
            self.settings[task.name] = f"{loss_training.setting(task, self._steps(task), 'AdamW in bf16')}, {text}"
            if task != START.task:
                self.settings[task.name] += f", after {self.settings[START.task.name]}"
        self._of_run = {"machine": suite.machine_name(), "commit": suite.commit()}

    def start(self) -> dict | None:
        """Return the parameters that fine-tuning begins with, unless they are missing or those of another setting."""
        import torch

        file = self._start_file()
        kept = torch.load(file) if file.exists() else {"setting": ""}
        return kept["parameters"] if kept["setting"] == self.settings[START.task.name] else None

    def train(self, case: Case) -> runs.Row:
        import torch

        begin = time.monotonic()
        run = self._run(case, self._texts[case.task.name], self._steps(case.task), self.start() or {})
        losses = run.train(self._options.runs.with_suffix("") / folder_of(case, self._options.steps))
        run.close()
        if case == START:
            kept = {"setting": self.settings[case.task.name], "parameters": run.model.state_dict()}
            torch.save(kept, self._start_file())
        return {
            "task": case.task.name,
            "state": case.variant.state,
            "gradients": case.variant.gradients,
            "seed": case.seed,
            "setting": self.settings[case.task.name],
            "curve": losses.curve,
            "loss": losses.last,
            "seconds": round(time.monotonic() - begin, 1),
            **self._of_run,
            "command": command_of(case, self._options.steps),
        }

    def _steps(self, task: Task) -> int:
        return self._options.steps // task.part

    def _start_file(self) -> Path:
        return self._options.runs.with_suffix(".start.pt")


def folder_of(case: Case, steps: int) -> str:
    """Return the name of the folder with what a stopped run has trained."""
    return "-".join((case.task.name, case.variant.state, case.variant.gradients, f"seed-{case.seed}", f"{steps}-steps"))


def command_of(case: Case, steps: int) -> str:
    """Return the command that repeats one run."""
    return shlex.join(["./run-benchmarks", "formats", "--", "--only", case.name, "--steps", str(steps)])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="formats", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suite.add_choice(parser)
    parser.add_argument("--runs", type=Path, required=True, help="the file of the finished runs (formats.jsonl in the build)")
    parser.add_argument("--steps", type=int, default=2000, help="of a training, a multiple of 100; fine-tuning has a fifth")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="make the runs of the first seeds only")
    parser.add_argument("--table", action="store_true", help="show the runs in the file, and train nothing")
    options = suite.choose(parser, CASES, lambda case: case.name)
    if options.steps < 100 or options.steps % 100:
        parser.error(f"--steps must be a multiple of 100, not {options.steps}")
    options.cases = [case for case in options.cases if case.seed < options.seeds]
    return options


def train(options: argparse.Namespace) -> None:
    trainer = Trainer(options)
    finished = runs.read(options.runs)
    try:
        runs.refuse_other_settings(finished.values(), trainer.settings)
    except ValueError as problem:
        sys.exit(f"formats: {problem}")
    for case in runs.remaining(options.cases, finished, trainer.start() is not None):
        print(f"formats: {case.name}", file=sys.stderr, flush=True)
        row = trainer.train(case)
        runs.append(options.runs, row)
        print(f"formats: loss {row['loss']:.4f} after {row['seconds']:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    options = arguments()
    if not options.table:
        train(options)
    finished = runs.read(options.runs)
    for task in TASKS:
        results = loss_table.results_of(task, finished)
        print(suite.lines(loss_table.records(task, results)), end="", flush=True)
        print(f"\n{task.name}\n\n{loss_table.markdown(results)}", file=sys.stderr)


if __name__ == "__main__":
    main()
