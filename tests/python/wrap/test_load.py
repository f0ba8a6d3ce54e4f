"""Tests of ballast.load()."""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
from contextlib import nullcontext

import ballast
import pytest
import torch
from python.wrap.support.loops import Loop, check_equal, mean_square
from python.wrap.support.models import Tall
from python.wrap.support.others import save, save_in_parts
from python.wrap.support.ranks import run_ranks
from python.wrap.support.resident import peak_resident


def large_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(76)))


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        with ballast.gather(parameter):
            digest.update(ctypes.string_at(parameter.data_ptr(), parameter.nbytes))
    return digest.hexdigest()


def begins_within_memory(rank: int, origin: str, folder: str) -> tuple[int, str]:
    """Return the memory that it takes until training can begin, and a digest of the parameters at that point."""
    with ballast.deferred():
        Tall()  # torch's lazy imports are then not measured
    before = peak_resident(begin=True)
    if origin == "checkpoint":
        with torch.device("meta"):
            model = large_model()
    else:
        with ballast.deferred():
            model = large_model()
    kept = {kind: f"nvme:{folder}/drive" for kind in ("parameters", "state")}
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters()), model, stage=3, offload={**kept, "gradients": "host"})
    if origin == "checkpoint":
        ballast.load(model, folder)
    optimizer.memory()
    return peak_resident() - before, digest_of(model)


PLACES = {"meta": lambda: torch.device("meta"), "deferred": ballast.deferred, "at once": nullcontext}


def trained(seed=5):
    """Return a plain model with running means in its buffers."""
    torch.manual_seed(seed)
    model = Tall()
    model.norm(torch.randn(8, 48))
    return model


def constructed(place):
    torch.manual_seed(9)
    with PLACES[place]():
        return Tall()


def check_loaded(plain, ours):
    with ballast.gather(ours):
        expected = plain.state_dict()
        for name, value in (*ours.named_parameters(), *ours.named_buffers()):
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("stage", [2, 3])
def test_files_are_loaded_before_wrapping_or_after_or_while_training(place, stage, tmp_path):
    plain = trained()
    save_in_parts(tmp_path, plain.state_dict(), 3)
    for first in (True, False):
        ours = constructed(place)
        if first:
            ballast.load(ours, tmp_path / "*.safetensors")
        optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters(), lr=1e-2), ours, stage=stage)
        if not first:
            ballast.load(ours, tmp_path / "*.safetensors")
        check_loaded(plain, ours)
        mean_square(ours, torch.ones(8, 20)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ballast.load(ours, tmp_path)
        check_loaded(plain, ours)
    twin = trained()
    expected = Loop(steps=2).train(twin, ballast.wrap(torch.optim.SGD(twin.parameters(), lr=0.1)))
    ours = constructed(place)
    optimizer = ballast.wrap(torch.optim.SGD(ours.parameters(), lr=0.1), ours, stage=stage)
    ballast.load(ours, tmp_path)
    result = Loop(steps=2).train(ours, optimizer)
    with ballast.gather(ours):
        check_equal(expected, result)


def test_frozen_and_tied_parameters_are_loaded(tmp_path):
    plain = trained()
    plain.blocks[1].weight = plain.blocks[3].weight
    tensors = plain.state_dict()
    del tensors["blocks.1.weight"]  # Hugging Face writes tied parameters once
    save(tmp_path / "one.safetensors", tensors)
    for stage in (2, 3):
        for live in (False, True):
            ours = constructed("deferred")
            ours.blocks[1].weight = ours.blocks[3].weight
            ours.blocks[2].requires_grad_(False)
            optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=stage)
            if live:
                optimizer.memory()
            ballast.load(ours, tmp_path / "one.safetensors")
            check_loaded(plain, ours)


def test_parameters_are_loaded_inside_of_gather(tmp_path):
    plain = trained()
    save(tmp_path / "one.safetensors", plain.state_dict())
    ours = constructed("deferred")
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=3)
    with ballast.gather(ours):
        ballast.load(ours, tmp_path / "one.safetensors")
        assert torch.equal(ours.last.weight, plain.last.weight)
    check_loaded(plain, ours)
    assert optimizer.memory()


