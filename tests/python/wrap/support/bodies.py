"""The functions that ranks run in the tests. Other processes can find them by name."""

from __future__ import annotations

import copy
import os
import resource
import types
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from ballast.torch.training import autotune
from python.wrap.support.custom_optimizers import UserOptimizer, train_on_batches_of_all_ranks
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, Tower, mean_square, mlp
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

Trained = tuple[list[float], list[torch.Tensor]]


def loop_of(rank: int, **changes: Any) -> Loop:
    return Loop(rank=rank, ranks=dist.get_world_size(), **changes)


def in_every_configuration(rank: int, training: dict[str, Any], configurations: list[dict[str, Any]]) -> list[Trained]:
    """Train with torch's DistributedDataParallel first, then in each configuration."""
    loop = loop_of(rank, **training)
    model = torch.nn.parallel.DistributedDataParallel(loop.make_model())
    run = loop.train(model, loop.make_optimizer(model.parameters(), **loop.optimizer_options))
    trained = [(run.losses, run.parameters)]
    for options in configurations:
        run = loop.run(**options)
        with ballast.gather(run.model):
            trained.append((run.losses, run.parameters))
    return trained


def different_initial_values(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    model = torch.nn.Linear(20, 5)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    return before + [parameter.detach().clone() for parameter in model.parameters()]


class Routed(torch.nn.Module):
    """A model in which each rank uses an expert of its own, and no rank uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(20, 20)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(20, 5) for _ in range(3)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts[dist.get_rank() % 2](self.first(batch))
        return result


def routed(rank: int, configurations: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
    """Train with torch's DistributedDataParallel first, then in each configuration."""
    loop = loop_of(rank, make_model=Routed, micro_steps=2, optimizer_options={"lr": 1e-2, "weight_decay": 0.0})
    ddp = torch.nn.parallel.DistributedDataParallel(Routed(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, weight_decay=0.0)
    trained = [loop.train(ddp, optimizer).parameters]
    for options in configurations:
        run = loop.run(**options)
        with ballast.gather(run.model):
            trained.append(run.parameters)
    return trained


def one_rank_has_no_batch(rank: int) -> list[torch.Tensor]:
    model = mlp()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == 0:
        mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def saved_state(rank: int) -> tuple[dict[str, Any], list[float], list[float]]:
    """Return the state saved after three steps, the losses of three more, and those of another training that loads it."""
    loop = loop_of(rank, steps=3)
    run = loop.run(stage=2)
    saved = torch.nn.Module.state_dict(run.model), run.optimizer.state_dict()
    parts = {name: value.clone() for name, value in saved[0].items()}
    state = {
        key: {name: torch.clone(value) for name, value in values.items()} for key, values in saved[1]["state"].items()
    }
    longer = loop_of(rank, steps=6)
    on = longer.train(run.model, run.optimizer, 3).losses
    model = mlp(24)
    model.load_state_dict(parts)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    optimizer.load_state_dict({"state": state, "param_groups": saved[1]["param_groups"]})
    return state, on, longer.train(model, optimizer, 3).losses


def with_tensor_parallelism(rank: int, ranks_of_data: int) -> list[float]:
    """Train halves of a layer: each half is held by ranks with different data, in a process group of its own."""
    halves = dist.get_world_size() // ranks_of_data
    groups = [dist.new_group([half + halves * i for i in range(ranks_of_data)]) for half in range(halves)]
    half = rank % halves
    torch.manual_seed(half)
    weight = torch.nn.Parameter(torch.randn(5, 20))
    optimizer = ballast.wrap(torch.optim.SGD([weight], lr=0.1), mesh=DeviceMesh.from_group(groups[half], "cpu"))
    (weight.sum() * (1 + rank // halves)).backward()
    optimizer.step()
    return [optimizer.metrics()["grad_norm"], float(weight.sum())]


def different_models(rank: int) -> str:
    """Return the error that a rank gets when ranks train different parameters."""
    model = mlp() if rank == 0 else mlp(30)
    try:
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), tuning=ballast.Tuning(timeout=20))
        mean_square(model, torch.ones(20)).backward()
        optimizer.step()
    except ballast.Error as error:
        return str(error)
    return ""


def towers(
    rank: int,
    checkpointing: str,
    configurations: list[dict[str, Any]],
    micro_steps: int = 2,
    clip: float | None = 0.5,
    autocast: bool = False,
) -> list[Trained]:
    trained = []
    for options in configurations:
        loop = loop_of(
            rank, make_model=partial(Tower, checkpointing), micro_steps=micro_steps, clip=clip, autocast=autocast
        )
        run = loop.run(**options)
        with ballast.gather(run.model):
            trained.append((run.losses, run.parameters))
    return trained


def averaged(rank: int, configurations: list[dict[str, Any]]) -> list[Trained]:
    """Average the parameters over the steps, and evaluate each average. Without options the optimizer is torch's. Return the
    losses of training, and the average."""
    found = []
    for options in configurations:
        model = mlp()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = ballast.wrap(optimizer, model, **keywords(**options)) if options else optimizer
        gathered = partial(ballast.gather, model) if options else nullcontext
        with gathered():
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def update(model: torch.nn.Module, _: Any, average: Any = average, gathered: Any = gathered) -> None:
            with gathered():
                average.update_parameters(model)
            average(torch.ones(20)).sum().backward()

        run = loop_of(rank, steps=4, after_step=update).train(model, optimizer)
        found.append((run.losses, [each.detach() for each in average.parameters()]))
    return found


def changes_while_gathered(rank: int) -> tuple[list[float], list[float]]:
    """Write to trained and frozen parameters inside gather(), in stages 2 and 3. Return their means and the later losses."""
    losses, seen = [], [0.0]
    for stage in (2, 3):
        loop = loop_of(rank, make_model=Tower, steps=2)
        run = loop.run(stage=stage)
        with ballast.gather(run.model), torch.no_grad():
            run.model.blocks[3].down.weight.fill_(3.0)
            run.model.blocks[1].down.weight.fill_(0.5)
        longer = loop_of(rank, steps=4)
        losses.append(longer.train(run.model, run.optimizer, 2).losses)
        run = loop.run(stage=stage)
        with ballast.gather(run.model), torch.no_grad():
            run.model.blocks[3].down.weight.fill_(3.0)
            run.model.blocks[1].down.weight.fill_(0.5)
        with ballast.gather(run.model.blocks):
            seen = [float(run.model.blocks[block].down.weight.mean()) for block in (1, 3)]
    return seen, losses


def deletes_its_optimizer(rank: int, folder: str) -> tuple[int, int, str]:
    """Return how many files on the drive are open before and after, and the error of a gather() afterwards."""

    def open_files() -> int:
        entries = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        links = [os.readlink(entry) for entry in entries if os.path.lexists(entry)]  # the listing's own entry is gone
        return sum(link.startswith(folder) for link in links)

    run = loop_of(rank, make_model=Tower, steps=2).run(stage=3, offload=f"nvme:{folder}")
    before, model = open_files(), run.model
    del run
    try:
        with ballast.gather(model):
            pass
    except ballast.Error as error:
        return before, open_files(), str(error)
    return before, open_files(), ""


def custom_optimizers(
    rank: int, kind: Any, options: dict[str, Any], configurations: list[dict[str, Any]]
) -> tuple[Trained, list[Trained]]:
    """Return the run of one process with all ranks' batches, and the runs of this rank in each configuration."""
    loop = loop_of(rank, make_optimizer=kind, optimizer_options=options, micro_steps=2, clip=0.05)
    plain = train_on_batches_of_all_ranks(loop)
    runs = [loop.run(**configuration) for configuration in configurations]
    for run in runs:
        run.optimizer.close()
    return (plain.losses, plain.parameters), [(run.losses, run.parameters) for run in runs]


def saved_state_of_custom_optimizer(rank: int, stage: int) -> tuple[dict[str, Any], list[float], list[float]]:
    """Return this rank's state after three steps, the losses of three more, and those of another training that loads it."""
    loop = loop_of(rank, make_optimizer=torch.optim.RMSprop, steps=3)
    run = loop.run(stage=stage)
    saved = copy.deepcopy(run.optimizer.state_dict())
    with ballast.gather(run.model):
        parameters = {name: value.clone() for name, value in run.model.state_dict().items()}
    longer = loop_of(rank, steps=6)
    on = longer.train(run.model, run.optimizer, 3).losses
    model = mlp()
    model.load_state_dict(parameters)
    optimizer = ballast.wrap(torch.optim.RMSprop(model.parameters(), lr=1e-2), model, stage=stage)
    optimizer.load_state_dict(saved)
    return saved["state"], on, longer.train(model, optimizer, 3).losses


def own_step_of_changing_parameters(
    rank: int, stage: int | None, options: Mapping[str, Any] = types.MappingProxyType({})
) -> list[torch.Tensor]:
    """Train while parameters are added, freeze and thaw. Without a stage, one process trains on all ranks' batches."""
    body, head = mlp(), torch.nn.Linear(5, 3)
    torch.manual_seed(1)
    torch.nn.init.normal_(head.weight)
    torch.nn.init.zeros_(head.bias)
    model = torch.nn.Sequential(body, head)
    optimizer = torch.optim.NAdam(body.parameters(), lr=1e-2)
    loop = loop_of(rank)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, **keywords(stage=stage, **options))
    for step in range(9):
        if step == 3:
            optimizer.add_param_group({"params": head.parameters(), "lr": 3e-2})
        if step in (5, 7):
            body[0].requires_grad_(step == 7)
        ranks = [rank] if stage is not None else range(loop.ranks)
        for each in ranks:
            (mean_square(model, replace(loop, rank=each).batch(step)) / len(ranks)).backward()
        optimizer.step()
        model.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def own_step_fails(rank: int) -> list[str]:
    """Return the errors of two steps. The optimizer's own step fails on rank 1."""

    class Failing(UserOptimizer):
        def step(self, closure: Any = None) -> None:
            if rank == 1:
                raise ZeroDivisionError("no more batches")
            super().step()

    model = mlp()
    optimizer = ballast.wrap(Failing(model.parameters()), model, tuning=ballast.Tuning(elementwise=True, timeout=20))
    said = []
    for _ in range(2):
        try:
            mean_square(model, torch.ones(20)).backward()
            optimizer.step()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        optimizer.param_groups[0]["params"][0].shape  # a parameter can be read after the error
    return said


def inside_of_ddp(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """Return parameters trained inside DDP, those trained without it, and the error if wrap() is not given the DDP model."""
    loop = loop_of(rank, micro_steps=2)
    expected = loop.run(stage=2).parameters
    ddp = torch.nn.parallel.DistributedDataParallel(mlp())
    known = ballast.wrap(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
    ours = loop.train(ddp, known).parameters
    ddp = torch.nn.parallel.DistributedDataParallel(mlp())
    unknown = ballast.wrap(torch.optim.AdamW(ddp.parameters(), lr=1e-2))
    try:
        loop.train(ddp, unknown)
    except ballast.Error as error:
        return ours, expected, str(error)
    return ours, expected, ""


def loads_state_of_another_rank(rank: int) -> str:
    run = loop_of(rank, steps=2).run(stage=2)
    saved = run.optimizer.state_dict()
    run.optimizer.load_state_dict(saved)
    saved["ballast_part"]["rank"] = 1 - rank
    try:
        run.optimizer.load_state_dict(saved)
    except ballast.Error as error:
        return str(error)
    return ""


def warnings_of_state_dicts(rank: int, folder: str, stages: list[int]) -> list[tuple[list[str], list[str]]]:
    """Return the warnings at each stage: those of harmless calls, and those of two state_dict() calls."""
    answers = []
    for stage in stages:
        loop = loop_of(rank, steps=1)
        model = loop.make_model()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
        with warnings.catch_warnings(record=True) as harmless:
            warnings.simplefilter("always")
            optimizer.load_state_dict(optimizer.state_dict())  # empty, as when Accelerate prepares the optimizer
            loop.train(model, optimizer)
            ballast.save(f"{folder}/{stage}", model, optimizer)
            ballast.load_checkpoint(f"{folder}/{stage}", model, optimizer)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.state_dict()
            optimizer.state_dict()
        answers.append(([str(each.message) for each in harmless], [str(each.message) for each in told]))
        assert all(each.category is UserWarning and each.filename == __file__ for each in told)
    return answers


def exports(rank: int, path: str, stage: int) -> dict[str, torch.Tensor]:
    run = loop_of(rank, make_model=Tower, steps=2).run(stage=stage)
    ballast.export(run.model, path)
    with ballast.gather(run.model):
        return {name: value.clone() for name, value in run.model.state_dict().items() if name != "head.weight"}


def exports_to_a_full_drive(rank: int, path: str, stage: int) -> str:
    """Return the error of an export in which rank 0 cannot write."""
    run = loop_of(rank, make_model=Tower, steps=1).run(stage=stage)
    if rank == 0:
        Path(path).write_text("before")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        ballast.export(run.model, path)
    except ballast.Error as error:
        return str(error)
    return ""


def bytes_kept_by(optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes that the optimizer keeps in memory and on the drive."""
    metrics = optimizer.metrics()
    return int(metrics["memory_bytes/device"] + metrics["memory_bytes/host"]), int(metrics["memory_bytes/nvme"])


def chooses(rank: int, configurations: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return for each request the chosen plan, its bytes, the forecast and the results. "memory" may have a value per rank."""
    answers = []
    for configuration in configurations:
        memory = configuration.get("memory")
        options = {**configuration, "memory": memory[rank]} if isinstance(memory, tuple) else configuration
        run = loop_of(rank, make_model=partial(Tower, width=128), steps=3).run(**options)
        training = run.optimizer._ballast
        found = training.options
        kept, needs = bytes_kept_by(run.optimizer), forecast_of(training)
        with ballast.gather(run.model):
            answers.append(({"stage": found.stage, "offload": found.offload}, kept, needs, run.losses, run.parameters))
        run.optimizer.close()
    return answers


def forecast_of(training: Any) -> tuple[int, int]:
    """Return the bytes in memory and on the drive that the planner forecasts for a training."""
    needs = search_of(training).fastest.needs
    return needs["device"] + needs["host"], needs["nvme"]


def search_of(training: Any) -> autotune.Search:
    members, rule = training.partition().members, training.partitioner.rules()[0]
    request = autotune.PartitionRequest(training.group, rule, members, True, partial(training.partitioner.units, members))
    machine = autotune.budget_of_all_ranks(training.group, training.options, members)
    return autotune.Search(training.options, request, machine)


def begins_a_step_and_loads(rank: int, stage: int) -> tuple[list[float], list[torch.Tensor]]:
    """Load the state in the middle of a step, as after a bad batch whose gradients the model has cleared, and train. At the end
    close in the middle of a step."""
    loop = loop_of(rank, steps=2)
    run = loop.run(stage=stage)
    kept = copy.deepcopy(run.optimizer.state_dict())
    run.model(torch.full((20,), 9.0)).sum().backward()
    run.model.zero_grad()
    run.optimizer.load_state_dict(kept)
    again = replace(loop, steps=4).train(run.model, run.optimizer, first=2)
    run.model(torch.full((20,), 9.0)).sum().backward()
    run.optimizer.close()
    return run.losses + again.losses, run.parameters


def gradients_after_close(rank: int) -> list[torch.Tensor]:
    """Return the gradients of this rank's batch in DistributedDataParallel, after the optimizer that reduced them is closed."""
    ddp = torch.nn.parallel.DistributedDataParallel(mlp())
    optimizer = ballast.wrap(torch.optim.AdamW(ddp.parameters(), lr=1e-2), ddp)
    mean_square(ddp, torch.ones(20)).backward()
    optimizer.step()
    optimizer.close()
    mean_square(ddp, torch.full((20,), float(rank))).backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]
