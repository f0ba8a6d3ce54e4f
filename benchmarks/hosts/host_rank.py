"""Train one rank of an imitated host: host_rank.py CASE DIRECTORY TEXT. Its first rank counts what the link of a host sent."""

import os
import sys
from pathlib import Path

import network
import rank
from trainings import CASES


def main() -> None:
    name, directory, text = sys.argv[1:]
    case = next(each for each in CASES if each.name == name)
    is_first = os.environ["LOCAL_RANK"] == "0"
    count = lambda: {"sent_bytes": network.sent_bytes()} if is_first else {}
    rank.train(case.system, case.workload, Path(directory), Path(text), count)


if __name__ == "__main__":
    main()
