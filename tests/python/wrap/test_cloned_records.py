"""Tests that ballast.save() clones the records of a run where the file system can: tests/reflinks.cpp is preloaded."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import ballast
import pytest
import torch
from ballast.checkpoint import manifest
from ballast.tools.command_line import main
from python.wrap.support.kept_runs import Layers, kept_in, losses_until
from python.wrap.support.loops import keywords

STEPS = 3
ROOT = Path(__file__).parents[3]
BUILD = Path(ballast.__file__).parents[2]


def save_run(folder: str, wait: str, clones: bool) -> None:
    """Train a run in another process, change a parameter, and save."""
    library = str(BUILD / "tests" / "libballast_reflinks.so")
    paths = os.pathsep.join([str(BUILD / "python"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "LD_PRELOAD": library}
    subprocess.run([sys.executable, __file__, folder, wait, "01"[clones]], env=environment, check=True, timeout=600)


def continued(folder: Path) -> list[float]:
    model = Layers()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    ballast.load_checkpoint(folder / "saved", model, optimizer)
    assert optimizer.steps == STEPS
    return losses_until(2 * STEPS, model, optimizer)


@pytest.mark.parametrize("wait", ["wait", ""])
def test_the_records_of_a_run_are_cloned_into_its_checkpoint(wait, tmp_path):
    for name in ("cloned", "copied"):
        save_run(str(tmp_path / name), wait, clones=name == "cloned")
    data = [next((tmp_path / name / "saved").glob("*/rank-00000.json")).read_text() for name in ("cloned", "copied")]
    assert ["in_records" in each for each in data] == [True, False]
    assert continued(tmp_path / "cloned") == continued(tmp_path / "copied")
    saved = manifest.read(tmp_path / "cloned" / "saved")
    assert len({piece.offset for piece in saved.tensors["one.weight"].pieces}) > 1  # several records
    assert manifest.problems_of(tmp_path / "cloned" / "saved") == []
    assert main(["export", str(tmp_path / "cloned" / "saved"), str(tmp_path / "exported")]) == 0


def test_damage_of_a_cloned_record_is_found(tmp_path):
    save_run(str(tmp_path), "wait", clones=True)
    data = next((tmp_path / "saved").glob("*/rank-00000.data"))
    content = bytearray(data.read_bytes())
    content[4096 + 8] ^= 1  # in the payload of the first record
    data.write_bytes(content)
    [problem] = manifest.problems_of(tmp_path / "saved")[:1]
    assert "cannot use a record: its first region is damaged" in problem
    with pytest.raises(ballast.Error, match="B3202"):
        continued(tmp_path)


if __name__ == "__main__":
    ctypes.c_int.in_dll(ctypes.CDLL(None), "ballast_reflinks").value = int(sys.argv[3])
    place = Path(sys.argv[1])
    (place / "run").mkdir(parents=True)
    layers = Layers()
    options = keywords(tile=128, **kept_in(place / "run"))
    adamw = ballast.wrap(torch.optim.AdamW(layers.parameters(), lr=1e-2), layers, **options)
    losses_until(STEPS, layers, adamw)
    with ballast.gather(layers), torch.no_grad():
        layers.one.bias.add_(1)
    pending = ballast.save(place / "saved", layers, adamw, wait=bool(sys.argv[2]))
    losses_until(STEPS + 2, layers, adamw)  # overwrites both generations of the records
    if pending is not None:
        pending.wait()
    adamw.close()
