"""Compare the losses of a GPT of 30 million parameters that Muon trains in plain torch, Muon in Ballast, and AdamW in Ballast.

Each run that ends is added to a file, and a run in the file is not repeated. The suite can be stopped at any time, and
continues the run that was stopped. A run of 1,000 steps with Muon takes hours of one core. All optimizers of a seed have the
same start, batches and learning rates. A line's value is a mean of the last losses of all seeds, their spread, or the largest
difference between curves; optimizers that lack a seed have no line.
"""

import sys

import contest_suite
import curves
import suite
from contenders import CONTEST


def training() -> contest_suite.Training:
    import optimizer_run

    return contest_suite.Training(optimizer_run.setting, optimizer_run.train)


def main() -> None:
    options = contest_suite.arguments(CONTEST, __doc__, steps=1000)
    if not options.table:
        contest_suite.make_runs(CONTEST, options, training())
    finished = CONTEST.read(options.runs)
    print(suite.lines(CONTEST.records(finished) + curves.records(finished)), end="", flush=True)
    print(f"\n{CONTEST.markdown(finished)}\n{curves.sentence(finished)}", file=sys.stderr)


if __name__ == "__main__":
    main()
