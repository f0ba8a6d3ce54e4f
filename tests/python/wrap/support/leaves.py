"""A training that one rank leaves before its fourth step: leaves.py HOW STAGE LEAVER MOMENT. If MOMENT is `waiting`, the
others are about to wait for it when it leaves. If it is `later`, they continue after it has left. If HOW begins with
`global`, the module holds the optimizer in a variable, else only the function does.

leaves.py saving DIRECTORY: rank 0 fails after it has begun a save. Rank 1 writes its files only after it has been told."""

import gc
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import ballast
import torch

how = sys.argv[1].removeprefix("global ")
stage, leaver, moment = (int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]) if how != "saving" else (2, 0, "")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ready, left, done = (int(os.environ[f"PIPE_{name}"]) for name in ("ready", "left", "done"))
kept = []
torch.set_num_threads(1)


def begin():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
    tuning = ballast.Tuning(timeout=3600)
    return model, ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage, tuning=tuning)


def make_step(model, optimizer):
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def train():
    if "AS_OTHER_USER" in os.environ and rank == size - 1:
        os.setuid(65534)  # others can open this process's memory, but it cannot open theirs: Gloo is used
    model, optimizer = begin()
    if sys.argv[1].startswith("global"):
        kept.append(optimizer)
    for step in range(5):
        if step == 3 and rank == leaver and how != "all end":
            if moment == "waiting":
                for _ in range(size - 1):
                    os.read(ready, 1)
            if how == "limit":
                allow_no_threads()
            if how in ("delete", "limit"):
                del optimizer
                gc.collect()
            return LEAVE[how]()
        if step == 3 and rank != leaver:
            os.write(ready, b".")
            if moment == "later":
                os.read(left, 1)  # this also returns at the end of the leaver's process
        make_step(model, optimizer)


def fail_while_saving(directory):
    sys.path.append(str(Path(__file__).parents[3]))
    from python.wrap.support.saved import held_back

    model, optimizer = begin()
    make_step(model, optimizer)
    if rank == 0:
        ballast.save(directory, model, optimizer, wait=False)
        fail()
    with held_back() as may_write:
        ballast.save(directory, model, optimizer, wait=False)
        try:
            make_step(model, optimizer)
        finally:
            may_write.set()


def live_on():
    """Wait until the other ranks have ended."""
    os.write(left, b"." * (size - 1))
    os.read(done, 1)


def allow_no_threads():
    if os.geteuid() == 0:
        os.setuid(65534)  # root has no limit
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        threading.Thread(target=print).start()
    except RuntimeError:
        return
    raise AssertionError("a thread was started at the limit")


def fail():
    raise ValueError("this batch is bad")


def leave_a_child():
    """Exit and leave a child that outlives this rank, with the files that this rank has open."""
    if os.fork() == 0:
        os.close(left)
        os.read(done, 1)
        os._exit(0)
    os._exit(1)


LEAVE = {
    "raise": fail,
    "exit": lambda: sys.exit(1),
    "exit with text": lambda: sys.exit("no more batches"),
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "os._exit": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "fork": leave_a_child,
    "thread": fail,
    "end": lambda: None,
    "delete": live_on,
    "limit": live_on,
}

if how == "thread" and rank == leaver:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    live_on()
elif how == "saving":
    fail_while_saving(sys.argv[2])
else:
    train()
if how == "all end" and rank != leaver:
    os.read(left, 1)  # this returns when one rank has ended
