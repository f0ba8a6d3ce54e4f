"""Tests of the records of a run as a checkpoint: loaded, exported, converted, inspected."""

from __future__ import annotations

import json
from pathlib import Path

import ballast
import pytest
import torch
from ballast import _core
from ballast.tools.command_line import main
from python.wrap.support.kept_runs import Layers, kept_in, losses_until, train
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks
from safetensors.torch import load_file, save_file

STEPS = 3


def keep_a_run(rank: int, folder: str) -> None:
    train(Layers(), rank, STEPS, tile=128, **kept_in(Path(folder)))


def keep_a_run_in_bf16(rank: int, folder: str) -> None:
    model = Layers().bfloat16()
    model.register_forward_pre_hook(lambda module, batch: batch[0].bfloat16())
    train(model, rank, STEPS, tile=128, state_format="compact", **kept_in(Path(folder)))


def save(rank: int, folder: str) -> None:
    """Save the checkpoint of the same training."""
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    losses_until(STEPS, model, optimizer, rank)
    ballast.save(folder, model, optimizer)


def resume(rank: int, folder: str, options: dict) -> list[float]:
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))
    ballast.load_checkpoint(folder, model, optimizer)
    assert optimizer.steps == STEPS
    return losses_until(2 * STEPS, model, optimizer, rank)


def masters_and_moments(rank: int, folder: str) -> dict:
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    ballast.load_checkpoint(folder, model, optimizer)
    assert optimizer.steps == STEPS
    state = optimizer.state
    return {
        name: [each.tolist(), *((state[each][moment] + 0).tolist() for moment in ("exp_avg", "exp_avg_sq"))]
        for name, each in model.named_parameters()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run on two ranks, and the checkpoint of the same training."""
    run, saved = (str(tmp_path_factory.mktemp(name)) for name in ("run", "saved"))
    run_ranks(2, keep_a_run, run)
    run_ranks(2, save, saved)
    return run, saved


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 3, "offload": "host"}])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_training_resumes_from_the_records_of_a_run(folders, ranks, options):
    from_run, from_checkpoint = (run_ranks(ranks, resume, folder, options) for folder in folders)
    assert from_run == from_checkpoint


def test_the_weights_of_a_run_are_exported(folders, tmp_path):
    exported = []
    for number, folder in enumerate(folders):
        assert main(["export", folder, str(tmp_path / str(number))]) == 0
        exported.append(load_file(tmp_path / str(number) / "model.safetensors"))
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    model = Layers()
    ballast.load(model, folders[0])
    assert torch.equal(model.two.weight, exported[1]["two.weight"])


def test_compact_state_of_a_run_is_read_with_its_masters(tmp_path):
    """A record is laid out for a whole tile, and has scales."""
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    run_ranks(2, keep_a_run_in_bf16, str(run))
    [loaded] = run_ranks(1, masters_and_moments, str(run))
    assert main(["convert", str(run), str(other)]) == 0
    assert [loaded] == run_ranks(1, masters_and_moments, str(other))
    run_ranks(3, keep_a_run_in_bf16, str(run))  # it takes the run over, and makes no step
    assert [loaded] == run_ranks(1, masters_and_moments, str(run))


def test_a_run_is_converted_to_a_checkpoint_that_has_its_moments(folders, tmp_path):
    assert main(["convert", folders[0], str(tmp_path)]) == 0
    options = {"stage": 2}
    assert run_ranks(2, resume, str(tmp_path), options) == run_ranks(2, resume, folders[1], options)


def test_a_run_is_inspected_and_verified(folders, capsys, tmp_path):
    assert main(["inspect", folders[0], "--tensors"]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "step        3, the newest of a run on 2 ranks",
        "optimizer   AdamW; moments: exp_avg, exp_avg_sq",
        "trained     4 tensors, 840 elements",
    ]
    assert main(["inspect", f"{folders[0]}/mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["one.bias"] == [20]
    assert main(["verify", folders[0]]) == 0
    assert main(["export", f"{folders[0]}/mine", str(tmp_path)]) == 0


def test_damaged_and_missing_records_are_named(tmp_path, capsys):
    keep_a_run(0, str(tmp_path))
    assert main(["inspect", str(tmp_path / "other")]) != 0
    records = tmp_path / "mine-rank-0" / "state.records"
    content = bytearray(records.read_bytes())
    for byte in range(34 * 4096 + 8, len(content), 4096):  # in every record but its head, and in every block of the payload
        content[byte] ^= 1
    records.write_bytes(content)
    assert main(["verify", str(tmp_path)]) != 0
    assert "B3202" in "".join(capsys.readouterr())


def test_each_tensor_in_a_damaged_record_is_named_and_no_other(tmp_path, capsys):
    train(Layers(), 0, STEPS, tile=1024, **kept_in(tmp_path))
    [piece] = _core.RecordedRun(str(tmp_path), "mine").checkpoint().tensors["one.bias"].pieces
    records = tmp_path / "mine-rank-0" / "state.records"
    content = bytearray(records.read_bytes())
    content[piece.offset + 4096] ^= 1
    records.write_bytes(content)
    assert main(["verify", str(tmp_path), "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert all(each.startswith("B3202 cannot use a record: its first region is damaged: ") for each in problems)
    damaged = sorted(each.rpartition(": ")[2] for each in problems)
    assert damaged == ["one.bias, elements 0 to 20", "one.weight, elements 0 to 400"]


def test_runs_of_others_beside_a_folder_change_nothing(tmp_path):
    keep_a_run(0, str(tmp_path))
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    layer = torch.nn.Linear(3, 2)
    ballast.load(layer, tmp_path)  # weights here come before the records of a run below
    assert layer.weight.sum() == 6


def test_the_note_of_another_optimizer_is_no_obstacle(tmp_path):
    train(Layers(), 0, STEPS, kind=torch.optim.RMSprop, **kept_in(tmp_path))
    model = Layers()
    ballast.load(model, tmp_path)
    assert not torch.equal(model.one.weight, Layers().one.weight)


def test_of_several_runs_one_has_to_be_named(tmp_path):
    for name in ("one", "other"):
        train(Layers(), 0, 1, **{**kept_in(tmp_path), "run": name})
    with pytest.raises(ballast.UsageError, match="B1001 cannot read a run: .* has 2") as refused:
        ballast.load(Layers(), tmp_path)
    assert refused.value.available == "one, other"
    ballast.load(Layers(), tmp_path / "other")
