"""A training whose rank 0 fails after it has begun a save: fails_while_saving.py DIRECTORY. Rank 1 writes its files only after
it has been told."""

import os
import sys
from pathlib import Path

import ballast
import torch

sys.path.append(str(Path(__file__).parents[3]))
from python.wrap.support.jobs import held_back  # noqa: E402

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=2, tuning=ballast.Tuning(timeout=3600))


def step():
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


step()
if rank == 0:
    ballast.save(sys.argv[1], model, optimizer, wait=False)
    raise ValueError("this batch is bad")
with held_back() as may_write:
    ballast.save(sys.argv[1], model, optimizer, wait=False)
    try:
        step()
    finally:
        may_write.set()
