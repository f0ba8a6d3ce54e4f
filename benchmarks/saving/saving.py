"""Measure how long a save in the background holds a training up, vs. torch.distributed.checkpoint.async_save().

Two ranks train one GPT with Ballast in stage 3, and one with FSDP2, in the same processes. Both have 12 bytes of state for each
parameter, in fp32. They save in turn, round after round. Times are those of the slowest rank."""

import argparse
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


def trained(ranks: int, directory: Path, rounds: int, width: int) -> Seconds:
    with tempfile.TemporaryDirectory(prefix="ballast-saving-", dir=directory) as folder:
        command = [sys.executable, RANK, folder, str(rounds), str(width)]
        [found] = suite.run_ranks("saving", ranks, lambda rank: command, Path(folder))
        return found


def rows_of(seconds: Seconds) -> list[dict]:
    """Return a line for each measure; a ratio above 1 means that Ballast takes less time."""
    return [
        {
            **{"suite": "saving", "case": case, "unit": "ms", "against": THEIRS},
            **suite.comparison(seconds[OURS][measure], seconds[THEIRS][measure], lambda seconds: 1e3 * seconds),
        }
        for measure, case in MEASURES.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="saving", description=__doc__.split("\n")[0])
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="a directory on the drive for checkpoints (here)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8, help="saves of each system, after one to warm up (%(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the model of 8 blocks (%(default)s: 25M parameters)")
    options = parser.parse_args()
    suite.emit(rows_of(trained(options.ranks, options.directory, options.rounds, options.width)))


if __name__ == "__main__":
    main()
