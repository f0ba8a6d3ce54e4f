"""A training for launchers, which prints a digest of its parameters: launched.py [--drive DIRECTORY] [--die STEP]
[--stop STEP] [--wait STEP] [--lose STEP]."""

import argparse
import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import ballast
import torch
from python.wrap.support.loops import Tower, keywords, mean_square

parser = argparse.ArgumentParser()
parser.add_argument("--drive")
parser.add_argument("--die", type=int, help="rank 1 is killed in the middle of this step")
parser.add_argument("--stop", type=int, help="rank 1 is told to end in the middle of this step")
parser.add_argument("--wait", type=int, help="rank 1 waits in the middle of this step until it is told to end")
parser.add_argument("--lose", type=int, help="the agent of torchrun with one rank is lost with it in the middle of this step")
parser.add_argument("--with-torch", action="store_true", help="torch.distributed is there too")
parser.add_argument("--second", action="store_true", help="another optimizer was wrapped before")
options = parser.parse_args()


def lose_this_host(drive: str) -> None:
    Path(drive, "lost").touch()
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


torch.set_num_threads(1)
if options.lose is not None and os.environ["WORLD_SIZE"] == "2" and not Path(options.drive, "lost").exists():
    time.sleep(100)  # the other agent comes meanwhile, and torchrun starts all ranks again
if options.with_torch:
    torch.distributed.init_process_group("gloo")
if options.second:
    other = Tower()
    first = ballast.wrap(torch.optim.SGD(other.parameters(), lr=1e-2), other)
model = Tower()
plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept = {"offload": {kind: f"nvme:{options.drive}" for kind in ("parameters", "state")}, "run": "mine"}
optimizer = ballast.wrap(plain, model, **keywords(stage=3, timeout=60, **(kept if options.drive else {})))
began_at = optimizer.steps
names = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
rank = next((int(os.environ[name]) for name in names if name in os.environ), 0)
told_to_end = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
for step in range(optimizer.steps, 6):
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank))
    mean_square(model, batch).backward()
    if rank == 1 and step in (options.die, options.stop):
        os.kill(os.getpid(), signal.SIGKILL if step == options.die else signal.SIGTERM)
    if rank == 1 and step == options.wait:
        Path(options.drive, "waits").touch()
        told_to_end.wait()
    if step == options.lose and os.environ["LOCAL_WORLD_SIZE"] == "1":
        lose_this_host(options.drive)
    optimizer.step()
    optimizer.zero_grad()
    if optimizer.on_any_rank(told_to_end.is_set()):
        break
steps = optimizer.steps
optimizer.close()  # waits until the last step is on the drive, and restores the full parameters
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(str(parameter.tolist()).encode())
print(f"rank {rank} began after step {began_at} and ended after step {steps} with {digest.hexdigest()}", flush=True)
