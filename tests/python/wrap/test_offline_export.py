"""Tests of `ballast export`: it needs no model, and little memory."""

import json
import os
import re

import ballast
import pytest
import torch
from python.wrap.support import saved
from python.wrap.support.loops import Loop, Tower
from python.wrap.support.resident import peak_resident
from python.wrap.test_foreign import as_distributed, as_universal, as_universal_of_stage_3, trained_by_torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed: .ci/bootstrap venv")


def written(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= safetensors.load_file(path)
    return found


@pytest.mark.parametrize("size", [None, "2KiB"])
def test_a_checkpoint_becomes_the_files_of_an_export(size, run, tmp_path):
    """The command writes the same bits from a checkpoint as ballast.export() from the model, in as many files."""
    training = saved.Training({"stage": 2, "dtype": torch.bfloat16})
    training.train(0, 2)
    ballast.save(tmp_path / "saved", training.model, training.optimizer)
    (tmp_path / "direct").mkdir()
    ballast.export(training.model, tmp_path / "direct" / "model.safetensors", max_shard_size=size)
    words = [] if size is None else ["--max-shard-size", size]
    code, out, err = run("export", tmp_path / "saved", tmp_path / "offline", *words)
    assert (code, err) == (0, "") and "tensors" in out
    assert saved.same(written(tmp_path / "offline"), written(tmp_path / "direct"))
    assert (len(os.listdir(tmp_path / "offline")) > 3) == (size is not None)
    read_by_torch = {name: torch.zeros_like(each) for name, each in written(tmp_path / "offline").items()}
    dcp.load(read_by_torch, storage_reader=HuggingFaceStorageReader(str(tmp_path / "offline")), no_dist=True)
    assert saved.same(read_by_torch, written(tmp_path / "offline"))
    again = saved.Buffered().to(torch.bfloat16)
    ballast.load(again, tmp_path / "offline")
    assert saved.same(again.state_dict(), training.everything())
    assert run("export", tmp_path / "saved", tmp_path / "masters", "--dtype", "fp32")[0] == 0
    masters, found = saved.values_in(tmp_path / "saved"), written(tmp_path / "masters")
    assert all(torch.equal(value, masters[name]) for name, value in found.items() if value.is_floating_point())
    assert found["calls"].dtype == torch.int64


def test_checkpoints_of_other_programs_are_exported(run, tmp_path):
    training, _ = trained_by_torch()
    everything = {name: each.detach() for name, each in training.model.named_parameters()}
    trained = {name for name, each in training.model.named_parameters() if each.requires_grad}
    writers = {"distributed": as_distributed, "universal": as_universal, "flat": as_universal_of_stage_3}
    for kind, writes in writers.items():
        writes(tmp_path / kind, training)
    dcp.save(training.model.state_dict(), checkpoint_id=tmp_path / "model", no_dist=True)
    for kind in (*writers, "model"):
        code, _, err = run("export", tmp_path / kind, tmp_path / f"{kind}-out")
        assert (code, err) == (0, ""), kind
        found = written(tmp_path / f"{kind}-out")
        assert found.keys() >= (trained if kind in ("universal", "flat") else everything.keys()), kind
        assert all(torch.equal(found[name], value) for name, value in everything.items() if name in found), kind
        assert not any("exp_avg" in name for name in found)
    assert run("export", tmp_path / "model-out", tmp_path / "half", "--dtype", "fp16")[0] == 0
    assert all(value.dtype == torch.float16 for value in written(tmp_path / "half").values())


def test_several_models_in_a_checkpoint_are_refused(run, tmp_path):
    training, _ = trained_by_torch()
    state = training.model.state_dict()
    dcp.save({"model": state, "ema": state}, checkpoint_id=tmp_path / "two", no_dist=True)
    code, _, err = run("export", tmp_path / "two", tmp_path / "out")
    assert code == 2 and re.search(r"cannot choose the weights(.|\n)*ema, model", err)
    assert not (tmp_path / "out").exists()


def test_a_configuration_is_copied(run, tmp_path):
    loop = Loop(make_model=Tower, steps=1).run(stage=2)
    ballast.save(tmp_path / "checkpoints", loop.model, loop.optimizer)
    (tmp_path / "config.json").write_text('{"model_type": "tower"}')
    code, out, _ = run("export", tmp_path / "checkpoints", tmp_path / "out", "--config", tmp_path, "--json")
    assert code == 0 and json.loads(out)["files"] == ["model.safetensors", "config.json"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "tower"}
    for path, text in (("nosuch", None), ("bad", "[" * 200_000), ("list", "[]")):
        if text is not None:
            (tmp_path / path).write_text(text)
        code, _, err = run("export", tmp_path / "checkpoints", tmp_path / "none", "--config", tmp_path / path)
        assert code in (1, 2) and path in err and not (tmp_path / "none").exists()


def test_what_cannot_be_exported_is_named(run, tmp_path):
    (tmp_path / "empty").mkdir()
    for place, said in (("nosuch", "it does not exist"), ("empty", "no file matches")):
        code, _, err = run("export", tmp_path / place, tmp_path / "out")
        assert code == 2 and said in err and not (tmp_path / "out").exists()
    loop = Loop(make_model=Tower, steps=1).run(stage=2)
    ballast.save(tmp_path / "saved", loop.model, loop.optimizer)
    (tmp_path / "file").touch()
    code, _, err = run("export", tmp_path / "saved", tmp_path / "file")
    assert code == 1 and "B3201" in err


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_directories_of_other_programs_are_named(verb, run, tmp_path):
    training, _ = trained_by_torch()
    as_distributed(tmp_path / "distributed", training)
    as_universal(tmp_path / "universal", training)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    (tmp_path / "several" / "one").mkdir(parents=True)
    (tmp_path / "several" / "one" / "checkpoint.json").touch()
    for name, said in {
        "distributed": "a directory of torch.distributed.checkpoint(.|\n)*ballast export",
        "universal": "a universal checkpoint of DeepSpeed(.|\n)*ballast export",
        "weights": r"safetensors files(.|\n)*ballast.load\(\)",
        "several": "Name one of them, such as .*several/one",
        "several/one/checkpoint.json": "Name its directory: .*several/one",
        "nosuch": "there is no such directory",
    }.items():
        code, _, err = run(verb, tmp_path / name)
        assert code == 2 and re.search(f"B1001 cannot load a checkpoint(.|\n)*{said}", err), (name, err)
        assert "drive's health" not in err


@pytest.mark.parametrize("kind", ["ballast", "distributed", "universal"])
def test_an_export_needs_memory_for_a_few_tensors(kind, run, tmp_path):
    """The model has 80 MiB in equal tensors. An export needs 8 of them, and 32 MiB to read a checkpoint of Ballast ahead."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(80)))
    limit = 8 * model[0].weight.nbytes
    if kind == "ballast":
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        optimizer.memory()
        ballast.save(tmp_path / "saved", model, optimizer)
        optimizer.close()
        limit += 32 << 20
    elif kind == "distributed":
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved", no_dist=True)
    else:
        for name, value in model.state_dict().items():
            (tmp_path / "saved" / "zero" / name).mkdir(parents=True)
            torch.save({"param": value.clone()}, tmp_path / "saved" / "zero" / name / "fp32.pt")
    assert run("export", tmp_path / "saved", tmp_path / "first")[0] == 0  # loads what torch loads at the first use
    before = peak_resident(begin=True)
    assert run("export", tmp_path / "saved", tmp_path / "out")[0] == 0
    assert peak_resident() - before < limit
    assert saved.same(written(tmp_path / "out"), model.state_dict())


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam"])
def test_torch_resumes_what_was_exported_to_its_format(optimizer, run, tmp_path):
    """A plain optimizer of torch continues with the parameters, the state and the options of a training."""
    training = saved.Training({"stage": 2, "optimizer": optimizer})
    training.train(0, 2)
    ballast.save(tmp_path / "saved", training.model, training.optimizer)
    code, _, err = run("export", tmp_path / "saved", tmp_path / "of-torch", "--to", "distributed")
    assert (code, err) == (0, "")
    model = saved.other_parameters(saved.Buffered())
    plain = getattr(torch.optim, optimizer)(saved.groups_of(model), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain.step()  # the optimizer then has state, which torch reads into
    own, state = get_state_dict(model, plain)
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)  # the checkpoint has shared parameters under one name
    dcp.load({"model": own, "optim": state}, checkpoint_id=tmp_path / "of-torch", no_dist=True, planner=partial)
    set_state_dict(model, plain, model_state_dict=own, optim_state_dict=state)
    assert saved.same(model.state_dict(), training.everything())
    for (name, mine), theirs in zip(model.named_parameters(), training.model.parameters()):
        if name.startswith("unused.") and not training.optimizer.state.get(theirs):
            continue  # neither torch nor Ballast has updated it, so the checkpoint has no state of it
        for key, value in plain.state[mine].items():
            kept = training.optimizer.state[theirs][key]
            assert torch.equal(torch.as_tensor(value), torch.clone(torch.as_tensor(kept))), key
    assert [group["lr"] for group in plain.param_groups] == [group["lr"] for group in training.optimizer.param_groups]
    if optimizer == "AdamW":
        again = saved.Training({"stage": 3}, saved.other_parameters(saved.Buffered()))
        ballast.load_checkpoint(tmp_path / "of-torch", again.model, again.optimizer)
        assert again.train(2, 2) == training.train(2, 2)
    code, _, err = run("export", tmp_path / "saved", tmp_path / "of-torch", "--to", "distributed")
    assert code == 2 and "already" in err


def test_exports_of_two_formats_are_not_mixed(run, tmp_path):
    torch.save({"weight": torch.ones(4)}, tmp_path / "model.pt")
    for first, second in (("safetensors", "distributed"), ("distributed", "safetensors")):
        folder = tmp_path / first
        assert run("export", tmp_path / "model.pt", folder, "--to", first)[0] == 0
        files = sorted(os.listdir(folder))
        code, _, err = run("export", tmp_path / "model.pt", folder, "--to", second)
        assert code == 2 and f"{'safetensors' if first == 'safetensors' else 'torch.distributed.checkpoint'} already" in err
        assert sorted(os.listdir(folder)) == files
