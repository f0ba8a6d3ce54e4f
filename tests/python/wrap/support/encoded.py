"""Trainings whose ranks send codes, for the tests of test_wire.py."""

from __future__ import annotations

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.loops import Loop, mean_square_in_bfloat16, mlp_in_bfloat16

IDLE = {"lr": 0.0, "weight_decay": 0.0}  # steps that change nothing


def loop_of(rank: int) -> Loop:
    training = {"make_model": mlp_in_bfloat16, "loss": mean_square_in_bfloat16, "optimizer_options": IDLE}
    return Loop(rank=rank, ranks=dist.get_world_size(), **training)


def first_of(model: torch.nn.Module) -> torch.Tensor:
    return next(iter(model.parameters())).detach().clone()


def parameters_seen(rank: int) -> list[torch.Tensor]:
    """Return the first parameter in a block of gather(), after close(), in a call, and as it was at the beginning."""
    given = first_of(mlp_in_bfloat16())
    run = loop_of(rank).run(stage=3, wire="int8")
    used: list[torch.Tensor] = []
    module = run.model[0]
    module.register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    with torch.no_grad():
        run.model(torch.ones(20, dtype=torch.bfloat16))
    with ballast.gather(run.model):
        inside = first_of(run.model)
    run.optimizer.close()
    return [inside, first_of(run.model), used[0], given]


def written_parameters(rank: int) -> list[torch.Tensor]:
    """Write to the first parameter, and return it after more steps, with what was written."""
    loop = loop_of(rank)
    run = loop.run(stage=3, wire="int8")
    with ballast.gather(run.model), torch.no_grad():
        next(iter(run.model.parameters())).mul_(3)
        written = first_of(run.model)
    loop.train(run.model, run.optimizer)
    with ballast.gather(run.model):
        kept = first_of(run.model)
    return [kept, written]


def bytes_sent(rank: int) -> list[float]:
    """Return the bytes that this rank sends in some steps, exactly and in codes."""
    by_wire = []
    for wire in ("exact", "int8"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).to(torch.bfloat16)
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, wire=wire)
        sent = 0.0
        for _ in range(10):
            model(torch.ones(512, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sent += optimizer.metrics()["sent_bytes/inside"] + optimizer.metrics()["sent_bytes/across"]
        by_wire.append(sent)
        optimizer.close()
    return by_wire


def refused_across(rank: int) -> str:
    model = mlp_in_bfloat16()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, wire={"reduce": "int8", "across": "int4"})
    try:
        mean_square_in_bfloat16(model, torch.ones(20)).backward()
        optimizer.step()
    except ballast.UsageError as refused:
        return str(refused)
    return "not refused"
