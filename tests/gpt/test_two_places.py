"""Tests that examples/gpt/two_places.py uses a GPU only if the trainer can, with stand-ins of the trainer."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "gpt" / "two_places.py"

# Writes the files of a training, and the options of each call to `calls`. --gpu fails where the build has no CUDA.
TRAINER = """#!{python}
import json, sys
from pathlib import Path
Path({folder!r}, "calls").open("a").write(" ".join(sys.argv[1:]) + "\\n")
if "--gpu" in sys.argv and not {has_cuda}:
    sys.exit("B2101 cannot use a GPU: this build has no CUDA backend\\n  remedy: build with CUDA")
if {breaks} and "--ranks" in sys.argv:
    sys.exit("B4101 cannot write: the drive is full")
def write(option, text):
    if option in sys.argv:
        Path(sys.argv[sys.argv.index(option) + 1]).write_text(text)
step = {{"loss": 1.0, "tokens_per_second": 9.0, "bytes": {{"device": 2**20, "host": 0, "nvme": 0}}}}
write("--json", "".join(json.dumps({{"step": number, **step}}) + "\\n" for number in (1, 2)))
write("--losses", "equal")
"""


def run(folder: Path, has_cuda: bool, breaks: bool = False) -> tuple[subprocess.CompletedProcess, list[str]]:
    """Return how the script ended, and the options of each call of the trainer."""
    trainer, text = folder / "gpt", folder / "text.md"
    trainer.write_text(TRAINER.format(python=sys.executable, folder=str(folder), has_cuda=has_cuda, breaks=breaks))
    trainer.chmod(0o755)
    text.write_text("text")
    command = [sys.executable, SCRIPT, "--directory", folder, trainer, text]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return ended, (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("has_cuda", [True, False])
def test_it_trains_on_the_gpu_only_if_the_trainer_can(tmp_path: Path, has_cuda: bool) -> None:
    ended, (probe, *trainings) = run(tmp_path, has_cuda)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--gpu 0" in probe
    assert ["--gpu 0" in training for training in trainings] == [has_cuda] * 2
    assert ("GPU memory" in ended.stdout) == has_cuda
    why = "Training on the CPU: B2101 cannot use a GPU: this build has no CUDA backend"
    assert (why in ended.stdout.splitlines()) != has_cuda
    assert "are equal, bit for bit" in ended.stdout


def test_a_failed_training_shows_the_error_of_the_trainer_and_no_traceback(tmp_path: Path) -> None:
    ended, _ = run(tmp_path, has_cuda=False, breaks=True)
    assert ended.returncode == 1
    assert "B4101 cannot write: the drive is full" in ended.stderr
    assert "two_places.py: the trainer ended with 1" in ended.stderr
    assert "Traceback" not in ended.stderr
