"""A training for the soak: training.py FOLDER. It saves a checkpoint every few steps, and ends when FOLDER/end exists.

The batches are such that the number of ranks changes no bit: see Soaked.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ballast
import torch
from soak.faults import TIMEOUT

SAVES_EVERY = 20  # steps
PAUSE = 0.02  # seconds a step, so that an hour of steps can be repeated in minutes
SAMPLES = 12  # samples of a step, which one, two and three ranks share evenly


class Soaked(torch.nn.Module):
    """A model whose gradients have the same bits on one, two or three ranks.

    In the layers every rank has the same batch, so it has the same gradient in bf16. A few of these have an exact sum in fp32.
    `tilt` gets other integers on each rank, whose sums are exact too: a rank whose gradient is lost or counted twice shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 20))
        self.tilt = torch.nn.Linear(32, 1, bias=False)

    def forward(self, step: int, rank: int, ranks: int) -> torch.Tensor:
        seed = torch.Generator().manual_seed(step)
        batch = torch.randn(8, 20, generator=seed, device="cpu").bfloat16()
        samples = torch.randint(-2, 3, (SAMPLES, 32), generator=seed, device="cpu")[rank::ranks]
        return self.layers(batch).float().square().mean() + ranks * self.tilt(samples.sum(dim=0).bfloat16()).float().sum()


def soaked(**options: Any) -> tuple[Soaked, Any]:
    model = Soaked().bfloat16()
    return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3), model, **options)


def train_step(model: Soaked, optimizer: Any, rank: int = 0, ranks: int = 1) -> None:
    model(optimizer.steps, rank, ranks).backward()
    optimizer.step()
    optimizer.zero_grad()


def obey(order: Path) -> None:
    """Do what the soak has ordered this rank to do."""
    if not order.exists():
        return
    words = order.read_text()
    order.unlink()
    if words == "exit":
        sys.exit(3)
    raise ValueError("planted by the soak")


def train(folder: Path) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / "pids" / str(rank)).write_text(str(os.getpid()))
    told_to_end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    torch.set_num_threads(1)
    records = {"state": f"nvme:{folder / 'records'}", "parameters": f"nvme:{folder / 'records'}"}
    model, optimizer = soaked(stage=3, offload=records, run="soak", tuning=ballast.Tuning(timeout=TIMEOUT))
    checkpoints = folder / "checkpoints"
    if optimizer.steps == 0 and (checkpoints / "checkpoint.json").exists():
        ballast.load_checkpoint(checkpoints, model, optimizer)  # the records were lost
    is_over = False
    while not is_over:
        obey(folder / f"order-{rank}")
        train_step(model, optimizer, rank, ranks)
        is_over = optimizer.on_any_rank((folder / "end").exists())
        if is_over or optimizer.steps % SAVES_EVERY == 0:
            ballast.save(checkpoints, model, optimizer)
        if rank == 0:
            (folder / "progress.new").write_text(f"{optimizer.steps} {os.getpid()} {ranks}")
            (folder / "progress.new").rename(folder / "progress")
        if optimizer.on_any_rank(told_to_end.is_set()):
            break
        time.sleep(PAUSE)
    optimizer.close()
    if is_over and rank == 0:
        (folder / "done").write_text(str(optimizer.steps))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
