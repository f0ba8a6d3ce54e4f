"""Tests of the scripts of examples/. They run as in ./quickstart, and every warning is an error."""

import runpy
import shutil
from pathlib import Path

import pytest
from launching import torchrun
from python.exits import folder_with_dill, folder_without_dill, run_silently
from python.wrap.support.programs import run_program

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SMALL = "--layers 2 --width 128 --context 64 --steps 2 --stage 3 --offload host".split()


def test_the_added_line_changes_placement_and_no_loss(environment: dict[str, str], tmp_path: Path) -> None:
    command = [EXAMPLES / "side_by_side.py", "--directory", tmp_path, "--layers", "2", "--width", "128"]
    printed = run_silently(command, environment)
    assert "loss of step 8" in printed
    assert "The losses are equal" in printed
    assert list(tmp_path.iterdir()) == []


def test_hosts_that_train_on_their_own_write_nothing_to_stderr(environment: dict[str, str]) -> None:
    environment = {**environment, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    ended = run_program([*torchrun(2), EXAMPLES / "gpt.py", *SMALL, "--every", "2", "--hosts", "2"], environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "step   2" in ended.stdout


@pytest.mark.parametrize("with_dill", [True, False])
def test_a_training_writes_nothing_to_stderr(with_dill: bool, environment: dict[str, str], tmp_path: Path) -> None:
    folder = folder_with_dill() if with_dill else folder_without_dill(tmp_path)
    environment = {**environment, "OMP_NUM_THREADS": "1"}  # otherwise torchrun warns that it sets it
    printed = run_silently([*torchrun(2), EXAMPLES / "gpt.py", *SMALL], environment, folder)
    assert "step   2" in printed


def test_the_text_to_learn_from_is_without_the_environment_of_the_user(tmp_path: Path) -> None:
    """The documentation tells users to make `venv` in the repository; its packages contain Markdown too."""
    for name in ("README.md", "docs/page.md", "venv/lib/licence.md", ".venv/licence.md", "build/notes.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "examples").mkdir()
    script = shutil.copy(EXAMPLES / "gpt.py", tmp_path / "examples")
    text = bytes(runpy.run_path(script)["text_of_this_project"]().tolist()).decode()
    assert text == "README.mddocs/page.md"
