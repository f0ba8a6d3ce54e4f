"""Tests of `ballast push` and `ballast pull`: to a local S3 server, and to a store whose calls fail, or whose bytes change."""

from __future__ import annotations

import gc
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import ballast
import fsspec
import pytest
import torch
from ballast.checkpoint import remote
from ballast.tools.command_line import main
from fsspec.implementations.memory import MemoryFileSystem
from python.wrap.support.loops import Loop, Tower
from python.wrap.support.ranks import run_ranks


class FaultyFiles(MemoryFileSystem):
    """A store that refuses calls, and leaves a part of a file when it refuses to write one."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    refusals = 0  # calls that are refused from now on

    @classmethod
    def _may_refuse(cls) -> None:
        if cls.refusals > 0:
            cls.refusals -= 1
            raise OSError("503 Slow Down")

    def put_file(self, lpath, rpath, **options):
        if FaultyFiles.refusals > 0:
            self.pipe_file(rpath, Path(lpath).read_bytes()[:-1])
        self._may_refuse()
        super().put_file(lpath, rpath, **options)

    def get_file(self, rpath, lpath, **options):
        self._may_refuse()
        super().get_file(rpath, lpath, **options)

    def cat_file(self, path, start=None, end=None, **options):
        self._may_refuse()
        return super().cat_file(path, start, end, **options)


fsspec.register_implementation("faulty", FaultyFiles, clobber=True)


@pytest.fixture(autouse=True)
def empty_store(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.0)
    FaultyFiles.store.clear()
    FaultyFiles.pseudo_dirs[:] = [""]
    FaultyFiles.refusals = 0


def saved(folder: Path, steps: int = 2) -> Path:
    loop = Loop(steps=steps)
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    loop.train(model, optimizer)
    ballast.save(folder, model, optimizer, extra=steps)
    optimizer.close()
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if not name.endswith("ballast.lock")}


@pytest.fixture
def bucket(monkeypatch):
    """An address of a bucket on an S3 server of this machine."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # it knows the server of another test
    name = f"kept-{uuid.uuid4()}"  # the server's state outlives it
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    yield f"s3://{name}"
    server.stop()


def test_a_checkpoint_goes_to_s3_and_back(bucket, tmp_path, capsys):
    older, newer = saved(tmp_path / "older"), saved(tmp_path / "newer", steps=3)
    assert main(["push", str(older), f"{bucket}/run"]) == 0
    assert f"{bucket}/run: step 2, 4 files" in capsys.readouterr().out
    assert main(["push", str(newer), f"{bucket}/run"]) == 0
    assert main(["pull", f"{bucket}/run", str(tmp_path / "back")]) == 0
    assert files_in(tmp_path / "back") == files_in(newer)
    folders = {path.split("/")[2] for path in fsspec.filesystem("s3", skip_instance_cache=True).find(f"{bucket}/run")}
    assert len(folders) == 2  # the manifest, and the folder that it names


def test_the_newest_of_several_checkpoints_is_pulled(tmp_path):
    for steps in (3, 2):
        remote.push(saved(tmp_path / str(steps), steps), f"faulty://runs/{steps}")
    moved = remote.pull("faulty://runs", tmp_path / "back")
    assert moved.step == 3
    assert files_in(tmp_path / "back") == files_in(tmp_path / "3")


def test_calls_that_a_store_refuses_are_repeated(tmp_path):
    checkpoint = saved(tmp_path / "here")
    FaultyFiles.refusals = 3
    remote.push(checkpoint, "faulty://run")
    FaultyFiles.refusals = 3
    remote.pull("faulty://run", tmp_path / "back")
    assert files_in(tmp_path / "back") == files_in(checkpoint)


