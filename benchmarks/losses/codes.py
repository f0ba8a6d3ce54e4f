"""Compare the losses of a GPT of 30 million parameters whose ranks send codes with those of exact exchanges.

Two ranks train at stage 3, each on half of the sequences of a step.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import contest
import suite
from contest import TRAINING, Case, Contest

EXACT = "exact"
WIRES = {  # what ranks send at stage 3
    EXACT: "exact",
    "all in int8": "int8",
    "gradients in int4, all else in int8": {"gather": "int8", "reduce": "int4"},
}
CONTEST = Contest("codes", "what ranks send", tuple(WIRES), ("AdamW in bf16", "one on each of two ranks"))


def train_on_ranks(case: Case, steps: int, _: Path) -> contest.Losses:
    command = [sys.executable, __file__, "--rank", case.contender, str(case.seed), str(steps)]
    with tempfile.TemporaryDirectory(prefix="ballast-codes-") as logs:
        [losses] = suite.run_ranks(f"codes: {case.name}", 2, lambda rank: command, Path(logs))
    return contest.Losses(**losses)


def training_of(codes: str, seed: int, steps: int) -> Any:
    """Return the training of one of several ranks."""
    from loss_training import Plan, Training

    return Training.in_bf16(Plan(TRAINING, seed, steps), stage=3, wire=WIRES[codes])


def train_rank(codes: str, seed: str, steps: str) -> None:
    """Train in this process. Rank 0 prints the losses, in JSON."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    losses = training_of(codes, int(seed), int(steps)).to_the_end()
    if dist.get_rank() == 0:
        print(json.dumps(losses._asdict()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train_rank(*sys.argv[2:])
    else:
        contest.Suite([CONTEST], __doc__, steps=2000, train=train_on_ranks).main()
