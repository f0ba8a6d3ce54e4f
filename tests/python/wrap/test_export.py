"""Tests of ballast.export(): the safetensors package and transformers read its files."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast.safetensors_format import DTYPES, INDEX
from python.wrap.support import saved
from python.wrap.support.bodies import loop_of
from python.wrap.support.loops import Loop, Tower, mean_square
from python.wrap.support.models import Half, batch_of_half, mesh_of_halves
from python.wrap.support.ranks import run_ranks


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


def exports_halves(rank: int, folder: str, stage: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Return whether this half's file exists when export() returns, and the values that belong in it."""
    half = rank % 2
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][half]
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    model = Half(half, parts)
    optimizer = ballast.wrap(
        torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, mesh=mesh_of_halves(data, parts)
    )
    mean_square(model, batch_of_half(0, rank // 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    path = Path(folder) / f"half-{half}.safetensors"
    ballast.export(model, path)
    is_there = path.exists()
    with ballast.gather(model):
        return is_there, {name: value.clone() for name, value in model.state_dict().items()}


safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed: .ci/bootstrap venv")
read = safetensors.load_file


def expected_of(model):
    tied = {"head.weight"}
    return {name: value for name, value in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("most", [None, "2KiB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_reads_an_export(stage, most, dtype, tmp_path):
    training = saved.Training({"stage": stage, "dtype": dtype})
    training.train(0, 2)
    ballast.export(training.model, tmp_path / "model.safetensors", max_shard_size=most)
    names = sorted(os.listdir(tmp_path))
    if most is None:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert sorted({*index["weight_map"].values(), "model.safetensors.index.json"}) == names
        assert len(names) > 3
    found = {}
    for name in names:
        if name.endswith(".safetensors"):
            here = read(tmp_path / name)
            assert most is None or len(here) == 1 or sum(each.nbytes for each in here.values()) <= 2048
            assert most is None or all(index["weight_map"][each] == name for each in here)
            found |= here
    with ballast.gather(training.model):
        expected = expected_of(training.model)
        assert saved.same(found, expected)
    if most is not None:
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in found.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_export_together(stage, tmp_path):
    [expected, _] = run_ranks(2, exports, str(tmp_path / "model.safetensors"), stage)
    assert saved.same(read(tmp_path / "model.safetensors"), expected)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_part_of_a_model_is_exported_by_the_ranks_that_have_it(stage, tmp_path):
    for rank, (is_there, expected) in enumerate(run_ranks(4, exports_halves, str(tmp_path), stage)):
        assert is_there
        assert saved.same(read(tmp_path / f"half-{rank % 2}.safetensors"), expected)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_cannot_write_leaves_the_file_that_was_there(stage, tmp_path):
    first, second = run_ranks(2, exports_to_a_full_drive, str(tmp_path / "model.safetensors"), stage)
    assert "B2202" in first and "B3301 exporting a model failed on other ranks: B2202" in second
    cause = [line for line in first.splitlines() if line.startswith(("  needed:", "  available:", "  remedy:"))]
    assert cause and set(cause) <= set(second.splitlines())  # a log of any rank has all of it
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == b"before"


def test_one_unit_is_gathered_at_a_time(tmp_path, monkeypatch):
    run = Loop(make_model=Tower, steps=1).run(stage=3)
    window = run.model.position.ballast_managed.owner
    most = 0
    gathered = window.gathered

    def counted(parameters, **how):
        nonlocal most
        most = max(most, len({each.ballast_managed.unit for each in parameters}))
        return gathered(parameters, **how)

    monkeypatch.setattr(window, "gathered", counted)
    ballast.export(run.model, tmp_path / "model.safetensors")
    assert most == 1


def test_exporting_a_deferred_model_makes_its_values(tmp_path):
    with ballast.deferred():
        model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    ballast.export(model, tmp_path / "model.safetensors")
    assert optimizer.steps == 0
    assert saved.same(read(tmp_path / "model.safetensors"), expected_of(Tower()))


def exported(folder, value, most):
    """Export a model whose values all equal `value`, in files of at most `most`."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    ballast.export(model, folder / "model.safetensors", max_shard_size=most)
    return model


FORMS = [None, "600B", "300B"]  # one file, two files, more files


@pytest.mark.parametrize("before", FORMS)
@pytest.mark.parametrize("after", FORMS)
def test_an_export_leaves_nothing_of_the_one_before(before, after, tmp_path):
    ballast.export(torch.nn.Linear(2, 2), tmp_path / "mymodel.safetensors", max_shard_size="8B")
    others = set(os.listdir(tmp_path))
    exported(tmp_path, 1.0, before)
    model = exported(tmp_path, 2.0, after)
    parts = {None: 1, "600B": 2, "300B": 4}[after]
    if before == after and parts > 1:
        parts += 1  # which gives all files other names
    expected = {f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)} | {INDEX}
    assert set(os.listdir(tmp_path)) - others == ({"model.safetensors"} if parts == 1 else expected)
    for name in others:
        (tmp_path / name).unlink()
    with torch.no_grad():
        model[0].weight.zero_()
    ballast.load(model, tmp_path)
    assert all(bool((each == 2).all()) for each in model.parameters())


def test_every_exported_format_can_be_loaded(tmp_path):
    one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for name, dtype in DTYPES.items():
        one.register_buffer(name, torch.tensor([1.0, 0.0]).to(getattr(torch, dtype)))
        other.register_buffer(name, torch.zeros(2).to(getattr(torch, dtype)))
    ballast.export(one, tmp_path / "model.safetensors")
    ballast.load(other, tmp_path)
    for name, value in other.state_dict().items():
        assert torch.equal(value.double(), one.state_dict()[name].double()), name


def test_tensors_that_files_cannot_hold_are_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*.safetensors"):
        ballast.export(model, tmp_path / "model.bin")
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ballast.UsageError, match="complex64(.|\n)*phase"):
        ballast.export(model, tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == []


def test_a_tensor_larger_than_a_file_gets_one_of_its_own(tmp_path):
    model = torch.nn.Module()
    for name, size in (("a", 5), ("b", 50), ("c", 5)):
        model.register_buffer(name, torch.full((size,), size, dtype=torch.uint8))
    ballast.export(model, tmp_path / "model.safetensors", max_shard_size="10B")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [list(read(file)) for file in files] == [["a"], ["b"], ["c"]]
    assert all(int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0 for file in files)


def test_transformers_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=32)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    tokens = torch.arange(8)[None]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ballast.export(model, tmp_path / "model.safetensors", max_shard_size="4KiB")
    config.save_pretrained(tmp_path)
    model.eval()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
