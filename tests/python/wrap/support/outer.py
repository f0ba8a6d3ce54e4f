"""Trainings on imitated hosts with an outer optimizer."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from ballast import _core
from ballast.outer import hosts as hosts_module
from ballast.outer.fragments import fragment_elements
from ballast.outer.hosts import HostGroup
from ballast.outer.optimizer import Fragment
from ballast.torch.parameters.units import model_of
from ballast.torch.updates.sharded_state import ShardedState
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, Run, mean_square, mean_square_in_bfloat16, mlp

Trained = tuple[list[float], list[torch.Tensor]]
Changes = dict[str, Any]  # changes of the loop


def loop_of(rank: int, **changes: Any) -> Loop:
    return Loop(rank=rank, ranks=dist.get_world_size(), **changes)


def train(rank: int, configurations: list[dict[str, Any]], changes: Changes | None = None) -> list[Trained]:
    """Train in each configuration of wrap(), and return the losses and the final parameters."""
    trained = []
    for options in configurations:
        run = loop_of(rank, **(changes or {})).run(**options)
        trained.append(result_of(run))
        run.optimizer.close()
    return trained


def result_of(run: Run) -> Trained:
    with ballast.gather(run.model):
        return run.losses, run.parameters


def from_other_values(rank: int, configurations: list[dict[str, Any]], recorded: bool) -> list[list[torch.Tensor]]:
    """Train two steps from values that differ on all ranks."""

    def make_model() -> torch.nn.Module:
        torch.manual_seed(rank)
        return torch.nn.Sequential(torch.nn.Linear(20, 96), torch.nn.Tanh(), torch.nn.Linear(96, 5))  # one is recorded

    def make_recorded() -> torch.nn.Module:
        with ballast.deferred():
            return make_model()

    loop = loop_of(rank, steps=2, make_model=make_recorded if recorded else make_model)
    return [result_of(loop.run(**options))[1] for options in configurations]


def with_another_default_format(rank: int, folder: str, options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Return the parameters at the end, and those of a training that was resumed, where new tensors are bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    changes: Changes = {"loss": mean_square_in_bfloat16}
    kept = train_and_save(rank, folder, options, 3, 6, changes)
    [resumed] = resume(rank, folder, [options], 3, 6, changes)
    return [kept[1], resumed[1]]


def reports(rank: int, options: dict[str, Any]) -> tuple[str, dict[str, float]]:
    run = loop_of(rank).run(**options)
    return run.optimizer.memory(), run.optimizer.metrics()


def elements_of_fragments(rank: int, configurations: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Return the elements of each fragment as the planner counts them, and as they are on this rank."""
    found, outer = [], ballast.DiLoCo(every=4, hosts=2, fragments=2)
    for options in configurations:
        run = loop_of(rank, steps=1).run(**options, outer=outer)
        training, ranks = run.optimizer._ballast, run.optimizer._ballast.group
        units = training.partitioner.units(training.current.members, options["stage"])
        question = _core.Question(model_of(units), _core.Machine())
        question.ranks = ranks.size
        placement = _core.placement_of_stage(options["stage"], ranks.size)
        expected = fragment_elements(question, placement, outer, ranks.rank)
        found.append((expected, [fragment.elements for fragment in run.optimizer._ballast.outer.fragments]))
        run.optimizer.close()
    return found


def exchanged(rank: int, folder: str, options: dict[str, Any]) -> tuple[list[list[torch.Tensor]], list[float]]:
    """Return the parameters before exchange(), after it, after a second one, and after one that follows a checkpoint; and the
    numbers of exchanges at these points."""
    run, parameters, exchanges = loop_of(rank).run(**options), [], []

    def note(run: Run) -> None:
        parameters.append(result_of(run)[1])
        exchanges.append(run.optimizer._ballast.outer.figures()["outer/exchanges"])

    note(run)
    for _ in range(2):
        run.optimizer.exchange()
        note(run)
    ballast.save(folder, run.model, run.optimizer)
    resumed = loop_of(rank, steps=0).run(**options)
    ballast.load_checkpoint(folder, resumed.model, resumed.optimizer)
    resumed.optimizer.exchange()
    note(resumed)
    return parameters, exchanges


def with_scheduler(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    loop = loop_of(rank, micro_steps=2)
    model = loop.make_model()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return result_of(replace(loop, after_step=lambda *_: scheduler.step()).train(model, optimizer))[1]


def error_of(rank: int, options_of: dict[int, dict[str, Any]]) -> str:
    """Return the error that a rank gets with its options."""
    try:
        loop_of(rank, steps=4).run(timeout=20, **options_of.get(rank, options_of[0]))
    except (ballast.Error, TypeError) as error:
        return str(error)
    return ""


def thaws(rank: int, options: dict[str, Any]) -> str:
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))
    mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].bias.requires_grad_(False)
    try:
        mean_square(model, torch.ones(20)).backward()
    except ballast.Error as error:
        return str(error)
    return ""


