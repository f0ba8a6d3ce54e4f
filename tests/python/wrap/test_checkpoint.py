"""Tests of checkpoints: values do not depend on the ranks, stages and tiers that save and load them."""

from __future__ import annotations

import io
import json
import resource
import shutil
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from ballast.checkpoint import manifest
from ballast.checkpoint.kinds import MANIFEST
from ballast.sizes import parse_size
from python.damage import sealed
from python.wrap.support import saved
from python.wrap.support.ranks import run_ranks
from python.wrap.support.saved import (
    STEPS,
    Buffered,
    Configuration,
    Training,
    Values,
    kill,
    other_parameters,
    same,
    stopped_while_saving,
    values_in,
)


def interrupt() -> None:
    """Raise what Ctrl-C raises. Python still cleans up after it."""
    raise KeyboardInterrupt


def load_and_save(rank: int, pairs: list[tuple[str, str, Configuration]]) -> list[tuple[Values, int, Any, list[float]]]:
    """Load each checkpoint with the given options, save it in another directory, thaw a block and train two more steps."""
    seen = []
    for source, target, configuration in pairs:
        torch.manual_seed(1)  # other parameters than those that were saved
        training = Training(configuration, other_parameters(Buffered()))
        training.model.blocks[3].requires_grad_(False)
        extra = ballast.load_checkpoint(source, training.model, training.optimizer)
        everything, steps = training.everything(), training.optimizer.steps
        ballast.save(target, training.model, training.optimizer, extra=extra)
        training.model.blocks[3].requires_grad_(True)
        losses = training.train(STEPS, 2)
        seen.append((everything, steps, extra, losses))
    return seen


def interrupted(rank: int, folder: str, configurations: list[Configuration]) -> tuple[list[list[float]], list[list[float]]]:
    """Return the losses after a save, of the training that continues and of another one that loads the checkpoint."""
    straight, again = [], []
    for number, configuration in enumerate(configurations):
        one = Training(configuration)
        one.train(0, 2)
        ballast.save(f"{folder}/{number}", one.model, one.optimizer)
        straight.append(one.train(2, 3))
        other = Training(configuration, other_parameters(Buffered()))
        ballast.load_checkpoint(f"{folder}/{number}", other.model, other.optimizer)
        again.append(other.train(2, 3))
    return straight, again


def one_rank_cannot_write(rank: int, folder: str) -> tuple[str, int, bool]:
    """Return the error, the step of the checkpoint that is there afterwards, and whether the training is unaffected."""
    training, other = Training({"stage": 2}), Training({"stage": 2})
    training.train(0, 1), other.train(0, 1)
    ballast.save(folder, training.model, training.optimizer)
    training.train(1, 1), other.train(1, 1)
    said = ""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        ballast.save(folder, training.model, training.optimizer)
    except ballast.Error as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return said, manifest.read(folder).step, training.train(2, 1) == other.train(2, 1)


def one_rank_has_state_that_cannot_be_saved(rank: int, folder: str) -> str:
    training = Training({"stage": 2, "optimizer": "NAdam", "timeout": 30})
    training.train(0, 1)
    if rank == 1:
        next(iter(training.optimizer.state.values()))["phase"] = None
    try:
        ballast.save(folder, training.model, training.optimizer)
    except ballast.Error as error:
        return str(error)
    return ""


def one_rank_reads_a_flipped_bit(rank: int, folder: str) -> str:
    training = Training({"stage": 3, "offload": f"nvme:{folder}"})
    training.train(0, 1)
    ballast.save(f"{folder}/saved", training.model, training.optimizer)
    if rank == 0:
        piece = next(iter(manifest.read(f"{folder}/saved").tensors["blocks.0.up.weight"].pieces))
        [path] = Path(folder, "saved").rglob(f"rank-{piece.file:05}.data")
        content = bytearray(path.read_bytes())
        content[piece.offset] ^= 1
        path.write_bytes(content)
    training.optimizer._ballast.group.barrier()
    try:
        ballast.load_checkpoint(f"{folder}/saved", training.model, training.optimizer)
    except ballast.Error as error:
        return str(error)
    return ""


