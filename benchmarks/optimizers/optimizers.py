"""Compare the losses of a GPT of 30 million parameters that Muon trains in plain torch, Muon in Ballast, and AdamW in Ballast.

Each run that ends is added to a file, and a run in the file is not repeated. The suite can be stopped at any time, and
continues the run that was stopped. A run of 1,000 steps with Muon takes hours of one core. All optimizers of a seed have the
same start, batches and learning rates. A line's value is a mean of the last losses of all seeds, their spread, or the largest
difference between curves; optimizers that lack a seed have no line.
"""

import argparse
import shlex
import sys
from pathlib import Path

import optimizer_table
import runs
import suite
from contenders import CASES, Case
from variants import POINTS


def train(options: argparse.Namespace) -> None:
    """Make the runs that the file lacks."""
    import optimizer_run
    import torch
    from texts import TEXTS
    from variants import TRAINING

    torch.set_num_threads(1)
    text = TEXTS[TRAINING.text]()
    setting = optimizer_run.setting(options.steps, text)
    finished = optimizer_table.read(options.runs)
    refuse_other_settings(finished, setting)
    of_run = {"setting": setting, "machine": suite.machine_name(), "commit": suite.commit()}
    for case in options.cases:
        if case in finished:
            continue
        print(f"optimizers: {case.name}", file=sys.stderr, flush=True)
        run = optimizer_run.training(case, text, options.steps)
        losses = run.train(options.runs.with_suffix("") / folder_of(case, options.steps))
        run.close()
        trained = {"curve": losses.curve, "loss": losses.last, **of_run}
        runs.append(options.runs, {**case._asdict(), **trained, "command": command_of(case, options.steps)})
        print(f"optimizers: loss {losses.last:.4f}", file=sys.stderr, flush=True)


def refuse_other_settings(finished: optimizer_table.Finished, setting: str) -> None:
    """End the program if the losses of a recorded run cannot be compared with those of the runs to make."""
    for case, row in finished.items():
        if row["setting"] != setting:
            reason = f"{case.name} has '{row['setting']}', not '{setting}'"
            sys.exit(f"optimizers: cannot add to the recorded runs: {reason}; use another file")


def folder_of(case: Case, steps: int) -> str:
    """Return the name of the folder with what a stopped run has trained."""
    return f"{case.optimizer.replace(' ', '-')}-seed-{case.seed}-{steps}-steps"


def command_of(case: Case, steps: int) -> str:
    """Return the command that repeats one run."""
    return shlex.join(["./run-benchmarks", "optimizers", "--", "--only", case.name, "--steps", str(steps)])


def arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="optimizers", description=__doc__, formatter_class=formatter)
    suite.add_choice(parser)
    of_runs = "the file of the finished runs (optimizers.jsonl in the build)"
    parser.add_argument("--runs", type=Path, required=True, help=of_runs)
    parser.add_argument("--steps", type=int, default=1000, help=f"of a run, a multiple of {POINTS}")
    parser.add_argument("--table", action="store_true", help="show the runs in the file, and train nothing")
    options = suite.choose(parser, CASES, lambda case: case.name)
    if options.steps < POINTS or options.steps % POINTS:
        parser.error(f"--steps must be a multiple of {POINTS}, not {options.steps}")
    return options


def main() -> None:
    options = arguments()
    if not options.table:
        train(options)
    finished = optimizer_table.read(options.runs)
    print(suite.lines(optimizer_table.records(finished)), end="", flush=True)
    print(f"\n{optimizer_table.markdown(finished)}", file=sys.stderr)


if __name__ == "__main__":
    main()
