"""Forks ranks that end as programs do: unlike processes of multiprocessing, they pass through the interpreter's finalization
after an exception, sys.exit() or a normal end. torch and Ballast are imported only once.

Each line of its input is a job: {"script", "arguments", "ranks", "environment", "leaver", "folder"}. The answer is a line with
the exit status of each rank. Rank N writes its output to the files N.out and N.err of the folder."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import sys
from typing import Any


def rank_to_run() -> dict[str, Any] | None:
    """Serve jobs. Return in each process that is a rank, with its job, and in this one when there are no more jobs."""
    gc.freeze()  # ranks do not collect the imported objects when they end
    for line in sys.stdin:
        job = json.loads(line)
        pipes = {name: os.pipe() for name in ("ready", "left", "done")}
        children = []
        for rank in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                become(rank, job, pipes)
                return job
            children.append(child)
        for ends in pipes.values():
            close(*ends)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    return None


def become(rank: int, job: dict[str, Any], pipes: dict[str, tuple[int, int]]) -> None:
    """Turn this process into a rank. The leaver reads `ready` and `done`, and writes `left`. The others do the opposite."""
    leaves = rank == job["leaver"]
    kept = {name: ends[leaves == (name == "left")] for name, ends in pipes.items()}
    for name, ends in pipes.items():
        close(ends[kept[name] == ends[0]])
    folder = job["folder"]
    for target, name in ((1, f"{rank}.out"), (2, f"{rank}.err")):
        opened = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, target)
        os.close(opened)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(job["environment"], RANK=str(rank), **{f"PIPE_{name}": str(end) for name, end in kept.items()})
    sys.argv = [job["script"], *job["arguments"]]


def close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background
    import ballast.torch.optimizer  # noqa: F401
    import torch._dynamo  # noqa: F401  seconds, once

    if job := rank_to_run():
        runpy.run_path(job["script"], run_name="__main__")