def with_codes(
    rank: int, folder: str, configurations: list[dict[str, Any]], exact: dict[str, Any], changes: Changes
) -> list[list[torch.Tensor]]:
    """Return the parameters after two exchanges: without codes, in each configuration, and of a training that is resumed after
    the first exchange and another step."""
    trained = [parameters for _, parameters in train(rank, [exact, *configurations], {**changes, "steps": 8})]
    loop = loop_of(rank, steps=5, **changes)
    run = loop.run(**configurations[0])
    ballast.save(folder, run.model, run.optimizer)
    run.optimizer.close()
    [(_, resumed)] = resume(rank, folder, [configurations[-1]], 5, 8, changes)
    return [*trained, resumed]


def exchange_after_the_neighbour(rank: int, folder: str, options: dict[str, Any]) -> bool:
    """Train two steps, of which the second ends with an exchange. The second rank of each host is late for it. Return whether
    that had the averages when this rank began to change its parameters, which ranks of a host do together."""
    average, write, had = HostGroup.average, Fragment.write, []

    def average_late(group: HostGroup, values: torch.Tensor, **of_exchange: int) -> torch.Tensor:
        time.sleep(0.5 if group.own.rank == 1 else 0)
        averages = average(group, values, **of_exchange)
        Path(folder, f"rank-{rank}").touch()
        return averages

    def write_noting(fragment: Fragment, training: ShardedState, values: torch.Tensor) -> None:
        had.append(Path(folder, f"rank-{rank | 1}").exists())
        write(fragment, training, values)

    HostGroup.average, Fragment.write = average_late, write_noting  # type: ignore[method-assign]
    loop_of(rank, steps=2).run(**options)
    return had == [True]


# --- Checkpoints ---


def train_and_save(
    rank: int, folder: str, options: dict[str, Any], steps: int, until: int, changes: Changes | None = None
) -> Trained:
    """Save after some steps, and return what the training has at the end."""
    loop = loop_of(rank, steps=steps, **(changes or {}))
    run = loop.run(**options)
    ballast.save(folder, run.model, run.optimizer, extra={"rank": rank})
    return result_of(replace(loop, steps=until).train(run.model, run.optimizer, steps))


def train_and_save_twice(rank: int, folders: list[str], options: dict[str, Any]) -> list[torch.Tensor]:
    """Train three steps, save to the first folder, train two more, and save to the second one. Return the parameters."""
    loop = loop_of(rank, steps=3)
    run = loop.run(**options)
    ballast.save(folders[0], run.model, run.optimizer)
    run = replace(loop, steps=5).train(run.model, run.optimizer, 3)
    ballast.save(folders[1], run.model, run.optimizer)
    return result_of(run)[1]


def refused_folder(rank: int, folder: str, options: dict[str, Any]) -> str:
    """Return the error of loading a checkpoint."""
    loaded = loop_of(rank, steps=0).run(**options)
    try:
        ballast.load_checkpoint(folder, loaded.model, loaded.optimizer)
    except ballast.UsageError as error:
        return str(error)
    return ""


def resume(
    rank: int, folder: str, configurations: list[dict[str, Any]], steps: int, until: int, changes: Changes | None = None
) -> list[Trained]:
    trained = []
    for options in configurations:
        loop = loop_of(rank, steps=until, **(changes or {}))
        model = loop.make_model()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1.0), model, **keywords(**options))
        ballast.load_checkpoint(folder, model, optimizer)
        trained.append(result_of(loop.train(model, optimizer, steps)))
        optimizer.close()
    return trained


def resume_after_a_skipped_step(rank: int, folder: str, options: dict[str, Any]) -> list[tuple[str, list[torch.Tensor]]]:
    """Train on two hosts, of which the second skips a step. Return the parameters at the end, of the training itself, and of
    those that resume it from a shared directory and from directories of their own; and the error of hosts that have loaded
    different states."""
    calls = [0]

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return mean_square(model, batch) * (torch.inf if calls[0] == 3 and rank == 1 else 1.0)

    run = loop_of(rank, steps=5, loss=loss).run(**options)
    assert run.optimizer.metrics()["skipped_steps"] == rank
    own = f"{folder}/own-{rank}"
    for directory in (f"{folder}/shared", own):
        ballast.save(directory, run.model, run.optimizer)
    parameters = [("", result_of(loop_of(rank, steps=10).train(run.model, run.optimizer, 5))[1])]
    run.optimizer.close()
    parameters += [("", resume(rank, directory, [options], 5, 10)[0][1]) for directory in (f"{folder}/shared", own)]
    return [*parameters, (resume_from_another_state(rank, own, options), [])]


