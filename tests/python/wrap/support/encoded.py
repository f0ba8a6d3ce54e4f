"""Trainings whose ranks send codes, for the tests of test_wire.py."""

from __future__ import annotations

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, mean_square_in_bfloat16, mlp_in_bfloat16

Trained = tuple[list[float], list[torch.Tensor]]

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


def trained_with_interruptions(rank: int) -> list[Trained]:
    """Train in codes as usual, with gather() after each backward pass, and with offloads between steps."""
    loop = Loop(rank=rank, ranks=dist.get_world_size())
    trained = []
    for gathers, offloads in ((False, False), (True, False), (False, True)):
        model = mlp_in_bfloat16()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, wire="int8")
        losses = []
        for step in range(4):
            for micro in (0, 1):
                loss = mean_square_in_bfloat16(model, loop.batch(2 * step + micro))
                loss.backward()
                losses.append(loss.item())
                if gathers:
                    with ballast.gather(model):
                        assert first_of(model).isfinite().all()
            optimizer.step()
            optimizer.zero_grad()
            if offloads:
                optimizer.offload()
                optimizer.reload()
        optimizer.close()
        trained.append((losses, [parameter.detach().clone() for parameter in model.parameters()]))
    return trained


def resumed_with_another_wire(rank: int, directory: str) -> list[torch.Tensor]:
    """Return the first parameter of a run with codes, of the same run when it resumes without them, and as forward uses it."""
    options = {"stage": 3, "offload": f"nvme:{directory}", "run": "again"}
    loop = Loop(make_model=mlp_in_bfloat16, loss=mean_square_in_bfloat16, rank=rank, ranks=dist.get_world_size())
    run = loop.run(**options, wire="int8")
    with ballast.gather(run.model):
        kept = first_of(run.model)
    run.optimizer.close()
    model = mlp_in_bfloat16()
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options, wire={"reduce": "int4"})
    )
    with ballast.gather(model):
        resumed = first_of(model)
    used: list[torch.Tensor] = []
    model[0].register_forward_pre_hook(lambda module, _: used.append(module.weight.detach().clone()))
    mean_square_in_bfloat16(model, loop.batch(0)).backward()
    optimizer.step()
    optimizer.close()
    return [kept, resumed, used[0]]


def chosen_stage(rank: int) -> int | None:
    """Return the stage that "auto" becomes where gathers are encoded."""
    model = mlp_in_bfloat16()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage="auto", wire="int8")
    mean_square_in_bfloat16(model, torch.ones(20)).backward()
    optimizer.step()
    stage: int | None = optimizer._ballast.options.stage
    optimizer.close()
    return stage


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