RANKS = (1, 2, 3)
BF16 = {"dtype": torch.bfloat16}


def everywhere(path, **options):
    nvme = f"nvme:{path}"
    return [
        {**options, "stage": 0},
        {**options, "stage": 1},
        {**options, "stage": 2, "offload": "host"},
        {**options, "stage": 2, "offload": nvme},
        {**options, "stage": 3},
        {**options, "stage": 3, "offload": "host"},
        {**options, "stage": 3, "offload": {"parameters": nvme, "gradients": "host", "state": nvme}},
    ]


def saved_on(ranks, path, configurations):
    folder = path / f"by-{ranks}"
    return run_ranks(ranks, saved.train_and_save, str(folder), configurations)[0]


def pairs_for(to, count):
    """Return (saving ranks, saving configuration, loading configuration), where a configuration is its index. Each `to` takes
    a third of what was saved, and all of them together load in every configuration."""
    return [(by, one, (one + 2 * by + 3 * to) % count) for by in RANKS for one in range(count) if (by + one + to) % 3 == 0]


@pytest.mark.parametrize(
    ("kind", "taken"),  # fp32 takes all configurations, and the others take some: checkpoint_test.cpp combines all of them
    [
        ({}, slice(None)),
        ({**BF16}, slice(0, None, 2)),
        ({**BF16, "state_format": "compact"}, slice(1, None, 2)),
        ({**BF16, "state_format": "4bit"}, slice(0, None, 2)),
    ],
    ids=["fp32", "bf16 in split", "bf16 in compact", "bf16 in 4bit"],
)
def test_any_number_of_ranks_at_any_stage_and_tier_loads_what_any_other_saved(kind, taken, tmp_path):
    configurations = everywhere(tmp_path, **kind)[taken]
    parameters = {ranks: saved_on(ranks, tmp_path, configurations) for ranks in RANKS}
    there = {
        (by, one): values_in(tmp_path / f"by-{by}" / str(one)) for by in RANKS for one in range(len(configurations))
    }
    for to in RANKS:
        pairs = pairs_for(to, len(configurations))
        paths = [
            (str(tmp_path / f"by-{by}" / str(one)), str(tmp_path / f"to-{to}" / f"{by}-{one}"), configurations[other])
            for by, one, other in pairs
        ]
        answers = run_ranks(to, load_and_save, paths)
        losses_of = {}
        for number, (by, one, other) in enumerate(pairs):
            for rank, (everything, steps, extra, losses) in enumerate(answer[number] for answer in answers):
                assert same(everything, parameters[by][one]), (by, one, to, other)
                assert (steps, extra) == (4, {"rank": rank % by})
                losses_of.setdefault((by, rank), []).append(losses)
            assert same(values_in(paths[number][1]), there[by, one]), (by, one, to, other)
        assert all(all(losses == each[0] for losses in each) for each in losses_of.values())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_training_continues_as_if_it_had_not_stopped(ranks, tmp_path):
    kinds = ({}, BF16, *({**BF16, "state_format": format} for format in ("bf16", "compact", "4bit")))
    for number, kind in enumerate(kinds):
        configurations = everywhere(tmp_path, **kind)[(number + ranks) % 2 :: 2]
        for losses, again in run_ranks(ranks, interrupted, str(tmp_path / str(kind)), configurations):
            assert losses == again


