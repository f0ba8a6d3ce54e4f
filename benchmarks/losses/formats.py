"""Compare the losses of a GPT of 30 million parameters in each state format and gradient format with those in fp32.

Each run that ends is added to a file, and a run in the file is not repeated. The suite can be stopped at any time, and
continues the run that was stopped. A run of 2,000 steps takes ten minutes of one core with bf16 arithmetic, and hours without
it. All variants of a seed have the same start and the same batches. A line's value is the mean of the last losses of all seeds;
variants that lack a seed have no line. `formats.py --renew PAGE RUNS` replaces the tables in a page by those of a file of runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import contest
import suite
from contest import FINE_TUNING, SEEDS, TRAINING, Result, Task


class Variant(NamedTuple):
    """The formats of a training."""

    state: str
    gradients: str

    @property
    def name(self) -> str:
        return f"state {self.state}, gradients {self.gradients}"


class Case(NamedTuple):
    task: Task
    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task.name}, {self.variant.name}, seed {self.seed}"

    def folder(self, steps: int) -> str:
        """Return the name of the folder with what a stopped run has trained."""
        return "-".join((self.task.name, self.variant.state, self.variant.gradients, f"seed-{self.seed}", f"{steps}-steps"))


TASKS = (TRAINING, FINE_TUNING)

REFERENCE = Variant("fp32", "fp32")  # state format split has the same bits
FIRST = (REFERENCE, Variant("compact", "fp32"), Variant("4bit", "fp32"))
THEN = (Variant("bf16", "fp32"), Variant("fp32", "bf16"), Variant("compact", "bf16"), Variant("4bit", "bf16"))
VARIANTS = (REFERENCE, THEN[0], *FIRST[1:], *THEN[1:])  # the order of the table

START = Case(TRAINING, REFERENCE, 0)  # fine-tuning begins with its parameters

# A seed of all variants of a group comes before the next seed, so that an early stop leaves pairs to compare.
CASES = tuple(Case(task, variant, seed) for group in (FIRST, THEN) for task in TASKS for seed in SEEDS for variant in group)

COMPARED = ("difference from fp32[^pairs]", "more than chance?")
COLUMNS = ("state", "gradients", "loss, mean of 3 seeds", "lowest to highest", *COMPARED)
HEAD = f"| {' | '.join(COLUMNS)} |"

Finished = dict[Case, dict[str, Any]]


def read(path: Path) -> Finished:
    return {case_of(row): row for row in suite.read_rows(path)}


def case_of(row: Mapping[str, Any]) -> Case:
    task = next(task for task in TASKS if task.name == row["task"])
    return Case(task, Variant(row["state"], row["gradients"]), row["seed"])


def remaining(chosen: Sequence[Case], finished: Collection[Case], has_start: bool) -> list[Case]:
    """Return the runs to make. Fine-tuning needs the parameters of START, which are made again if they are lost."""
    missing = [case for case in chosen if case not in finished]
    if has_start or all(case.task != FINE_TUNING for case in missing):
        return missing
    return [START, *(case for case in missing if case != START)]


def cells(result: Result) -> list[str]:
    variant, losses = result.contender, result.losses.values()
    state = "`fp32`, `split`" if variant.state == "fp32" else f"`{variant.state}`"
    formats = [state, f"`{variant.gradients}`"]
    if not result.is_finished:
        return [*formats, f"unfinished: {len(losses)} of {len(SEEDS)} seeds", "", "", ""]
    return [*formats, f"{result.mean:.4f}", f"{min(losses):.4f} to {max(losses):.4f}", *result.compared_cells]


def results_of(task: Task, finished: Finished) -> list[Result]:
    """Return the results of a task in the order of the table, the unfinished ones included."""
    cases_of = lambda variant: [Case(task, variant, seed) for seed in SEEDS]
    return contest.results_of(VARIANTS, REFERENCE, cases_of, finished)


def records(task: Task, results: list[Result]) -> list[dict[str, Any]]:
    """Return a line for each finished variant."""
    finished = (result for result in results if result.is_finished)
    return [result.record("formats", f"{task.name}, {result.contender.name}", REFERENCE.name) for result in finished]


def markdown(results: list[Result]) -> str:
    return contest.markdown(COLUMNS, map(cells, results))


def with_tables(page: str, finished: Finished) -> str:
    """Return a page with the tables of all tasks, in their order, in the place of those that it has."""
    tables = [markdown(results_of(task, finished)) for task in TASKS]
    begins, *old = page.split(HEAD)
    if len(old) != len(tables):
        raise ValueError(f"the page must have {len(tables)} tables of losses, not {len(old)}")
    rests = [part[part.index("\n\n") + 1 :] for part in old]
    return begins + "".join(table + rest for table, rest in zip(tables, rests))


def in_formats(case: Case, text: Any, steps: int, start: dict[str, Any] | None) -> Any:
    """Return a training with the formats of a case, which begins with these parameters if there are some."""
    import ballast
    import torch
    from loss_training import Plan, Training

    plan = Plan(case.task, case.seed, steps)
    model = plan.model(torch.bfloat16)
    if start is not None:
        model.load_state_dict(start)
    plain = torch.optim.AdamW(model.parameters(), lr=case.task.learning_rate)
    formats = {"state_format": case.variant.state, "gradient_format": case.variant.gradients}
    return Training(plan, text, model, [ballast.wrap(plain, model, **formats, tuning=ballast.Tuning(threads=1))])


class Trainer:
    """Trains cases, each on the text of its task, and keeps the parameters that fine-tuning begins with."""

    def __init__(self, options: argparse.Namespace):
        import loss_training
        import torch

        torch.set_num_threads(1)
        self._options = options
        self._texts = {task.name: loss_training.TEXTS[task.text]() for task in TASKS}
        self.settings: dict[str, str] = {}
        for task in TASKS:
            text = f"text {self._texts[task.name].digest}"
            self.settings[task.name] = f"{loss_training.setting(task, self._steps(task), 'AdamW in bf16')}, {text}"
            if task != START.task:
                self.settings[task.name] += f", after {self.settings[START.task.name]}"

    def start(self) -> dict[str, Any] | None:
        """Return the parameters that fine-tuning begins with, unless they are missing or those of another setting."""
        import torch

        file = self._start_file()
        kept = torch.load(file) if file.exists() else {"setting": ""}
        return kept["parameters"] if kept["setting"] == self.settings[START.task.name] else None

    def train(self, case: Case) -> dict[str, Any]:
        """Return the row of a run."""
        import torch

        begin = time.monotonic()
        start = self.start() if case.task == FINE_TUNING else None
        run = in_formats(case, self._texts[case.task.name], self._steps(case.task), start)
        losses = run.train(self._options.runs.with_suffix("") / case.folder(self._options.steps))
        run.close()
        if case == START:
            torch.save({"setting": self.settings[case.task.name], "parameters": run.model.state_dict()}, self._start_file())
        return {
            "task": case.task.name,
            "state": case.variant.state,
            "gradients": case.variant.gradients,
            "seed": case.seed,
            "setting": self.settings[case.task.name],
            "curve": losses.curve,
            "loss": losses.last,
            "seconds": round(time.monotonic() - begin, 1),
        }

    def _steps(self, task: Task) -> int:
        return self._options.steps // task.part

    def _start_file(self) -> Path:
        return self._options.runs.with_suffix(".start.pt")


def arguments() -> argparse.Namespace:
    parser = contest.parser_of("formats", __doc__, steps=2000)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="make the runs of the first seeds only")
    options = contest.choose(parser, CASES, multiple=FINE_TUNING.part * contest.POINTS)
    options.cases = [case for case in options.cases if case.seed < options.seeds]
    return options


def train(options: argparse.Namespace) -> None:
    trainer = Trainer(options)
    finished = read(options.runs)
    contest.refuse_other_settings("formats", finished, lambda case: trainer.settings[case.task.name])
    for case in remaining(options.cases, finished, trainer.start() is not None):
        contest.record_run("formats", case.name, options, lambda case=case: trainer.train(case))


def main() -> None:
    options = arguments()
    if not options.table:
        train(options)
    finished = read(options.runs)
    for task in TASKS:
        results = results_of(task, finished)
        suite.emit(records(task, results))
        print(f"\n{task.name}\n\n{markdown(results)}", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--renew"]:
        page, recorded = map(Path, sys.argv[2:])
        page.write_text(with_tables(page.read_text(), read(recorded)))
    else:
        main()
