"""Tests of forged checkpoints of other programs: each is refused before anything is allocated or changed."""

import io
import pickle

import ballast
import pytest
import torch
from python.wrap.test_foreign import as_distributed, as_universal, as_universal_of_stage_3, fresh, trained_by_torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

KEY = "model.position"


@pytest.fixture(scope="module")
def run():
    return trained_by_torch()[0]


def require_refused(folder, said, *, changes_nothing=True):
    """Require that all readers refuse the folder, and that none changes the model. What is wrong in the file of a tensor is
    found when that tensor is read."""
    model, optimizer = fresh()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for read in (lambda: ballast.load(model, folder), lambda: ballast.load_checkpoint(folder, model, optimizer)):
        with pytest.raises(ballast.Error, match=f"B3202(.|\n)*{said}"):
            read()
        same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert same or not changes_nothing


def place_of(metadata, key=KEY):
    return next(index for index in metadata.storage_data if index.fqn == key)


def stored(**changed):
    """Return a change of the place where a tensor is stored."""

    def change(metadata, folder):
        index = place_of(metadata)
        info = metadata.storage_data[index]
        values = {"relative_path": info.relative_path, "offset": info.offset, "length": info.length, **changed}
        values = {name: value(folder) if callable(value) else value for name, value in values.items()}
        metadata.storage_data[index] = _StorageInfo(**values)

    return change


def chunks(*of):
    """Return a change of the chunks of a tensor."""

    def change(metadata, folder):
        info = metadata.storage_data[place_of(metadata)]
        entry = metadata.state_dict_metadata[KEY]
        entry.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in of]
        for each in entry.chunks:
            metadata.storage_data[type(place_of(metadata))(KEY, each.offsets)] = info

    return change


def entry(name, value):
    def change(metadata, folder):
        setattr(metadata.state_dict_metadata[KEY], name, value)

    return change


def dtype(value):
    def change(metadata, folder):
        metadata.state_dict_metadata[KEY].properties.dtype = value

    return change


def file_with(content):
    """Return a change that stores another object than the tensor."""

    def change(metadata, folder):
        made = io.BytesIO()
        torch.save(content, made)
        (folder / "other.distcp").write_bytes(made.getvalue())
        stored(relative_path="other.distcp", offset=0, length=len(made.getvalue()))(metadata, folder)

    return change


def without_places(metadata, folder):
    del metadata.storage_data[place_of(metadata)]


def compressed(metadata, folder):
    metadata.storage_data[place_of(metadata)].transform_descriptors = ["zstd"]


CHANGES = {
    "above": (stored(relative_path="../outside.distcp"), "outside of the directory"),
    "absolute": (stored(relative_path=lambda folder: str(folder.parent / "outside.distcp")), "outside of the directory"),
    "path of int": (stored(relative_path=7), "no text"),
    "beyond the file": (stored(offset=1 << 40), "cut off"),
    "long": (stored(length=1 << 40), "cut off"),
    "short": (stored(length=1), "has 1 bytes"),
    "negative": (stored(offset=-1), "no count"),
    "nowhere": (without_places, "where the chunk"),
    "compressed": (compressed, "compressed"),
    "a hole": (chunks(((0,), (8,))), "each element once"),
    "overlap": (chunks(((0,), (16,)), ((8,), (4,))), "each element once"),
    "the same twice": (chunks(((0,), (8,)), ((0,), (8,))), "overlap"),
    "outside": (chunks(((8,), (16,))), "outside of the tensor"),
    "dimensions": (chunks(((0, 0), (16, 1))), "outside of the tensor"),
    "huge": (entry("size", torch.Size([1 << 50])), "each element once"),
    "negative size": (entry("size", [-16]), "no count"),
    "size of text": (entry("size", "16"), "no count"),
    "no chunks": (entry("chunks", None), KEY),
    "no dtype": (dtype("float32"), "no dtype"),
    # The cases below change the file of the tensor.
    "another shape": (file_with(torch.zeros(4)), r"\(4,\)"),
    "another dtype": (file_with(torch.zeros(16, dtype=torch.int32)), "torch.int32"),
    "no tensor": (file_with({"a": 1}), "no tensor"),
    "sparse": (file_with(torch.zeros(16).to_sparse()), "no tensor"),
}

CONTENT = {"another shape", "another dtype", "no tensor", "sparse"}


def test_forged_metadata_is_refused(run, tmp_path):
    folder = tmp_path / "checkpoint"
    as_distributed(folder, run)
    [pieces] = folder.glob("*.distcp")
    (tmp_path / "outside.distcp").write_bytes(pieces.read_bytes())
    genuine = (folder / ".metadata").read_bytes()
    assert pickle.loads(genuine).state_dict_metadata[KEY].size == (16,)
    for case, (change, said) in CHANGES.items():
        metadata = pickle.loads(genuine)
        change(metadata, folder)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        try:
            require_refused(folder, said, changes_nothing=case not in CONTENT)
        except BaseException as error:
            raise AssertionError(case) from error
    (folder / ".metadata").write_bytes(genuine)
    ballast.load_checkpoint(folder, *fresh())


def test_tensors_that_repeat_a_few_bytes_are_refused(run, tmp_path):
    as_universal(tmp_path, run)
    path = tmp_path / "zero" / "position" / "fp32.pt"
    for value, said in (
        (torch.zeros(1).expand(1 << 45), "in 4 bytes"),
        (torch.zeros(16).to_sparse(), "no tensor"),
        (torch.zeros(16, device="meta"), "no tensor|B3202"),
        ([0.0] * 16, "no tensor"),
    ):
        torch.save({"param": value}, path)
        require_refused(tmp_path, said)


def test_steps_that_are_no_count_are_refused(run, tmp_path):
    as_universal(tmp_path, run)
    path, training = tmp_path / "zero" / "position" / "step.pt", fresh()
    for value in (-1, float("nan"), float("inf"), 1 << 60, "3", torch.zeros(3), None, [1]):
        torch.save(value, path)
        with pytest.raises(ballast.FailureError, match="B3202(.|\n)*step.pt"):
            ballast.load_checkpoint(tmp_path, *training)
    as_universal_of_stage_3(tmp_path / "flat", run)
    for state in ({0: {"step": [1]}}, {0: 3}, [1], {0: {"step": -2}}):
        torch.save({"optimizer_state_dict": {"state": state}}, tmp_path / "flat" / "zero" / "optimizer_state.pt")
        with pytest.raises(ballast.FailureError, match="B3202(.|\n)*optimizer_state.pt"):
            ballast.load_checkpoint(tmp_path / "flat", *training)
