"""Tests of forged checkpoints, whose checksums are right: each is refused before anything is allocated or changed."""

import copy
import json
import re
import shutil
from pathlib import Path

import ballast
import pytest
import torch
from ballast.checkpoint import manifest
from ballast.checkpoint.manifest import problems_of
from ballast.tools.command_line import main
from python.damage import content_of, seal_of, sealed

HUGE = 1 << 63


def training():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    model[0].bias.requires_grad_(False)
    return model, ballast.wrap(torch.optim.AdamW([{"params": [*model.parameters()], "lr": 0.5}]), model)


@pytest.fixture(scope="module")
def genuine(tmp_path_factory):
    """Return the directory of a checkpoint, the content of its manifest, and that of its index."""
    folder = tmp_path_factory.mktemp("genuine") / "saved"
    model, optimizer = training()
    model(torch.ones(16)).sum().backward()
    optimizer.step()
    ballast.save(folder, model, optimizer, extra={"epoch": 1})
    content = content_of(folder / "checkpoint.json")
    index = content_of(folder / content["folder"] / "rank-00000.json")
    return folder, content, index


def forge(genuine, tmp_path, change):
    """Copy the checkpoint with another manifest and another index, whose checksums are right."""
    folder, content, index = genuine
    content, index = copy.deepcopy(content), copy.deepcopy(index)
    shutil.copytree(folder, tmp_path / "forged")
    where = tmp_path / "forged" / content["folder"]
    replaced = change(content, index)
    content = content if replaced is None else replaced
    text = sealed(index)
    (where / "rank-00000.json").write_bytes(text)
    if isinstance(content, dict) and content.get("indexes") and isinstance(content["indexes"][0], dict):
        content["indexes"][0].setdefault("seal", seal_of(text))
        if content["indexes"][0]["seal"] == genuine[1]["indexes"][0]["seal"]:
            content["indexes"][0]["seal"] = seal_of(text)
    (tmp_path / "forged" / "checkpoint.json").write_bytes(sealed(content))
    return tmp_path / "forged"


def at(*path, value=None, missing=False, of_index=False):
    """Return a change of one value, or one that removes it."""

    def change(content, index):
        where = index if of_index else content
        for key in path[:-1]:
            where = where[key]
        if missing:
            del where[path[-1]]
        else:
            where[path[-1]] = value

    return change


def of_index(*path, **how):
    return at(*path, of_index=True, **how)


def option(key, value):
    """Return a change of an option of the first group."""

    def change(content, index):
        group = content["groups"][0]
        group["options"] = json.dumps({**json.loads(group["options"]), key: value})

    return change


def of_two_optimizers(content, index):
    """Let two optimizers have the same parameters."""
    fields = ("step", "skipped", "optimizer", "moments", "groups", "own_step", "outer_identity")
    content.update(others=[{field: content[field] for field in fields}])


