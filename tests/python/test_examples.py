"""The scripts of python/examples, as ./quickstart runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
EXAMPLES = Path(__file__).resolve().parents[2] / "python" / "examples"


def test_the_added_line_changes_where_things_are_and_no_loss(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "side_by_side.py", "--directory", tmp_path, "--layers", "2", "--width", "128"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "loss of step 8" in run.stdout
    assert "The losses are equal" in run.stdout
    assert list(tmp_path.iterdir()) == []