@pytest.mark.parametrize("optimizer, kind", [("NAdam", {}), ("RAdam", BF16)], ids=["fp32", "bf16"])
def test_state_of_an_optimizers_own_step_is_resharded(optimizer, kind, tmp_path):
    configurations = [{**each, "optimizer": optimizer} for each in everywhere(tmp_path, **kind)[::2]]
    parameters = {ranks: saved_on(ranks, tmp_path, configurations) for ranks in RANKS}
    there = {
        (by, one): values_in(tmp_path / f"by-{by}" / str(one)) for by in RANKS for one in range(len(configurations))
    }
    assert any(name.endswith(": exp_avg") for name in there[1, 0])
    for to in RANKS:
        pairs = pairs_for(to, len(configurations))
        paths = [
            (str(tmp_path / f"by-{by}" / str(one)), str(tmp_path / f"to-{to}" / f"{by}-{one}"), configurations[other])
            for by, one, other in pairs
        ]
        answers = run_ranks(to, load_and_save, paths)
        for number, (by, one, other) in enumerate(pairs):
            for everything, steps, _, _ in (answer[number] for answer in answers):
                assert same(everything, parameters[by][one]), (by, one, to, other)
                assert steps == 4
            assert same(values_in(paths[number][1]), there[by, one]), (by, one, to, other)
    for losses, again in run_ranks(2, interrupted, str(tmp_path / "interrupted"), configurations):
        assert losses == again


@pytest.mark.parametrize("to", ["fp32", "split", "bf16", "compact", "4bit"])
@pytest.mark.parametrize("by", ["fp32", "split", "bf16", "compact", "4bit"])
def test_another_state_format_rounds_the_state(by, to, tmp_path):
    [parameters] = saved.train_and_save(0, str(tmp_path), [{**BF16, "stage": 2, "state_format": by}])
    [(everything, *_)] = load_and_save(
        0, [(f"{tmp_path}/0", f"{tmp_path}/1", {**BF16, "stage": 3, "state_format": to})]
    )
    assert same(parameters, everything)
    before, after = values_in(tmp_path / "0"), values_in(tmp_path / "1")
    assert before.keys() == after.keys()
    assert same(before, after) == (to in (by, "split", "fp32"))
    for name in before:
        largest = before[name].abs().max().item() if before[name].numel() else 0
        # Codes of 4 bits are a factor of up to 2 apart, and a variance is the square of its code.
        rtol, atol = (0.6, 5e-3) if to == "4bit" and "/" in name else (0.05, 2e-3)
        assert torch.allclose(before[name].double(), after[name].double(), rtol=rtol, atol=largest * atol), name


def test_a_model_of_another_number_format_gets_the_masters(tmp_path):
    saved.train_and_save(0, str(tmp_path), [{**BF16, "stage": 2}])
    load_and_save(0, [(f"{tmp_path}/0", f"{tmp_path}/1", {"stage": 3})])
    before, after = values_in(tmp_path / "0"), values_in(tmp_path / "1")
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)


def test_loading_restores_groups_steps_and_frozen_state(tmp_path):
    saved.train_and_save(0, str(tmp_path), [{"stage": 2}])
    training = Training({"stage": 3})
    training.model.blocks[3].requires_grad_(False)
    groups = training.optimizer.param_groups
    objects = [id(group) for group in groups]
    ballast.load_checkpoint(tmp_path / "0", training.model, training.optimizer)
    assert objects == [id(group) for group in training.optimizer.param_groups]
    assert (groups[0]["lr"], groups[1]["lr"], groups[1]["betas"]) == (1e-2, 1e-3, (0.8, 0.95))
    state = training.optimizer.state
    assert float(state[training.model.first.weight]["step"]) == 4
    assert float(state[training.model.blocks[3].up.weight]["step"]) == 2
    assert state[training.model.blocks[3].up.weight]["exp_avg"].abs().max() > 0
    assert training.model.blocks[1].up.weight not in state


def test_a_checkpoint_replaces_the_one_before(tmp_path):
    training = Training({"stage": 2})
    for step in range(3):
        training.train(step, 1)
        ballast.save(tmp_path, training.model, training.optimizer)
        now = manifest.read(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"ballast.lock", "checkpoint.json", now.folder}
        assert now.step == step + 1