@pytest.mark.parametrize("files", ["directory", "index", "pattern", "list"])
def test_files_are_named_in_several_forms(files, tmp_path):
    plain = trained()
    save_in_parts(tmp_path, plain.state_dict(), 2)
    save(tmp_path / "unrelated.bin", {"other": torch.ones(3)})
    forms = {
        "directory": tmp_path,
        "index": str(tmp_path / "model.safetensors.index.json"),
        "pattern": str(tmp_path / "model-*.safetensors"),
        "list": sorted(tmp_path.glob("*.safetensors")),
    }
    ours = constructed("at once")
    ballast.load(ours, forms[files])
    check_loaded(plain, ours)


def refusal(tmp_path, tensors, kind=ballast.UsageError):
    """Return the error of a checkpoint that does not fit, and require that it changes nothing."""
    save(tmp_path / "one.safetensors", tensors)
    ours = constructed("at once")
    with pytest.raises(kind) as refused:
        ballast.load(ours, tmp_path / "one.safetensors")
    check_loaded(constructed("at once"), ours)
    return str(refused.value)


def test_files_that_do_not_fit_are_refused_before_anything_is_changed(tmp_path):
    fits = trained().state_dict()
    said = refusal(tmp_path, {f"model.{name}": value for name, value in fits.items()})
    assert "model.blocks.0.bias" in said and "nearest names are: blocks.0.bias" in said
    said = refusal(tmp_path, {name: value for name, value in fits.items() if name != "last.weight"})
    assert "1 of the model's tensors" in said and "last.weight" in said and "nearest names are: first.weight" in said
    said = refusal(tmp_path, {**fits, "last.weight": torch.ones(48, 5)})
    assert "last.weight in" in said and "(5, 48)" in said and "(48, 5)" in said
    said = refusal(tmp_path, {**fits, "last.weight": torch.ones(5, 48, dtype=torch.bfloat16)})
    assert "B1002" in said and "torch.float32" in said and "torch.bfloat16" in said


def test_invalid_files_are_refused(tmp_path):
    model, file = constructed("at once"), tmp_path / "one.safetensors"
    with pytest.raises(ballast.UsageError, match="no file matches"):
        ballast.load(model, tmp_path / "*.safetensors")
    for header, length in (("no JSON", 7), ("{}", 1 << 60), ("[]", 2)):
        file.write_bytes(struct.pack("<Q", length) + header.encode() + bytes(12))
        with pytest.raises(ballast.UsageError, match="no safetensors file"):
            ballast.load(model, file)
    file.write_bytes(b"short")
    with pytest.raises(ballast.UsageError, match="no safetensors file"):
        ballast.load(model, file)
    strange = json.dumps({"first.bias": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}})
    file.write_bytes(struct.pack("<Q", len(strange)) + strange.encode() + bytes(1))
    with pytest.raises(ballast.UsageError, match="holds F4"):
        ballast.load(model, file)
    save(file, trained().state_dict())
    save(tmp_path / "two.safetensors", {"first.bias": torch.ones(48)})
    with pytest.raises(ballast.UsageError, match='"first.bias": it is in more than one file'):
        ballast.load(model, tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    sizes = rf"{len(content)} bytes(.|\n)*{len(content) - 1} bytes"
    with pytest.raises(ballast.FailureError, match=rf"B3202(.|\n)*cut off(.|\n)*{sizes}"):
        ballast.load(model, file)


@pytest.mark.parametrize("origin", ["checkpoint", "initialization"])
def test_no_rank_ever_has_much_of_the_model(origin, tmp_path):
    """Each rank keeps its shard on a drive and its gradients in memory, and needs far less memory than the model."""
    (tmp_path / "drive").mkdir()
    model = large_model()
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert total > 300 << 20
    if origin == "checkpoint":
        save_in_parts(tmp_path, model.state_dict(), 6)
    expected = digest_of(model)
    del model
    for more, digest in run_ranks(4, begins_within_memory, origin, str(tmp_path)):
        assert digest == expected
        assert more < total * 2 / 3, f"{more >> 20} MiB more became resident, of {total >> 20}"
