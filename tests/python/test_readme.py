"""Tests of the top-level README.md: its code runs, its figures are those of the recorded run, and its links resolve."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from launching import torchrun
from python.wrap.support.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DRAWINGS = ROOT / "docs" / "drawings"
BLOCK = re.compile(r"(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)")


def programs() -> list[str]:
    return [text for not_run, language, text in BLOCK.findall(README) if language == "python" and not not_run]


def recorded() -> dict[str, list[dict]]:
    """Return the lines of the recorded run by case."""
    lines: dict[str, list[dict]] = {}
    for text in (ROOT / "benchmarks" / "results" / "peers-training.jsonl").read_text().splitlines()[1:]:
        line = json.loads(text)
        lines.setdefault(line["case"], []).append(line)
    return lines


def rows() -> list[list[str]]:
    """Return the cells of the rows whose figures are in the recorded run."""
    table = README[README.index("| two ranks, 303M") :].split("\n\n")[0]
    cells = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return [row for row in cells if "between two hosts" not in row[0]]


def relative_to_ddp(lines: list[dict]) -> float:
    return next((line["ratio"] for line in lines if line["against"] == "DDP"), 1.0)


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_training_loop_trains(ranks: int, environment: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (program,) = programs()
    (tmp_path / "train.py").write_text(program)
    ended = run_program([*(torchrun(2) if ranks > 1 else []), "train.py"], {**environment, "OMP_NUM_THREADS": "1"}, tmp_path)
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", ended.stdout)]
    assert len(losses) == 20 * ranks
    assert losses[-1] < losses[0]


def test_the_added_line_is_the_same_everywhere() -> None:
    blocks = [text for _, language, text in BLOCK.findall(README) if language == "python"]
    assert all("optimizer = ballast.wrap(optimizer, model, stage=3, offload=" in block for block in blocks)
    assert len(blocks) == 2


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_figure_is_the_recorded_one(row: list[str]) -> None:
    name, speed, speed_ratio, memory, memory_ratio = row
    lines = recorded()[f"303M: {name}"]
    mebibytes, of_ddp = (recorded()[f"303M: {system}, memory"][0]["value"] for system in (name, "DDP"))
    assert speed == f"{lines[0]['value']:,.0f}"
    assert speed_ratio == f"{relative_to_ddp(lines):.2f}"
    assert memory == f"{mebibytes:,.0f}"
    assert memory_ratio == f"{mebibytes / of_ddp:.2f}"


def test_the_speeds_of_the_first_screen_are_the_recorded_ones() -> None:
    text = " ".join(README.split())
    found = re.search(r"([\d.]+) times as fast as with DDP, ([\d.]+) times as fast as with FSDP2 and ([\d.]+) times", text)
    assert found is not None
    ratios = {line["against"]: line["ratio"] for line in recorded()["303M: Ballast stage 3"]}
    assert found[1] == f"{ratios['DDP']:.2f}"
    assert found[2] == f"{ratios['FSDP2']:.1f}"
    assert found[3] == f"{ratios['DeepSpeed ZeRO 3']:.1f}"


@pytest.mark.parametrize("link", sorted({link for link in LINK.findall(README) if "://" not in link}))
def test_a_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def drawing_script(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in (DRAWINGS, ROOT / "benchmarks" / "harness", ROOT / "benchmarks" / "peers-training"):
        monkeypatch.syspath_prepend(folder)  # what the scripts' common module adds is undone after the first test
    spec = importlib.util.spec_from_file_location(f"drawing_{script}", DRAWINGS / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["where_bytes_live", "peers", "largest_model", "path_of_a_step"])
def test_a_drawing_is_what_its_script_draws(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawing = script.replace("_", "-") + ".svg"
    drawing_script(script, monkeypatch).draw().write(tmp_path / drawing)
    assert (tmp_path / drawing).read_text() == (DRAWINGS / drawing).read_text()


def test_the_path_of_a_step_names_functions_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = drawing_script("path_of_a_step", monkeypatch).HOPS
    assert len(hops) <= 8
    for function, file, _ in hops:
        text = (ROOT / file).read_text()
        owner, name = function.replace("::", ".").split(".")
        python = f"class {owner}" in text and f"    def {name}(" in text
        in_class = f"class {owner} " in text and f" {name}(" in text
        assert python or in_class or f" {owner}::{name}(" in text, (function, file)


def test_the_plan_that_it_names_fits(run):
    (words,) = re.findall(r"`ballast (plan [^`]+)`", README)
    assert run(*words.split())[0] == 0