def test_what_cannot_succeed_is_not_repeated(bucket, tmp_path, monkeypatch, capsys):
    checkpoint, calls = saved(tmp_path / "here"), []
    assert main(["push", str(checkpoint), "s3://no-such-bucket/run"]) == 1
    assert "to the address: The specified bucket does not exist" in capsys.readouterr().err

    def refused(self, *args, **kwargs):
        calls.append(args)
        raise PermissionError("Access Denied")

    monkeypatch.setattr(FaultyFiles, "put_file", refused)
    with pytest.raises(ballast.FailureError, match="B3201 cannot put .* to the address: Access Denied"):
        remote.push(checkpoint, "faulty://run")
    assert len(calls) == 1


def test_a_store_that_refuses_all_calls_keeps_the_checkpoint_before(tmp_path):
    older = saved(tmp_path / "older")
    remote.push(older, "faulty://run")
    newer = saved(tmp_path / "newer", steps=3)
    FaultyFiles.refusals = 99
    with pytest.raises(ballast.FailureError, match=r"B3201 cannot put .* 5 attempts: 503 Slow Down(.|\n)*its credentials"):
        remote.push(newer, "faulty://run")
    with pytest.raises(ballast.FailureError, match="B3201 cannot get .* after 5 attempts: 503 Slow Down"):
        remote.pull("faulty://run", tmp_path / "back")
    assert files_in(tmp_path / "back") == {}
    FaultyFiles.refusals = 0
    assert remote.pull("faulty://run", tmp_path / "back").step == 2


def damage(name: str) -> None:
    [path] = [path for path in FaultyFiles.store if path.endswith(name)]
    content = bytearray(FaultyFiles.store[path].getvalue())
    content[len(content) // 3] ^= 1
    FaultyFiles().pipe_file(path, bytes(content))


@pytest.mark.parametrize("name", ["rank-00000.data", "rank-00000.extra", "rank-00000.json", "checkpoint.json"])
def test_bytes_that_changed_on_the_way_are_refused_and_the_checkpoint_here_stays(name, tmp_path):
    remote.push(saved(tmp_path / "here", steps=3), "faulty://run")
    before = saved(tmp_path / "kept")
    content = files_in(before)
    damage(name)
    with pytest.raises(ballast.FailureError, match="B3202"):
        remote.pull("faulty://run", before)
    assert files_in(before) == content


def test_a_folder_of_a_drive_is_an_address_too(tmp_path):
    checkpoint = saved(tmp_path / "here")
    remote.push(checkpoint, str(tmp_path / "copies" / "run"))
    remote.pull(str(tmp_path / "copies"), tmp_path / "back")
    assert files_in(tmp_path / "back") == files_in(checkpoint)


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ballast.UsageError, match="B1001 cannot get a checkpoint: there is none at faulty://run"):
        remote.pull("faulty://run", tmp_path)
    with pytest.raises(ballast.UsageError, match="B1001 cannot use the address nowhere://run"):
        remote.push(tmp_path, "nowhere://run")
    with pytest.raises(ballast.UsageError, match="B1001 cannot load a checkpoint: there is none in"):
        remote.push(tmp_path, "faulty://run")
    remote.push(saved(tmp_path / "here"), "faulty://run")
    [data] = [path for path in FaultyFiles.store if path.endswith(".data")]
    FaultyFiles().rm(data)
    with pytest.raises(ballast.FailureError, match="B3201 cannot get a checkpoint: .* is missing"):
        remote.pull("faulty://run", tmp_path / "back")


def test_a_checkpoint_that_was_pulled_is_loaded(tmp_path):
    remote.push(saved(tmp_path / "here"), "faulty://run")
    remote.pull("faulty://run", tmp_path / "back")
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    assert ballast.load_checkpoint(tmp_path / "back", model, optimizer) == 2
    assert optimizer.steps == 2


