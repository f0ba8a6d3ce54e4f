"""Compare the losses of a GPT of 30 million parameters whose ranks send codes with those of exact exchanges.

Two ranks train at stage 3, each on half of the sequences of a step. Each run that ends is added to a file, and a run in the
file is not repeated. The suite can be stopped at any time, and continues the run that was stopped. Without bf16 arithmetic a
run takes many times as long. A line's value is a mean of the last losses of all seeds, or their spread; codes that lack a seed
have no line.
"""

import sys
import tempfile
from pathlib import Path

import contest
import suite
from contest import Case, Contest

RANK = Path(__file__).with_name("loss_training.py")
EXACT = "exact"
WIRES = {  # what ranks send at stage 3
    EXACT: "exact",
    "all in int8": "int8",
    "gradients in int4, all else in int8": {"gather": "int8", "reduce": "int4"},
}
CONTEST = Contest("codes", "what ranks send", tuple(WIRES))


def train_on_ranks(case: Case, steps: int, folder: Path) -> contest.Losses:
    from loss_training import Losses

    command = [sys.executable, RANK, case.contender, str(case.seed), str(steps), folder]
    with tempfile.TemporaryDirectory(prefix="ballast-codes-") as logs:
        [losses] = suite.run_ranks(f"codes: {case.name}", 2, lambda rank: command, Path(logs))
    return Losses(**losses)


def main() -> None:
    options = contest.choose(contest.parser_of("codes", __doc__, steps=2000), CONTEST.cases)
    if not options.table:
        from loss_training import setting_of_codes  # needs torch, which --help and --table do without

        CONTEST.make_runs(options, setting_of_codes(options.steps), train_on_ranks)
    CONTEST.show(CONTEST.read(options.runs))


if __name__ == "__main__":
    main()
