"""Tests of the directory of a checkpoint: what a save removes, and what it flushes."""

import os
from pathlib import Path

import ballast
import pytest
from ballast.checkpoint import conversion, manifest
from ballast.checkpoint.folder import lock
from ballast.checkpoint.kinds import MANIFEST
from python.wrap.support.saved import save, training


def test_a_checkpoint_survives_a_file_system_that_fails_for_a_moment(tmp_path):
    """An error that does not say that the manifest is missing is no absence: here its name is a loop of links."""
    save(tmp_path, training(1))
    path, aside = tmp_path / MANIFEST, tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(path)
    assert manifest.outline_in(tmp_path) is None
    with pytest.raises(ballast.FailureError, match="B3201 open failed(.|\n)*Too many levels of symbolic links"):
        manifest.read(tmp_path)
    with pytest.raises(ballast.UsageError, match="there is a checkpoint already"):
        conversion._require_no_checkpoint(tmp_path)
    aside.rename(path)
    assert manifest.read(tmp_path).step == 1


def test_a_file_in_place_of_the_directory_holds_no_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    assert manifest.outline(tmp_path / "file") is manifest.outline(tmp_path / "nothing") is None


def test_nothing_is_removed_where_the_manifest_cannot_be_read(tmp_path):
    save(tmp_path, training(1))
    text = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).unlink()
    (tmp_path / MANIFEST).mkdir()  # it cannot be read
    directory = lock(tmp_path)
    directory.create("step-2-00000000")
    directory.discard("step-2-00000000")
    directory.release()
    (tmp_path / MANIFEST).rmdir()
    (tmp_path / MANIFEST).write_bytes(text)
    assert manifest.read(tmp_path).step == 1


def test_parents_of_folders_that_are_there_may_be_closed_to_this_user(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    monkeypatch.chdir(tmp_path)  # only root may enter the folders above it
    tmp_path.chmod(0o711)
    Path("one").mkdir()
    os.chown("one", 1234, 1234)
    os.seteuid(1234)
    try:
        for _ in range(2):
            lock(Path("one/two/three")).release()
        with pytest.raises(ballast.FailureError, match="B3201 .*Permission denied"):
            lock(Path("other"))
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("below", ["", "one/two"])
def test_a_path_that_is_a_file_is_refused(below, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ballast.UsageError, match=f"B1001 cannot save a checkpoint: {tmp_path}/file is a file"):
        save(tmp_path / "file" / below, training(1))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
