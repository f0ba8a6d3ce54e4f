"""Tests that links which another user has left where Ballast writes are not followed: what they lead to stays as it is."""

import os
from pathlib import Path

import ballast
import pytest
import torch
from ballast.checkpoint.conversion import OfflineExport
from ballast.checkpoint.folder import lock
from ballast.new_files import write_output

PRECIOUS = "the user's own text"
ANOTHER_USER = 1234


@pytest.fixture
def planted(tmp_path):
    """Return a function that makes a path a link to a file whose text has to stay."""
    target = tmp_path / "precious"
    target.write_text(PRECIOUS)

    def plant(path):
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(target)
        return path

    yield plant
    assert target.read_text() == PRECIOUS


@pytest.fixture
def trained():
    model = torch.nn.Linear(4, 3)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    model(torch.ones(2, 4, device="cpu")).sum().backward()
    optimizer.step()
    return model, optimizer


def test_files_of_an_export_replace_links(planted, trained, tmp_path):
    model, optimizer = trained
    folder, saved = tmp_path / "exported", tmp_path / "saved"
    for name in ("model.safetensors.unfinished", "model.safetensors", "config.json"):
        planted(folder / name)
    ballast.save(saved, model, optimizer)
    (tmp_path / "config.json").write_text("{}")
    OfflineExport(saved, folder, config=tmp_path / "config.json").run()
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert (folder / "config.json").read_text() == "{}"
    again = torch.nn.Linear(4, 3)
    ballast.load(again, folder)
    assert torch.equal(again.weight, model.weight)


def test_an_export_through_torch_refuses_links(planted, trained, tmp_path):
    model, optimizer = trained
    ballast.save(tmp_path / "saved", model, optimizer)
    for name in (".metadata.tmp", "__0_0.distcp"):
        link = planted(tmp_path / "exported" / name)
        with pytest.raises(ballast.Error, match="B2206.*it is a link"):
            OfflineExport(tmp_path / "saved", tmp_path / "exported", to="distributed").run()
        link.unlink()


def test_a_checkpoint_is_not_locked_through_a_link(planted, trained, tmp_path):
    model, optimizer = trained
    lock = planted(tmp_path / "saved" / "ballast.lock")
    with pytest.raises(ballast.Error, match="B2206.*it is a link"):
        ballast.save(tmp_path / "saved", model, optimizer)
    lock.unlink()
    ballast.save(tmp_path / "saved", model, optimizer)


def test_steps_and_reports_are_not_written_through_links(planted, trained, tmp_path):
    _, optimizer = trained
    planted(tmp_path / "steps" / "rank-0.jsonl")
    with pytest.raises(ballast.Error, match="B2206.*it is a link"):
        ballast.StepLog(tmp_path / "steps", optimizer)
    planted(tmp_path / "report.html.unfinished")
    write_output(tmp_path / "report.html", "page")
    assert (tmp_path / "report.html").read_text() == "page"


@pytest.mark.parametrize("run", ["../x", "/abs", "a/b", "..", ".hidden", "a\0b", "x" * 300])
def test_a_run_has_a_name_and_no_path(run, tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ballast.UsageError, match="cannot keep a run of this name"):
        ballast.wrap(optimizer, model, run=run, offload=f"nvme:{tmp_path}")
    assert not any(tmp_path.iterdir())


def test_a_user_does_not_save_to_the_folder_of_another(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    lock(tmp_path).release()
    os.chown(tmp_path, ANOTHER_USER, ANOTHER_USER)
    tmp_path.chmod(0o755)
    lock(tmp_path).release()  # root may
    monkeypatch.chdir(tmp_path)  # only root may enter the folders above it
    os.seteuid(ANOTHER_USER + 1)
    try:
        with pytest.raises(ballast.Error, match=f"B2206.*belongs to user {ANOTHER_USER}"):
            lock(Path("."))
    finally:
        os.seteuid(0)
