"""Tests of runs that other ranks continue, another stage or format: they have the bits of a checkpoint that was loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.damage import content_of, sealed
from python.wrap.support.custom_optimizers import check_same_state, state_of
from python.wrap.support.kept_runs import Layers, Stoppable, kept_in, losses_until, train
from python.wrap.support.loops import keywords, mean_square
from python.wrap.support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh

Seen = tuple[int, list[dict[str, Any]], list[float]]  # the first step, the state of this rank, the losses from there on


class Wrapped:
    """A training with or without a run."""

    def __init__(self, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, dtype=torch.float32, **options: Any):
        self.model = Layers().to(dtype)
        self.optimizer = ballast.wrap(kind(self.model.parameters(), lr=1e-2), self.model, **keywords(**options))

    def train(self, steps: int, rank: int = 0) -> list[float]:
        losses = []
        for _ in range(steps):
            seed = torch.Generator().manual_seed(10 * self.optimizer.steps + rank)
            batch = torch.randn(8, 20, generator=seed)
            loss = mean_square(self.model, batch.to(next(self.model.parameters()).dtype))
            losses.append(loss.item())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def seen(self, rank: int = 0) -> Seen:
        began_at, state = self.optimizer.steps, state_of(self.optimizer)
        losses = self.train(2, rank)
        self.optimizer.close()
        return began_at, state, losses


def begin(folder: Path, rank: int = 0, steps: int = 3, **options: Any) -> None:
    """Train a run for some steps, and save a checkpoint of its end."""
    wrapped = Wrapped(**{**kept_in(folder), **options})
    wrapped.train(steps, rank)
    ballast.save(folder / "checkpoint", wrapped.model, wrapped.optimizer)
    wrapped.optimizer.close()


def begun_on_ranks(rank: int, folder: str) -> None:
    """Train a run for two more steps than its checkpoint has."""
    begin(Path(folder), rank)
    train(Layers(), rank, 5, **kept_in(Path(folder)))


def mirrored_on_ranks(rank: int, folder: str) -> tuple[str, list[float], list[tuple[int, list[float]]]]:
    """Train a run whose ranks mirror each other, and lose each rank's drive once. Return the error where both have one drive,
    the losses of a training without a run, and what each start has."""
    shared, own = Path(folder, "shared"), Path(folder, f"drive-{rank}")
    for drive in (shared, own):
        drive.mkdir(exist_ok=True)
    try:
        train(Layers(), rank, 1, mirror=True, **kept_in(shared))
        refused = ""
    except ballast.ResourceError as error:
        refused = str(error)
    starts = []
    for until in (2, 4, 6):
        starts.append(train(Layers(), rank, until, mirror=True, **kept_in(own)))
        dist.barrier()
        if rank == until // 2 % 2:
            shutil.rmtree(own)
            own.mkdir()
        dist.barrier()
    return refused, train(Layers(), rank, 6, stage=3)[1], starts


def mirrored_and_killed(rank: int, folder: str, victim: int | None) -> tuple[int, list[float]] | str:
    """Train a run whose ranks mirror each other. The victim is killed while it updates a tile of the third step; another rank
    returns its error. Without a victim, return the step at which the start begins, and the losses."""
    drive = Path(folder, f"drive-{rank}")
    drive.mkdir(parents=True, exist_ok=True)
    Stoppable.stops = rank == victim
    try:
        return train(Layers(), rank, 5, kind=Stoppable, elementwise=True, tile=128, mirror=True, **kept_in(drive))
    except ballast.FailureError as error:
        return str(error)


def continued(folder: Path, rank: int = 0, **options: Any) -> tuple[Seen, Seen]:
    """Return what the run and what a training that loads the checkpoint have, with these options."""
    options = {**kept_in(folder), **options}
    of_run = Wrapped(**options).seen(rank)
    other = Wrapped(**{key: value for key, value in options.items() if key != "run"})
    ballast.load_checkpoint(folder / "checkpoint", other.model, other.optimizer)
    return of_run, other.seen(rank)


def on_other_ranks(rank: int, folder: str, kinds: list[type[torch.optim.Optimizer]]) -> list[tuple[Seen, Seen]]:
    """Train on 3 ranks, then on 2 of them in another stage, then on 3 again. Return each pair of what ranks have."""
    pair = dist.new_group([0, 1])
    pairs = []
    for kind in kinds:
        here = Path(folder, kind.__name__)
        if rank == 0:
            here.mkdir()
        dist.barrier()
        begin(here, rank, kind=kind, tile=128)
        dist.barrier()
        if rank < 2:
            pairs.append(continued(here, rank, kind=kind, stage=2, mesh=DeviceMesh.from_group(pair, "cpu")))
        dist.barrier()
        begin(here, rank, kind=kind, steps=0)
        pairs.append(continued(here, rank, kind=kind))
        dist.barrier()
    return pairs


def check_same(run: Seen, checkpoint: Seen, step: int = 3) -> None:
    assert run[0] == checkpoint[0] == step
    check_same_state(run[1], checkpoint[1])
    assert run[2] == checkpoint[2]


def test_a_run_continues_on_fewer_ranks_and_on_more(tmp_path):
    ended = run_ranks(3, on_other_ranks, str(tmp_path), [torch.optim.AdamW, torch.optim.NAdam])
    for rank, pairs in enumerate(ended):
        on_two, on_three = (pairs[::2], pairs[1::2]) if rank < 2 else ([], pairs)
        assert (len(on_two), len(on_three)) == (2 if rank < 2 else 0, 2)
        for pair in on_two:
            check_same(*pair)
        for pair in on_three:
            check_same(*pair, step=5)
    folders = sorted(path.name for path in (tmp_path / "AdamW").iterdir())
    assert folders == ["checkpoint", "mine-rank-0", "mine-rank-1", "mine-rank-2"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"stage": 2}, {"stage": 3}),
        ({"stage": 3, "dtype": torch.bfloat16}, {"stage": 2, "dtype": torch.bfloat16, "state_format": "compact"}),
        ({"dtype": torch.bfloat16, "state_format": "4bit"}, {"dtype": torch.float32, "tile": 128}),
        ({"stage": 2, "kind": torch.optim.NAdam}, {"stage": 3, "kind": torch.optim.NAdam, "tile": 128}),
    ],
    ids=["stage", "format", "dtype", "own step"],
)
def test_a_run_continues_in_another_stage_or_format(before, after, tmp_path):
    begin(tmp_path, **before)
    check_same(*continued(tmp_path, **after))


def test_layers_in_another_order_are_the_same_run(tmp_path):
    _, whole = train(Layers(), 0, 4, stage=3)
    train(Layers(), 0, 3, **kept_in(tmp_path))
    assert train(Layers(("two", "one")), 0, 4, **kept_in(tmp_path)) == (3, whole[3:])


def test_a_run_of_which_records_are_missing_is_refused_or_begins_from_its_newest_checkpoint(tmp_path, caplog):
    run_ranks(2, begun_on_ranks, str(tmp_path))
    shutil.rmtree(tmp_path / "mine-rank-1")
    with pytest.raises(ballast.UsageError, match="B1009 (.*)no rank finds the records of rank 1") as refused:
        train(Layers(), 0, 3, **kept_in(tmp_path))
    assert "mine-rank-1" in refused.value.where
    assert f"load the run's newest checkpoint, {tmp_path / 'checkpoint'} of step 3, in a run of" in refused.value.remedy
    (tmp_path / "mine-rank-0" / "newest-checkpoint").unlink()
    with pytest.raises(ballast.UsageError, match="else load a checkpoint in a run of another name"):
        train(Layers(), 0, 3, **kept_in(tmp_path))
    check_begins_from_checkpoint(tmp_path, caplog)


def check_begins_from_checkpoint(folder, caplog):
    options = {**kept_in(folder), "checkpoint": folder}
    with pytest.raises(ballast.UsageError, match="no rank finds the records of rank 1"):  # they may be of another training
        train(Layers(("one", "two", "three")), 0, 3, **options)
    with pytest.raises(ballast.UsageError, match="no rank finds the records of rank 1"):  # there is no checkpoint
        train(Layers(), 0, 3, **{**options, "checkpoint": folder / "mine-rank-0"})
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    ballast.load_checkpoint(folder / "checkpoint", model, optimizer)
    loaded = losses_until(7, model, optimizer)
    assert train(Layers(), 0, 6, **options) == (3, loaded[:-1])
    assert 'run "mine" begins from checkpoint' in caplog.text
    assert "its records were of step 5, so 2 steps are lost" in caplog.text
    assert "no rank finds the records of rank 1 (mine-rank-1 in" in caplog.text
    assert train(Layers(), 0, 7, **options) == (6, loaded[-1:])
    for records in folder.glob("mine-rank-*"):
        shutil.rmtree(records)
    caplog.clear()
    assert train(Layers(), 0, 4, **options) == (3, loaded[:1])
    assert "of step 3: no rank has records of a step" in caplog.text


def save_step(step, directory):
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    losses_until(step, model, optimizer)
    ballast.save(directory, model, optimizer)


def begun_from(checkpoints, run):
    """Return the step from which a new run begins."""
    run.mkdir()
    return train(Layers(), 0, 0, **kept_in(run), checkpoint=checkpoints)[0]


def test_a_run_does_not_begin_without_a_word_if_a_checkpoint_cannot_be_read(tmp_path, caplog):
    older, newest = tmp_path / "saved" / "older", tmp_path / "saved" / "newest"
    save_step(1, older)
    save_step(2, newest)
    (newest / "checkpoint.json").write_bytes(b"{}")
    assert begun_from(tmp_path / "saved", tmp_path / "first") == 1
    assert f"checkpoint {newest} cannot be read, and may be newer than {older} of step 1, which is used" in caplog.text
    shutil.rmtree(older)
    with pytest.raises(ballast.FailureError, match="B3202") as refused:
        begun_from(tmp_path / "saved", tmp_path / "second")
    assert str(newest / "checkpoint.json") in refused.value.where
    assert train(Layers(), 0, 0, **kept_in(tmp_path / "first"), checkpoint=tmp_path / "saved")[0] == 1  # it has its records
    shutil.rmtree(newest)
    assert begun_from(tmp_path / "saved", tmp_path / "third") == 0


def test_the_manifest_of_a_save_that_was_killed_is_no_checkpoint_of_a_run(tmp_path):
    saved = tmp_path / "saved"
    save_step(1, saved)
    killed = saved / "step-2-0123abcd"
    killed.mkdir()
    content = {**content_of(saved / "checkpoint.json"), "step": 2, "folder": killed.name}
    (killed / "checkpoint.json").write_bytes(sealed(content))
    assert begun_from(saved, tmp_path / "run") == 1


def test_ranks_that_mirror_each_other_survive_the_loss_of_either_drive(tmp_path):
    for refused, whole, starts in run_ranks(2, mirrored_on_ranks, str(tmp_path)):
        assert 'B2204 cannot mirror run "mine"' in refused
        assert starts == [(0, whole[:2]), (2, whole[2:4]), (4, whole[4:])]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_with_its_drive_is_replaced_by_its_mirror(tmp_path, victim):
    whole = run_ranks(2, mirrored_and_killed, str(tmp_path / "whole"), None)
    survivor = run_ranks(2, mirrored_and_killed, str(tmp_path / "killed"), victim, lost=(victim,))[1 - victim]
    assert f"B3301 rank {victim}" in survivor
    shutil.rmtree(tmp_path / "killed" / f"drive-{victim}")
    again = run_ranks(2, mirrored_and_killed, str(tmp_path / "killed"), None)
    assert again == [(2, losses[2:]) for _, losses in whole]


def test_mirror_and_checkpoint_need_a_run():
    for option in ({"mirror": True}, {"checkpoint": "here"}):
        with pytest.raises(ballast.UsageError, match="B1001 .* needs a run"):
            train(Layers(), 0, 1, **option)
