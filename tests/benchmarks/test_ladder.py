"""Tests of the ladder: its models, how it climbs, what ends a training, and tiny models. They need the built package."""

import json
import os
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import ladder
import pytest
import suite
from control_group import ControlGroup
from python.conftest import BUILT

if not BUILT or find_spec("torch") is None:
    pytest.skip("the Python package is not built, or torch is missing", allow_module_level=True)

TINY = ladder.Llama("tiny", layers=2, width=64, inner=128, heads=4, key_value_heads=2)
IN_CPP = next(system for system in ladder.SYSTEMS if system.trainer == ladder.CPP)


class NoLimit:
    """Stands in for a control group."""

    kills = 0

    def __enter__(self) -> "NoLimit":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def enter(self) -> None:
        pass


class Killed(NoLimit):
    kills = 1


def attempt(script: str, limit: type, directory: Path, monkeypatch: pytest.MonkeyPatch) -> ladder.Outcome:
    program = directory / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(ladder, "ControlGroup", lambda *names: limit())
    monkeypatch.setattr(ladder, "limit_memory", lambda group, byte_count: None)
    monkeypatch.setattr(ladder, "kills_in", lambda group: group.kills)
    return ladder.attempt(ladder.Case(IN_CPP, TINY), str(program), directory, 1 << 30)


def test_models_rise_and_have_as_many_parameters_as_transformers_makes():
    import torch

    transformers = pytest.importorskip("transformers")
    sizes = [model.parameters for model in ladder.MODELS]
    assert sizes == sorted(sizes)
    for model in (TINY, *ladder.MODELS):
        with torch.device("meta"):
            made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.config))
        assert sum(parameter.numel() for parameter in made.parameters()) == model.parameters


def test_a_system_climbs_until_it_does_not_train():
    tried = []

    def attempt(case: ladder.Case) -> ladder.Outcome:
        tried.append(case)
        return ladder.Outcome(ended="killed" if case.model.name == "1B" and case.system.name == "DDP" else "")

    assert [case for case, _ in ladder.climb(ladder.CASES, attempt)] == list(dict.fromkeys(tried))
    of_ddp = [case.model.name for case in tried if case.system.name == "DDP"]
    assert of_ddp == ["125M", "350M", "1B", "1B"]
    assert len(tried) == len(ladder.CASES) - len(ladder.MODELS) + len(of_ddp)


def test_a_training_has_seconds_and_a_peak(tmp_path, monkeypatch):
    outcome = attempt("echo loss 9; sleep 0.1; echo loss 8; sleep 0.1; echo loss 7", NoLimit, tmp_path, monkeypatch)
    assert outcome.ended == ""
    assert outcome.seconds > 0  # the lines may be read later than they were written, and close together
    assert outcome.peak_bytes > 0


def test_what_ended_is_named_with_its_phase(tmp_path, monkeypatch):
    script = "echo wrapping the model; exit 9"
    assert attempt(script, Killed, tmp_path, monkeypatch).ended == "killed while wrapping the model"
    assert attempt(script, NoLimit, tmp_path, monkeypatch).ended == "failed while wrapping the model, with code 9"


def test_what_the_drive_cannot_keep_is_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(ladder, "LEFT_FREE", 1 << 60)
    assert attempt("exit 1", NoLimit, tmp_path, monkeypatch).ended.startswith("not tried: it needs 0 GB of the drive")


@pytest.mark.parametrize(
    "version, limits, events",
    [
        ("memory", {"memory.limit_in_bytes": "4096", "memory.memsw.limit_in_bytes": "4096"}, "memory.oom_control"),
        ("", {"memory.max": "4096", "memory.swap.max": "0"}, "memory.events"),
    ],
)
def test_a_control_group_limits_memory_and_swap(version, limits, events, tmp_path):
    (tmp_path / version).mkdir(exist_ok=True)
    (tmp_path / "cgroup.subtree_control").touch()
    group = ControlGroup("ladder", "memory", "memory", tmp_path).__enter__()
    ladder.limit_memory(group, 4096)
    [folder] = (tmp_path / version).glob("ballast-*")
    assert {file.name: file.read_text() for file in folder.iterdir()} == limits
    (folder / events).write_text("under_oom 0\noom_kill 2\n")
    assert ladder.kills_in(group) == 2


def test_records_have_a_peak_or_a_reason():
    case = ladder.CASES[0]
    seconds, peak = ladder.records(case, ladder.Outcome(2.5, 3 << 30), 4 << 30)
    assert (seconds["case"], seconds["value"], peak["value"], peak["unit"]) == (case.name, 2.5, 3, "GiB")
    [ended] = ladder.records(case, ladder.Outcome(ended="killed while wrapping the model"), 4 << 30)
    assert ended["case"] == f"{case.name}, killed while wrapping the model"
    assert ended["value"] == 4


@pytest.mark.parametrize("trainer", ["Ddp", "Fsdp", "Ballast"])
def test_a_tiny_model_is_trained(trainer, tmp_path):
    pytest.importorskip("transformers")
    system = next(each for each in ladder.SYSTEMS if each.trainer == trainer)
    program = (
        "import sys, pathlib, ladder\n"
        f"system = next(each for each in ladder.SYSTEMS if each.name == {system.name!r})\n"
        f"ladder.train(ladder.Case(system, ladder.Llama(*{tuple(TINY)!r})), pathlib.Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    [rank] = suite.start_ranks(1, lambda rank: command, lambda rank: {"env": paths, "stdout": subprocess.PIPE, "text": True})
    said = rank.communicate()[0].splitlines()
    assert rank.returncode == 0
    assert said[:3] == ["building the model", "wrapping the model", "in forward of step 1"]
    assert sum(line.startswith("loss ") for line in said) == ladder.STEPS


def test_recorded_runs_have_each_system():
    files = (suite.ROOT / "benchmarks" / "results").glob("ladder*.jsonl")
    cases = {json.loads(line).get("case", "") for file in files for line in file.read_text().splitlines()}
    assert {system.name for system in ladder.SYSTEMS} == {case.partition(": ")[0] for case in cases if case}