def load_from(rank: int, source: str) -> tuple[dict[str, torch.Tensor], int, list[float]]:
    """Load at stage 3. Return the parameters, the bytes of data that this rank got, and the losses of the next steps."""
    got, real = [], remote.Remote.get_range

    def counted(self, name, begin, end, path):
        got.append(end - begin)
        real(self, name, begin, end, path)

    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, offload="host")
    with mock.patch.object(remote.Remote, "get_range", counted), mock.patch.object(remote, "GAP", 0):
        assert ballast.load_checkpoint(source, model, optimizer) == 2
    with ballast.gather(model):
        values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return values, sum(got), Loop(steps=2).train(model, optimizer).losses


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_get_the_parts_that_they_need_from_an_address(ranks, tmp_path):
    checkpoint = saved(tmp_path / "here")
    remote.push(checkpoint, f"file://{tmp_path}/there")
    [data] = checkpoint.rglob("*.data")
    local, there = (run_ranks(ranks, load_from, source) for source in (str(checkpoint), f"file://{tmp_path}/there"))
    for (values, _, losses), (expected, none, expected_losses) in zip(there, local):
        assert losses == expected_losses and none == 0
        assert all(torch.equal(values[name], expected[name]) for name in expected)
    got = [each[1] for each in there]
    assert sum(got) < 2 * data.stat().st_size  # chunks that two ranks share are got twice


def test_weights_are_read_from_s3(bucket, tmp_path):
    checkpoint = saved(tmp_path / "here")
    remote.push(checkpoint, f"{bucket}/run")
    models = Tower(), Tower()
    ballast.load(models[0], checkpoint)
    ballast.load(models[1], f"{bucket}/run")
    assert all(torch.equal(one, other) for one, other in zip(models[0].parameters(), models[1].parameters()))


def test_a_chunk_that_changed_on_the_way_is_not_loaded(tmp_path):
    remote.push(saved(tmp_path / "here"), "faulty://run")
    damage(".data")
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    with pytest.raises(ballast.FailureError, match=r"B3202(.|\n)*elements \d+ to"):
        ballast.load_checkpoint("faulty://run", model, optimizer)
    FaultyFiles.refusals = 99
    with pytest.raises(ballast.FailureError, match="B3201 cannot get .* after 5 attempts"):
        ballast.load(Tower(), "faulty://run")


def test_a_missing_file_is_found_before_anything_changes(tmp_path):
    remote.push(saved(tmp_path / "here"), "faulty://run")
    [data] = [path for path in FaultyFiles.store if path.endswith(".data")]
    FaultyFiles().pipe_file(data, FaultyFiles.store[data].getvalue()[:-5000])
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    with pytest.raises(ballast.FailureError, match="B3202 cannot get a checkpoint: a file is cut off"):
        ballast.load_checkpoint("faulty://run", model, optimizer)
    FaultyFiles().rm(data)
    with pytest.raises(ballast.FailureError, match=r"B3201 cannot get a checkpoint: .*data is missing"):
        ballast.load_checkpoint("faulty://run", model, optimizer)
    Loop(steps=1).train(model, optimizer)  # it is as it was


@pytest.mark.parametrize("moment", ["get", "get_range"])
def test_a_checkpoint_that_is_replaced_while_ranges_are_read_is_read_anew(moment, tmp_path):
    remote.push(saved(tmp_path / "older"), "faulty://run")
    newer, real, calls = saved(tmp_path / "newer", steps=3), getattr(remote.Remote, moment), []

    def replaced_first(self, *arguments):
        calls.append(arguments)
        if len(calls) == 1:
            remote.push(newer, "faulty://run")
        return real(self, *arguments)

    model, weights = Tower(), Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    with mock.patch.object(remote.Remote, moment, replaced_first):
        assert ballast.load_checkpoint("faulty://run", model, optimizer) == 3
        ballast.load(weights, "faulty://run")
    with ballast.gather(model):
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), weights.parameters()))


def test_nothing_is_left_of_the_parts_that_were_got(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    remote.push(saved(tmp_path / "here"), "faulty://run")
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    gc.disable()
    ballast.load_checkpoint("faulty://run", model, optimizer)
    gc.enable()
    assert not any((tmp_path / "temporary").iterdir())
