"""Train one rank of an imitated host: rank.py CASE FOLDER. Prints a line of JSON with what it saw."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ballast
import torch
from python.wrap.support.loops import Loop, Tower, mean_square, mean_square_in_bfloat16, mlp_in_bfloat16

TIMEOUT = 6  # seconds that a rank waits for others
PATHS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "copies": {"stage": 3, "replicas": "host"},
    "int8": {"stage": 3, "wire": "int8"},
    "int8, int4 across": {"stage": 2, "wire": {"reduce": "int8", "across": "int4"}},
}


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().numpy().tobytes())
    return digest.hexdigest()


def equal_bits(rank: int, ranks: int) -> dict[str, Any]:
    """Train in each way, and return the losses and a digest of the parameters of each."""
    seen = {}
    for name, options in PATHS.items():
        coded = "wire" in options
        make_model, loss = (mlp_in_bfloat16, mean_square_in_bfloat16) if coded else (Tower, mean_square)
        run = Loop(make_model=make_model, loss=loss, steps=3, rank=rank, ranks=ranks).run(timeout=60, **options)
        run.optimizer.close()
        seen[name] = [run.losses, digest_of(run.model)]
    return seen


def until_a_fault(rank: int, ranks: int, steps: int, folder: Path) -> dict[str, Any]:
    """Train, and write each step down. Return the error that ended it and the seconds that it took, or else the seconds of the
    longest step."""
    model = Tower()
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, tuning=ballast.Tuning(timeout=TIMEOUT)
    )
    loop = Loop(make_model=Tower, rank=rank, ranks=ranks)
    began, longest = time.monotonic(), 0.0
    try:
        for step in range(steps):
            began = time.monotonic()
            loop.steps = step + 1
            loop.train(model, optimizer, step)
            (folder / f"rank{rank}-step{step}").touch()
            longest = max(longest, time.monotonic() - began)
        optimizer.close()
    except ballast.Error as error:
        return {"code": error.code, "error": str(error), "seconds": time.monotonic() - began}
    return {"digest": digest_of(model), "seconds": longest}


def slowest_of(rank: int, ranks: int) -> float:
    """Train where rank 1 needs longer than the others. Return which rank the metrics call the slowest."""
    loop = Loop(make_model=Tower, rank=rank, ranks=ranks, steps=12)
    if rank == 1:
        loop.loss = lambda model, batch: (time.sleep(0.03), mean_square(model, batch))[1]
    run = loop.run(stage=3, timeout=60)
    slowest = run.optimizer.metrics()["slowest_rank"]
    run.optimizer.close()
    return slowest


def by_name(rank: int, ranks: int) -> list[str]:
    """Train without torch's process group, and with one that has got its address from the environment, or as an argument.
    Return a digest of the parameters of each."""
    digests = []
    named = f"tcp://both:{int(os.environ['MASTER_PORT']) + 1}"
    for address in (None, "env://", named):
        if address is not None:
            torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
        run = Loop(make_model=Tower, rank=rank, ranks=ranks, steps=3).run(stage=3, timeout=20)
        assert run.optimizer.metrics()["sent_bytes/across"] > 0
        run.optimizer.close()
        digests.append(digest_of(run.model))
        if address is not None:
            torch.distributed.destroy_process_group()
        if address == "env://":
            del os.environ["MASTER_ADDR"]
    return digests


def main() -> None:
    case, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen: Any
    if case == "by name":
        seen = by_name(rank, ranks)
    elif case == "undisturbed":
        seen = {"bits": equal_bits(rank, ranks), "slowest": slowest_of(rank, ranks)}
    else:
        seen = until_a_fault(rank, ranks, int(case), folder)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