def resume_from_another_state(rank: int, folder: str, options: dict[str, Any]) -> str:
    """Resume on hosts of which the second has another momentum. Return the error."""
    loaded = loop_of(rank, steps=0).run(**options)
    ballast.load_checkpoint(folder, loaded.model, loaded.optimizer)
    if rank == 1:
        state = loaded.optimizer._ballast.outer.fragments[0].state
        values, momentum = torch.empty(state.count), torch.empty(state.count)
        state.read(values, momentum)
        state.write(values, momentum + 1)
    try:
        loop_of(rank, steps=6).train(loaded.model, loaded.optimizer, 5)
    except ballast.UsageError as error:
        return str(error)
    return ""


def save_next_to_others(rank: int, folder: str, options: dict[str, Any]) -> list[str]:
    """Save where there is a folder of a host that does not take part. Return the folders afterwards."""
    run = loop_of(rank, steps=1).run(**options)
    ballast.save(folder, run.model, run.optimizer)
    dist.barrier()
    if rank == 0:
        shutil.copytree(f"{folder}/host-0", f"{folder}/host-5")
    dist.barrier()
    ballast.save(folder, run.model, run.optimizer)
    dist.barrier()
    return sorted(os.listdir(folder))


def resume_on_one_host(rank: int, folder: str, options: dict[str, Any]) -> int:
    """Load the checkpoint of one host without an outer optimizer."""
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1.0), model, **keywords(**options))
    ballast.load_checkpoint(folder, model, optimizer)
    steps: int = optimizer.steps
    loop_of(rank, steps=steps + 1).train(model, optimizer, steps)
    return int(optimizer.steps)


# --- Lost hosts ---

Lines = list[str]


class Heard(logging.Handler):
    """Keeps the lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: Lines = []
        logging.getLogger("ballast").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose_between_steps(
    rank: int, lost: int, step: int, options: dict[str, Any], folder: str = ""
) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies after a step. With a folder, the others train two more steps and save."""
    heard, ended = Heard(), [0]

    def after_step(*_: Any) -> None:
        ended[0] += 1
        if rank == lost and ended[0] == step:
            die()

    loop = loop_of(rank, steps=8, after_step=after_step)
    run = loop.run(**options)
    if folder:
        run = replace(loop, steps=10).train(run.model, run.optimizer, 8)
        ballast.save(folder, run.model, run.optimizer)
    return result_of(run), heard.lines


def lose_one_while_another_is_late(rank: int, lost: int, late: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies after the fifth, and another host comes to the next exchange when it has been waited
    for longer than for hosts that have failed."""
    hosts_module.GRACE = 0.2
    heard, ended = Heard(), [0]

    def after_step(*_: Any) -> None:
        ended[0] += 1
        if rank == lost and ended[0] == 5:
            die()
        if rank // 2 == late and ended[0] == 7:
            time.sleep(1.5)

    run = loop_of(rank, steps=8, after_step=after_step).run(**options)
    return result_of(run), heard.lines


def lose_and_fail(rank: int, lost: int, options: dict[str, Any]) -> str:
    try:
        lose_between_steps(rank, lost, 5, options)
    except ballast.FailureError as error:
        return str(error)
    return ""


def lose_in_exchange(rank: int, lost: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies when the first chunk of the second exchange is summed."""
    heard, average, exchanges = Heard(), HostGroup.average, [0]
    hosts_module.CHUNK = 64

    def average_and_die(group: HostGroup, values: torch.Tensor, **of_exchange: int) -> torch.Tensor:
        exchanges[0] += 1
        if rank == lost and exchanges[0] == 2:
            group._sum(values[:64], of_exchange["step"], number=0)
            die()
        return average(group, values, **of_exchange)

    HostGroup.average = average_and_die  # type: ignore[method-assign]
    run = loop_of(rank, steps=8).run(**options)
    return result_of(run), heard.lines


def lose_at_the_end_of_an_exchange(rank: int, lost: int, misses: int, options: dict[str, Any]) -> tuple[Trained, Lines]:
    """Train eight steps. One rank dies when the first exchange is complete, and another one loses it before it knows so."""
    heard, average, exchanges = Heard(), HostGroup.average, [0]

    def average_and_fail(group: HostGroup, values: torch.Tensor, **of_exchange: int) -> torch.Tensor:
        exchanges[0] += 1
        averages = average(group, values, **of_exchange)
        if exchanges[0] == 1 and rank == lost:
            die()
        if exchanges[0] == 1 and rank == misses:
            while not group.group._core.failed_ranks:
                time.sleep(0.01)
            group.group._core.all_reduce([1])  # raises the error
        return averages

    HostGroup.average = average_and_fail  # type: ignore[method-assign]
    run = loop_of(rank, steps=8).run(**options)
    return result_of(run), heard.lines
