"""A training that a launcher starts: launched.py [--drive DIRECTORY] [--die STEP]. Says what it ended with."""

import argparse
import hashlib
import os
import signal

import torch
from python.wrap.loops import Tower, mean_square

import ballast

parser = argparse.ArgumentParser()
parser.add_argument("--drive")
parser.add_argument("--die", type=int, help="rank 1 is killed in the middle of this step")
parser.add_argument("--with-torch", action="store_true", help="torch.distributed is there too")
options = parser.parse_args()

torch.set_num_threads(1)
if options.with_torch:
    torch.distributed.init_process_group("gloo")
model = Tower()
plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept = {"offload": {kind: f"nvme:{options.drive}" for kind in ("parameters", "state")}, "run": "mine"}
optimizer = ballast.wrap(plain, model, stage=3, timeout=60, **(kept if options.drive else {}))
rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
for step in range(optimizer.steps, 6):
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    mean_square(model, batch).backward()
    if rank == 1 and step == options.die:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
digest = hashlib.sha256()
with ballast.gather(model):
    for parameter in model.parameters():
        digest.update(str(parameter.tolist()).encode())
print(f"rank {rank} ended after step {optimizer.steps} with {digest.hexdigest()}", flush=True)
