"""Measure how long a save in the background holds a training up, vs. torch.distributed.checkpoint.async_save().

The same processes train one GPT with Ballast in stage 3, and one with FSDP2. Both have 12 bytes of state for each parameter."""

import sys
import tempfile
from pathlib import Path

import suite

RANK = Path(__file__).with_name("rank.py")
OURS, THEIRS = "Ballast", "torch.distributed.checkpoint"
MEASURES = {  # the keys are the names in what a rank prints
    "call": "call of a save in the background",
    "step": "first step after that call",
    "total": "from that call until the checkpoint is complete",
    "waits": "save that waits",
    "plain step": "step without a save",
}
Seconds = dict[str, dict[str, list[float]]]  # the seconds of each round, by system and measure


def rows_of(seconds: Seconds) -> list[dict]:
    """Return a line for each measure; a ratio above 1 means that Ballast takes less time."""
    return [
        suite.versus(case, THEIRS, "ms", *(seconds[system][key] for system in (OURS, THEIRS)), value_of=lambda each: 1e3 * each)
        for key, case in MEASURES.items()
    ]


def main() -> None:
    options = suite.parser_of("saving", __doc__, directory="a directory on the drive for checkpoints", rounds=8).parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-saving-", dir=options.directory) as folder:
        command = [sys.executable, RANK, folder, str(options.rounds)]
        [found] = suite.run_ranks("saving", 2, lambda rank: command, Path(folder))
    suite.emit("saving", rows_of(found))


if __name__ == "__main__":
    main()
