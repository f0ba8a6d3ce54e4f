"""Damages files of every kind that Ballast reads, at random. A reader returns the right values or raises ballast.Error.

A failure names its seed; python/damage.py says how to search for longer."""

import json
import random
import shutil

import ballast
import pytest
import torch
from ballast.checkpoint.conversion import Conversion, OfflineExport
from ballast.checkpoint.manifest import problems_of
from python.damage import CASES, SEED, content_of, damaged, seal_of, sealed, with_another_value
from python.wrap.support import others
from python.wrap.support.loops import Run
from python.wrap.support.others import save_in_parts
from torch.distributed import checkpoint as dcp


def make_model():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


def as_ballast(folder, model):
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    optimizer.memory()
    ballast.save(folder, model, optimizer, extra={"seed": 3})
    optimizer.close()


def as_distributed(folder, model):
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)


def as_universal(folder, model):
    for name, value in model.named_parameters():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": value.detach().clone()}, folder / "zero" / name / "fp32.pt")


def as_safetensors(folder, model):
    save_in_parts(folder, model.state_dict(), 2)


def trained(model):
    """Return the model after a step of torch's AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return Run(model, optimizer, [])


def as_zero_2(folder, model):
    others.as_zero(folder, trained(model))


def as_zero_3(folder, model):
    others.as_zero(folder, trained(model), stage=3)


def as_transformers(folder, model):
    others.as_transformers(folder, trained(model))


KINDS = {"ballast": as_ballast, "distributed": as_distributed, "universal": as_universal, "safetensors": as_safetensors}
TRAININGS = {"zero 2": as_zero_2, "zero 3": as_zero_3, "torch": as_transformers}
KINDS |= TRAININGS


def resealed(rng, folder):
    """Replace a value in the manifest or in the index of a checkpoint, and write the right checksums."""
    content = content_of(folder / "checkpoint.json")
    path = folder / content["folder"] / "rank-00000.json"
    index = content_of(path)
    if rng.random() < 0.5:
        text = sealed(with_another_value(rng, index))
        path.write_bytes(text)
        content["indexes"][0]["seal"] = seal_of(text)
    else:
        content = with_another_value(rng, content)
    (folder / "checkpoint.json").write_bytes(sealed(content))


def reheaded(rng, path):
    """Replace a value in the header of a safetensors file, or in an index."""
    content = path.read_bytes()
    if path.suffix == ".json":
        path.write_text(json.dumps(with_another_value(rng, json.loads(content))))
        return
    size = int.from_bytes(content[:8], "little")
    text = json.dumps(with_another_value(rng, json.loads(content[8 : 8 + size]))).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def damage(rng, kind, folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "ballast.lock")
    path = rng.choice(files)
    if kind == "ballast" and rng.random() < 0.6:
        resealed(rng, folder)
    elif kind == "safetensors" and rng.random() < 0.6:
        reheaded(rng, path)
    elif rng.random() < 0.05:
        path.unlink()
    else:
        path.write_bytes(damaged(rng, path.read_bytes()))


def reads(kind, folder, expected):
    """Read the weights into a model of zeros, and compare them. A format without checksums may give other values where the
    file has them, but never other shapes or formats."""
    ours = make_model()
    for value in ours.state_dict().values():
        value.zero_()
    ballast.load(ours, folder)
    for name, value in ours.state_dict().items():
        assert (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype), name
        assert kind != "ballast" or torch.equal(value, expected[name]), name


def converts(folder, out):
    """Convert the checkpoint. The result has valid checksums, also for wrong values."""
    shutil.rmtree(out, ignore_errors=True)
    Conversion(folder, out).run()
    assert problems_of(out) == []


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused_or_read_right(kind, tmp_path):
    genuine, model, folder = tmp_path / "genuine", make_model(), tmp_path / "damaged"
    genuine.mkdir()
    KINDS[kind](genuine, model)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    readers = [lambda: reads(kind, folder, expected), OfflineExport(folder, tmp_path / "out").run]
    readers += [lambda: problems_of(folder)] if kind == "ballast" else []
    readers += [lambda: converts(folder, tmp_path / "converted")] if kind in TRAININGS else []
    shutil.copytree(genuine, folder)
    readers[0]()
    shutil.rmtree(folder)
    refused = 0
    for seed in range(SEED, SEED + CASES):
        shutil.copytree(genuine, folder)
        damage(random.Random(f"{kind} {seed}"), kind, folder)
        for reader in readers:
            try:
                reader()
            except ballast.Error:
                refused += 1
            except BaseException as error:
                raise AssertionError(f"{kind}, seed {seed}: {error!r}") from error
        shutil.rmtree(folder)
    assert refused > CASES / 5
