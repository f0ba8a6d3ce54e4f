"""Compare the losses of a GPT of 30 million parameters whose ranks send codes with those of exact exchanges.

Two ranks train at stage 3, each on half of the sequences of a step. Each run that ends is added to a file, and a run in the
file is not repeated. The suite can be stopped at any time, and continues the run that was stopped. Without bf16 arithmetic a
run takes many times as long. A line's value is a mean of the last losses of all seeds, or their spread; codes that lack a seed
have no line.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import contest_suite
import suite
from contest import Case
from wires import CONTEST

RANK = Path(__file__).with_name("code_rank.py")


def training() -> contest_suite.Training:
    import code_rank

    return contest_suite.Training(code_rank.setting, train_on_ranks)


def train_on_ranks(case: Case, steps: int, folder: Path):  # noqa: ANN201 (its type imports torch)
    from loss_training import Losses

    with tempfile.TemporaryDirectory(prefix="ballast-codes-") as result_folder:
        result = Path(result_folder) / "losses.json"
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        of_rank = [RANK, case.contender, case.seed, steps, folder, result]
        subprocess.run([*ranks, *map(str, of_rank)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        return Losses(**json.loads(result.read_text()))


def main() -> None:
    options = contest_suite.arguments(CONTEST, __doc__, steps=2000)
    if not options.table:
        contest_suite.make_runs(CONTEST, options, training())
    finished = CONTEST.read(options.runs)
    print(suite.lines(CONTEST.records(finished)), end="", flush=True)
    print(f"\n{CONTEST.markdown(finished)}", file=sys.stderr)


if __name__ == "__main__":
    main()