class Broken:
    """Functions that break a file of a checkpoint."""

    @staticmethod
    def flipped(path, at):
        content = bytearray(path.read_bytes())
        content[at] ^= 4
        path.write_bytes(content)

    @staticmethod
    def missing(path, at):
        path.unlink()

    @staticmethod
    def cut_off(path, at):
        path.write_bytes(path.read_bytes()[: at // 2])


@pytest.mark.parametrize("breaks", [Broken.flipped, Broken.missing, Broken.cut_off], ids=lambda each: each.__name__)
@pytest.mark.parametrize("file", ["checkpoint.json", "rank-00000.json", "rank-00000.data", "rank-00000.extra"])
def test_a_broken_file_is_named_and_nothing_is_trained_with_it(breaks, file, tmp_path):
    training = Training({"stage": 2})
    training.train(0, 2)
    ballast.save(tmp_path / "good", training.model, training.optimizer)
    ballast.save(tmp_path / "bad", training.model, training.optimizer)
    [path] = (tmp_path / "bad").rglob(file)
    tensors = manifest.read(tmp_path / "bad").tensors
    piece = next(iter(tensors["blocks.0.up.weight"].pieces))
    breaks(path, piece.offset + piece.bytes // 2 if file.endswith("data") else path.stat().st_size // 2)
    has_no_checkpoint = file == MANIFEST and breaks is Broken.missing
    with pytest.raises(ballast.Error, match="B1001" if has_no_checkpoint else "B3[0-9]{3}") as raised:
        ballast.load_checkpoint(tmp_path / "bad", training.model, training.optimizer)
    assert file in str(raised.value)
    if file.endswith("data") and breaks is Broken.flipped:
        assert "blocks.0.up.weight" in str(raised.value)
        with pytest.raises(ballast.UsageError, match="B1007(.|\n)*loaded in part"):
            training.train(2, 1)
    ballast.load_checkpoint(tmp_path / "good", training.model, training.optimizer)
    again = Training({"stage": 2})
    again.train(0, 2)
    assert training.train(2, 2) == again.train(2, 2)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    saved.train_and_save(0, str(tmp_path), [{"stage": 2}])
    model = saved.Buffered()
    for optimizer, said in [
        (torch.optim.SGD(saved.groups_of(model), lr=1.0), "AdamW(.|\n)*SGD"),
        (torch.optim.AdamW(model.parameters(), lr=1.0), "2 parameter groups"),
        (torch.optim.RAdam(saved.groups_of(model), lr=1.0), "AdamW(.|\n)*RAdam(.|\n)*exp_avg"),
    ]:
        for group in optimizer.param_groups:
            group.pop("betas", None) if isinstance(optimizer, torch.optim.SGD) else None
        wrapped = ballast.wrap(optimizer, model)
        with pytest.raises(ballast.UsageError, match="B1001(.|\n)*" + said):
            ballast.load_checkpoint(tmp_path / "0", model, wrapped)
        wrapped.close()


def test_tensors_that_were_saved_from_a_gpu_are_read_without_it(tmp_path, monkeypatch):
    """The file of a rank with a fourth GPU can be loaded. It differs only in the location tags of its storages."""
    training, file = Training({"stage": 2}), io.BytesIO()
    with monkeypatch.context() as there:
        there.setattr("torch.serialization.location_tag", lambda storage: "cuda:3")
        torch.save({"seeds": torch.arange(3)}, file)
    with monkeypatch.context() as there:
        there.setattr("ballast.checkpoint.saving.packed", lambda extra: file.getvalue())
        ballast.save(tmp_path, training.model, training.optimizer)
    seeds = ballast.load_checkpoint(tmp_path, training.model, training.optimizer)["seeds"]
    assert seeds.device.type == "cpu" and torch.equal(seeds, torch.arange(3))


def test_impossible_saves_are_refused_before_anything_is_written(tmp_path):
    training = Training({"stage": 2})
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*weights_only"):
        ballast.save(tmp_path, training.model, training.optimizer, extra={"way": Broken})
    with pytest.raises(ballast.UsageError, match="B1001 cannot save extra: torch.save(.|\n)* cannot write it(.|\n)*lambda"):
        ballast.save(tmp_path, training.model, training.optimizer, extra=lambda: 1)
    for option in (object(), {100: 0.1}, [(1, 2)]):  # JSON has none of them
        training.optimizer.param_groups[0]["friend"] = option
        with pytest.raises(ballast.UsageError, match=r"B1001(.|\n)*param_groups\[0\](.|\n)*friend"):
            ballast.save(tmp_path, training.model, training.optimizer)
    with pytest.raises(ballast.UsageError, match="needed: *an optimizer of ballast.wrap"):
        ballast.save(tmp_path, training.model, torch.optim.AdamW(training.model.parameters()))
    assert list(tmp_path.iterdir()) == []


def test_options_of_groups_come_back_as_they_were(tmp_path):
    options = {"milestones": [1, 2], "betas of the warm-up": (0.8, 0.9), "none": None, "where": {"rate": [0.1]}}
    training = Training({"stage": 2})
    training.optimizer.param_groups[0].update(options)
    ballast.save(tmp_path, training.model, training.optimizer)
    training.optimizer.param_groups[0].update(milestones=[], where={})
    ballast.load_checkpoint(tmp_path, training.model, training.optimizer)
    group = training.optimizer.param_groups[0]
    assert {name: group[name] for name in options} == options


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda values: values.conj().imag], ids=["conjugate", "negative"])
def test_buffers_whose_bytes_are_not_their_values_are_saved_as_their_values(lazy, tmp_path):
    values = torch.complex(torch.arange(3.0), torch.arange(1.0, 4.0))
    training = Training({"stage": 2})
    training.model.register_buffer("lazy", lazy(values))
    ballast.save(tmp_path, training.model, training.optimizer)
    training.model.lazy = torch.zeros_like(training.model.lazy.resolve_conj().resolve_neg())
    ballast.load_checkpoint(tmp_path, training.model, training.optimizer)
    assert torch.equal(training.model.lazy, lazy(values))


@pytest.mark.parametrize("value", [None, True, [1.0], "warm"], ids=str)
def test_state_that_cannot_be_saved_is_refused_with_its_name(value, tmp_path):
    training = Training({"stage": 2, "optimizer": "NAdam"})
    training.train(0, 1)
    training.optimizer.state[training.model.position]["phase"] = value
    with pytest.raises(ballast.UsageError, match=f"B1001(.|\n)*{type(value).__name__}(.|\n)*position: phase"):
        ballast.save(tmp_path, training.model, training.optimizer)
    assert list(tmp_path.iterdir()) == []
    del training.optimizer.state[training.model.position]["phase"]
    ballast.save(tmp_path, training.model, training.optimizer)


def test_a_rank_whose_state_cannot_be_saved_fails_on_all_ranks(tmp_path):
    first, second = run_ranks(2, one_rank_has_state_that_cannot_be_saved, str(tmp_path))
    assert "B3301" in first and "rank 1" in first
    assert "B1001" in second and "NoneType" in second


def test_nothing_is_saved_between_updates_in_backward_and_their_step(tmp_path):
    training = Training({"stage": 3, "update_in_backward": True})
    training.loop.loss(training.model, training.loop.batch(0)).backward()
    with pytest.raises(ballast.UsageError, match="B1007 cannot save the model between a backward pass and its step"):
        ballast.save(tmp_path, training.model, training.optimizer)
    training.optimizer.step()
    training.optimizer.zero_grad()
    ballast.save(tmp_path, training.model, training.optimizer)


def test_saving_and_loading_gather_nothing(tmp_path, monkeypatch):
    training = Training({"stage": 3})
    training.train(0, 2)
    before = training.everything()
    units = training.model.position.ballast_managed.owner._gather
    monkeypatch.setattr(units, "open", lambda unit: pytest.fail("a unit was gathered"))
    ballast.save(tmp_path, training.model, training.optimizer)
    ballast.load_checkpoint(tmp_path, training.model, training.optimizer)
    monkeypatch.undo()
    assert same(training.everything(), before)


def test_a_full_drive_is_found_before_anything_is_written(tmp_path, monkeypatch):
    training = Training({"stage": 2})
    ballast.save(tmp_path, training.model, training.optimizer)
    before = sorted(tmp_path.rglob("*"))
    require_space = ballast._core.require_space
    monkeypatch.setattr("ballast._core.require_space", lambda path, needed: require_space(path, needed + (1 << 60)))
    free = shutil.disk_usage(tmp_path).free
    said = r"B2202 cannot save the files: they do not fit(.|\n)*1 EiB(.|\n)*available"
    with pytest.raises(ballast.ResourceError, match=said) as refused:
        ballast.save(tmp_path, training.model, training.optimizer)
    assert parse_size(refused.value.available) == pytest.approx(free, rel=0.2)  # other processes use the drive, too
    assert sorted(tmp_path.rglob("*")) == before


def test_a_rank_that_cannot_write_is_named_and_the_checkpoint_before_stays(tmp_path):
    first, second = run_ranks(2, one_rank_cannot_write, str(tmp_path))
    assert "B3301" in first[0] and "rank 1" in first[0]
    assert "B2202" in second[0] and "ulimit -f" in second[0]
    assert first[1] == second[1] == 1  # the earlier checkpoint is still there
    assert first[2] and second[2]  # the training is unaffected


def test_a_rank_that_cannot_read_is_named_and_no_rank_continues_alone(tmp_path):
    said = run_ranks(2, one_rank_reads_a_flipped_bit, str(tmp_path))
    assert any("B3202" in text for text in said)
    assert all(text.startswith(("B3202", "B3301")) for text in said)


def test_a_manifest_can_be_read_by_people(tmp_path):
    saved.train_and_save(0, str(tmp_path), [{**BF16, "stage": 2}])
    content = json.loads((tmp_path / "0" / "checkpoint.json").read_text())["content"]
    assert content["step"] == 4
    assert content["tensors"]["blocks.0.up.weight"] == {
        "role": "trained",
        "dtype": "bfloat16",
        "item_bytes": 2,
        "shape": [32, 16],
        "format": "split",
        "momentum": True,
        "variance": True,
        "steps": 4,
    }
    content["format"] = 2
    (tmp_path / "0" / "checkpoint.json").write_bytes(sealed(content))
    with pytest.raises(ballast.UsageError, match="B1008(.|\n)*format 2"):
        manifest.read(tmp_path / "0")


@pytest.mark.parametrize("stop", [kill, interrupt])
def test_a_process_that_is_stopped_leaves_the_old_checkpoint_or_the_new_one(tmp_path, stop):
    [gained] = run_ranks(1, stopped_while_saving, str(tmp_path / "here"), stop)
    assert len(gained) > 30
    assert set(gained) == {0, 1}
    if stop is kill:  # each run then has the same moments; cleanup after an interrupt varies
        assert gained == sorted(gained)  # the new checkpoint is in place from one moment on


def test_a_run_on_drives_resumes_from_the_loaded_checkpoint(tmp_path):
    kept = {"stage": 3, "offload": {kind: f"nvme:{tmp_path}" for kind in ("parameters", "state")}, "run": "mine"}
    one = Training({"stage": 2})
    one.train(0, 3)
    ballast.save(tmp_path / "saved", one.model, one.optimizer)
    other = Training(kept, saved.other_parameters(saved.Buffered()))
    other.train(0, 1)
    ballast.load_checkpoint(tmp_path / "saved", other.model, other.optimizer)
    other.optimizer.close()
    again = Training(kept, saved.other_parameters(saved.Buffered()))
    assert again.optimizer.steps == 3
    trained = [name for name, parameter in again.model.named_parameters() if parameter.requires_grad]
    assert all(torch.equal(again.everything()[name], one.everything()[name]) for name in trained)
