"""A rank of a cell in Python, with one fault in one phase: rank.py TRANSPORT PHASE FAULT VICTIM FOLDER.

It trains four steps of a run, saves after the second and the third, and loads what it has saved first. It prints what it has
trained, and what the checkpoint holds that it has found."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import ballast
import torch

transport, phase, fault, victim, at = sys.argv[1:6]
timeout = 60 if fault == "none" else 3  # seconds
folder = Path(at)
rank = int(os.environ["RANK"])
planted = ctypes.CDLL(os.environ["PLANTED"])
waiting = {phase} if rank == int(victim) else set()
(folder / f"{rank}.pid").write_text(str(os.getpid()))


def plant(name: str) -> None:
    if not planted.ballast_plant(name.encode()):
        raise RuntimeError(f"cannot plant {name}")


def come_to(where: str) -> None:
    if where not in waiting or fault == "none":
        return
    waiting.discard(where)
    (folder / f"{rank}.planted").write_text(where)
    if fault == "exception":
        raise ValueError("planted")
    if fault == "sys.exit":
        sys.exit(3)
    plant(fault)


def watch(name: str) -> None:
    """From now on, this rank comes to a phase when it opens a file of the checkpoint."""
    opener = {"save": "RankFiles", "load": "parse_checkpoint"}[name]
    real = getattr(ballast._core, opener)

    def opens(*arguments: Any) -> Any:
        come_to(name)
        return real(*arguments)

    if name == phase and rank == int(victim):
        setattr(ballast._core, opener, opens)


class Layer(torch.nn.Linear):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        if optimizer.steps == 2:
            come_to("forward")
            batch.requires_grad_().register_hook(lambda gradient: come_to("backward"))
        return super().forward(batch)


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), Layer(30, 30), torch.nn.Linear(30, 5))


def digest(model: torch.nn.Module, optimizer: Any) -> str:
    """Return a checksum of the parameters, and of this rank's moments."""
    state = optimizer.state_dict()["state"]
    with ballast.gather(model):
        values = [parameter.detach().clone() for parameter in model.parameters()]
    values += [torch.as_tensor(value) for each in state.values() for value in each.values()]
    return hashlib.sha256(b"".join(bytes(each.reshape(-1).view(torch.uint8).tolist()) for each in values)).hexdigest()[:16]


def check_checkpoint(checkpoints: Path) -> None:
    """Print what an earlier job has saved."""
    global optimizer
    model = make_model()
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, tuning=ballast.Tuning(timeout=timeout)
    )
    ballast.load_checkpoint(checkpoints, model, optimizer)
    print(f"checkpoint of step {optimizer.steps} holds {digest(model, optimizer)}", file=sys.stderr)
    optimizer.close()


torch.set_num_threads(1)
plant("no ring")
if transport == "gloo":
    plant("no shared maps")
checkpoints = folder / "checkpoints"
come_to("start")
if (checkpoints / "checkpoint.json").exists():
    check_checkpoint(checkpoints)
model = make_model()
records = {"state": f"nvme:{folder / 'records'}", "parameters": f"nvme:{folder / 'records'}"}
wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = ballast.wrap(wrapped, model, stage=3, offload=records, run="cell", tuning=ballast.Tuning(timeout=timeout))
began_at = optimizer.steps
while optimizer.steps < 4:
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * optimizer.steps + rank), device="cpu")
    model(batch).square().mean().backward()
    is_faulty = optimizer.steps == 2
    if is_faulty:
        come_to("step")
    optimizer.step()
    if is_faulty:
        come_to("commit")
    optimizer.zero_grad()
    if optimizer.steps == 3:
        watch("save")
    if optimizer.steps in (2, 3):
        print(f"step {optimizer.steps} has {digest(model, optimizer)}", file=sys.stderr)
        ballast.save(checkpoints, model, optimizer)
    if optimizer.steps == 2:
        watch("load")
        ballast.load_checkpoint(checkpoints, model, optimizer)
if fault == "none":
    ballast.save(checkpoints, model, optimizer)  # removes what a save has left that could not
come_to("close")
ended = digest(model, optimizer)
optimizer.close()
print(f"began after step {began_at} and ended with {ended}", file=sys.stderr)