W, CHUNK = "0.weight", ("chunks", "0.weight", 0)
CHANGES = {
    "a list": lambda content, index: [],
    "null": lambda content, index: None or {},
    "no format": at("format", missing=True),
    "format text": at("format", value="1"),
    "ranks of 2^63": at("ranks", value=HUGE),
    "more ranks than indexes": at("ranks", value=2),
    "no ranks": at("ranks", value=0),
    "step": at("step", value=-1),
    "skipped": at("skipped", missing=True),
    "folder above": at("folder", value="../genuine"),
    "absolute folder": at("folder", value="/tmp"),
    "folder null": at("folder", value=None),
    "identity": at("outer_identity", value="zz"),
    "optimizer": at("optimizer", value=3),
    "moments": at("moments", value=["exp_avg"]),
    "an unknown moment": at("moments", value={"third": "exp_avg"}),
    "moment of a list": at("moments", "momentum", value=[]),
    "groups": at("groups", value={}),
    "a group": at("groups", value=[3]),
    "parameters": at("groups", 0, "parameters", missing=True),
    "a name": at("groups", 0, "parameters", 0, value=["0.weight"]),
    "an unknown name": at("groups", 0, "parameters", 0, value="9.weight"),
    "options": at("groups", 0, "options", value=None),
    "options that are no object": at("groups", 0, "options", value="[]"),
    "options that are cut off": at("groups", 0, "options", value='{"lr": 1'),
    "params": option("params", []),
    "tensors": at("tensors", value=[]),
    "a tensor": at("tensors", W, value=None),
    "role": at("tensors", W, "role", value="boss"),
    "role of a list": at("tensors", W, "role", value=["trained"]),
    "dtype": at("tensors", W, "dtype", value="nn"),
    "dtype of int": at("tensors", W, "dtype", value="int8"),
    "item bytes": at("tensors", "0.bias", "item_bytes", value=0),
    "shape": at("tensors", W, "shape", value=[HUGE, HUGE]),
    "negative shape": at("tensors", W, "shape", value=[-16, -16]),
    "no shape": at("tensors", W, "shape", missing=True),
    "dimensions": at("tensors", W, "shape", value=[1] * 100),
    "state format": at("tensors", W, "format", value="gold"),
    "no state format": at("tensors", W, "format", value=None),
    "state of frozen": at("tensors", "0.bias", "momentum", value=True),
    "momentum": at("tensors", W, "momentum", value="yes"),
    "steps": at("tensors", W, "steps", value=HUGE - 1),
    "no others": at("others", missing=True),
    "a parameter of two optimizers": of_two_optimizers,
    "indexes": at("indexes", value={}),
    "an index": at("indexes", 0, value="rank-00000.json"),
    "index above": at("indexes", 0, "file", value="../rank-00000.json"),
    "index seal": at("indexes", 0, "seal", value=7),
    "index of a list": lambda content, index: index.clear(),
    "chunks": of_index("chunks", value=[]),
    "an unknown tensor": of_index("chunks", "9.weight", value=[]),
    "chunk": of_index(*CHUNK, value=7),
    "short chunk": of_index(*CHUNK, value=[0, 256, 0]),
    "first": of_index(*CHUNK, 0, value=-1),
    "first of a block": of_index(*CHUNK, 0, value=1),
    "count": of_index(*CHUNK, 1, value=HUGE),
    "count that overflows": of_index(*CHUNK, 1, value=1 << 62),
    "offset": of_index(*CHUNK, 2, value=1 << 50),
    "offset in a line": of_index(*CHUNK, 2, value=1),
    "offset of 2^64": of_index(*CHUNK, 2, value=1 << 64),
    "seal": of_index(*CHUNK, 3, value="0x0000000000000f"),
    "seal of int": of_index(*CHUNK, 3, value=15),
    "data bytes": of_index("data_bytes", missing=True),
    "few data bytes": of_index("data_bytes", value=64),
    "many data bytes": of_index("data_bytes", value=HUGE),
    "extra": of_index("extra", missing=True),
    "extra seal": of_index("extra", "seal", value=None),
    "extra bytes": of_index("extra", "bytes", value="12"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_forged_checkpoint_is_refused(case, genuine, tmp_path, capsys):
    forged = forge(genuine, tmp_path, CHANGES[case])
    with pytest.raises(ballast.Error, match="B3202"):
        manifest.read(forged)
    with pytest.raises(ballast.Error, match="B3202"):
        problems_of(forged)
    assert main(["inspect", str(forged)]) == 1 and "B3202" in capsys.readouterr().err


def test_a_forged_checkpoint_changes_nothing(genuine, tmp_path):
    """Values that only a training can refuse: options of groups, and shapes."""
    changes = {
        "lr": option("lr", "high"),
        "lr is not finite": option("lr", float("nan")),
        "lr is a list": option("lr", [1.0]),
        "betas": option("betas", [0.9, 7.0]),
        "three betas": option("betas", [0.9, 0.9, 0.9]),
        "betas null": option("betas", None),
        "no eps": option("eps", {}),
        "amsgrad": option("amsgrad", True),
        "shape": at("tensors", W, "shape", value=[8, 32]),
    }
    model, optimizer = training()
    before = copy.deepcopy(model.state_dict()), {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    for number, (case, change) in enumerate(changes.items()):
        (tmp_path / str(number)).mkdir()
        forged = forge(genuine, tmp_path / str(number), change)
        with pytest.raises(ballast.Error, match="B1|B3202"):
            ballast.load_checkpoint(forged, model, optimizer)
        now = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        assert now == before[1], case
        assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items()), case
        assert optimizer.steps == 0, case
    assert ballast.load_checkpoint(genuine[0], model, optimizer) == {"epoch": 1}


def test_a_state_dict_with_impossible_options_changes_nothing():
    model, optimizer = training()
    good = optimizer.state_dict()
    for case, value in (("lr", "high"), ("lr", float("nan")), ("betas", 0.9), ("betas", (0.9, 2.0)), ("weight_decay", None)):
        bad = copy.deepcopy(good)
        bad["param_groups"][0][case] = value
        with pytest.raises(ballast.Error, match="B1"):
            optimizer.load_state_dict(bad)
        assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*none of its groups"):
        optimizer.load_state_dict({**good, "state": {17: {"step": 1}}})
    optimizer.load_state_dict(good)


@pytest.mark.parametrize("file", ["checkpoint.json", "rank-00000.json", "rank-00000.extra"])
def test_files_of_gigabytes_and_nested_json_are_not_read(file, genuine, tmp_path):
    shutil.copytree(genuine[0], tmp_path / "forged")
    [path] = Path(tmp_path / "forged").rglob(file)
    for content, size in ((b"[" * 500_000, None), (path.read_bytes(), 3 << 30)):
        path.write_bytes(content)
        if size is not None:
            with open(path, "r+b") as sparse:
                sparse.truncate(size)
        with pytest.raises(ballast.Error, match=f"B3202(.|\n)*{file}"):
            ballast.load_checkpoint(tmp_path / "forged", *training())


def test_a_damaged_manifest_does_not_stop_a_saving(genuine, tmp_path):
    for number, content in enumerate(([], {"tensors": 3, "folder": "x", "step": 1}, {"folder": []}, {})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "checkpoint.json").write_bytes(sealed(content))
        ballast.save(folder, *training())
        assert manifest.read(folder).step == 0


def test_a_checkpoint_without_its_folder_is_named(genuine, tmp_path, capsys):
    shutil.copytree(genuine[0], tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / genuine[1]["folder"])
    for verb in ("inspect", "verify"):
        assert main([verb, str(tmp_path / "moved")]) == 1
        said = capsys.readouterr().err
        assert re.search(rf"the folder {genuine[1]['folder']}(.|\n)*is not there", said) and "drive's health" not in said
