"""Tests of forged safetensors files: each is refused before anything is allocated or changed."""

import json
import os
import re
import struct

import ballast
import pytest
import torch
from ballast.torch.parameters.stored_tensors import tensors_in

MODEL = {"weight": (2, 2), "bias": (2,)}


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


GOOD = {"bias": entry(0, 8), "weight": entry(8, 24, (2, 2))}


def write(path, header, data=bytes(24), length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def with_bias(**changed):
    return {**GOOD, "bias": {**GOOD["bias"], **changed}}


HEADERS = {
    "overlap": ({**GOOD, "weight": entry(0, 16, (2, 2))}, "weight overlaps with bias"),
    "gap": ({**GOOD, "weight": entry(12, 28, (2, 2))}, "B3202"),
    "rest": ({"bias": entry(0, 8)}, "16 bytes at the end"),
    "outside": ({**GOOD, "weight": entry(8, 8 + (1 << 40), (1 << 38, 1))}, "cut off"),
    "twice": (json.dumps(GOOD)[:-1].encode() + b', "bias": ' + json.dumps(entry(0, 8)).encode() + b"}", '"bias" twice'),
    "wrong size": (with_bias(shape=[3]), "bias has 8 bytes"),
    "reversed": (with_bias(data_offsets=[8, 0]), "bias has -8 bytes"),
    "negative": (with_bias(shape=[-1, -2]), r"bias.shape\[0\] is -1"),
    "fraction": (with_bias(data_offsets=[0.5, 8.5]), r"bias.data_offsets\[0\] is 0.5"),
    "text": (with_bias(shape=["2"]), r"bias.shape\[0\] is \"2\""),
    "bool": (with_bias(data_offsets=[False, 8]), r"bias.data_offsets\[0\] is false"),
    "many": (with_bias(shape=[0] * 100_000), "bias.shape is a list"),
    "huge": (with_bias(shape=[1 << 62, 1 << 62]), r"bias.shape\[0\] is 4611686018427387904"),
    "more than a count": (with_bias(shape=[1 << 64]), r"bias.shape\[0\] is 1.8446744073709552e\+19"),
    "no entry": ({**GOOD, "bias": None}, "bias is null"),
    "no shape": ({**GOOD, "bias": {"dtype": "F32", "data_offsets": [0, 8]}}, "bias.shape is missing"),
    "one offset": (with_bias(data_offsets=[0]), "a list of 2"),
    "dtype of a list": (with_bias(dtype=["F32"]), "bias.dtype is a list"),
    "half a character": (b'{"\\ud800": ' + json.dumps(entry(0, 24, (6,))).encode() + b"}", "no safetensors file"),
    "nested": (b"[" * 200_000, "no safetensors file"),
    "a list": (b"[]", "no safetensors file"),
}


def refusal(path):
    """Return the error of a load, which changes nothing and needs little memory."""
    model = torch.nn.Linear(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ballast.Error, match="B3202|B1001") as refused:
        ballast.load(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(refused.value)


@pytest.mark.parametrize("case", HEADERS)
def test_a_forged_header_is_refused(case, tmp_path):
    header, said = HEADERS[case]
    write(tmp_path / "one.safetensors", header)
    text = refusal(tmp_path / "one.safetensors")
    assert "one.safetensors" in text
    assert re.search(said, text), text


def test_the_good_file_is_read(tmp_path):
    write(tmp_path / "one.safetensors", GOOD, struct.pack("6f", *range(6)))
    model = torch.nn.Linear(2, 2)
    ballast.load(model, tmp_path / "one.safetensors")
    assert model.bias.tolist() == [0, 1] and model.weight.tolist() == [[2, 3], [4, 5]]


def test_a_header_of_gigabytes_is_not_read(tmp_path):
    """The file is sparse: it takes no room on the drive, and a reader would allocate all of its header."""
    path = tmp_path / "one.safetensors"
    path.write_bytes(struct.pack("<Q", 3 << 30) + b"{")
    os.truncate(path, 4 << 30)
    assert "a header of 3 GiB" in refusal(path)


INDEXES = {
    "above": ({"weight_map": {"bias": "../two.safetensors"}}, r"\.\./two.safetensors"),
    "absolute": ({"weight_map": {"bias": "{outside}"}}, "next to the index"),
    "below": ({"weight_map": {"bias": "folder/two.safetensors"}}, "folder/two"),
    "the folder": ({"weight_map": {"bias": ".."}}, "B3202"),
    "nothing": ({"weight_map": {"bias": ""}}, "B3202"),
    "zero": ({"weight_map": {"bias": "one\0.safetensors"}}, "B3202"),
    "a number": ({"weight_map": {"bias": 3}}, "weight_map.bias is 3"),
    "a list": ({"weight_map": ["one.safetensors"]}, "weight_map is a list"),
    "no map": ({}, "weight_map is missing"),
    "no object": ([], "its content is a list"),
    "not there": ({"weight_map": {"bias": "one.safetensors", "other": "one.safetensors"}}, "other is not in one"),
    "elsewhere": ({"weight_map": {"bias": "one.safetensors", "weight": "two.safetensors"}}, "two.safetensors"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_forged_index_is_refused(case, tmp_path):
    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    for path in (folder / "one.safetensors", tmp_path / "two.safetensors", folder / "folder" / "two.safetensors"):
        write(path, GOOD)
    content, said = INDEXES[case]
    text = json.dumps(content).replace("{outside}", str(tmp_path / "two.safetensors"))
    (folder / "model.safetensors.index.json").write_text(text)
    assert re.search(said, refusal(folder))


@pytest.mark.parametrize("text", [b"no JSON", b"[" * 200_000, b"\xff", b'{"weight_map": {"a": "one", "a": "two"}}'])
def test_an_index_that_is_no_json_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_a_file_that_becomes_shorter_is_refused_when_it_is_read(tmp_path):
    path = tmp_path / "one.safetensors"
    write(path, GOOD)
    tensor = tensors_in(path)["weight"]
    os.truncate(path, 100)
    with pytest.raises(ballast.Error, match="shorter"):
        tensor.read_all()
