"""Tests of the table of steps: it fits the build, and each test that needs a GPU has a step."""

import os
import re
import subprocess
from pathlib import Path

from on_a_gpu.cases import CASES
from on_a_gpu.judge import LANES, LOSSES, SPEEDS, TESTS
from on_a_gpu.machine import ROOT, Machine, unpack_built
from on_a_gpu.steps import all_steps
from on_a_gpu.trainings import SYSTEMS

STEPS = all_steps(Machine(ROOT / "build" / "on_a_gpu"))
NAMES = [step.name for step in STEPS]


def targets_of(step):
    targets = step.command[step.command.index("--target") + 1 :]
    return targets[: targets.index("--")] if "--" in targets else targets


BUILT = {target for step in STEPS if step.name.startswith("build-") for target in targets_of(step)}


def cmake_files() -> str:
    files = subprocess.run(["git", "ls-files", "*CMakeLists.txt"], cwd=ROOT, capture_output=True, text=True, check=True)
    return "".join((ROOT / name).read_text() for name in files.stdout.split())


def test_names_are_unique_and_a_step_comes_after_what_it_needs():
    assert len(set(NAMES)) == len(NAMES)
    for step in STEPS:
        assert not step.after or NAMES.index(step.after) < NAMES.index(step.name)


def test_other_architectures_are_built_in_another_folder(tmp_path):
    folders = {Machine(tmp_path, architectures=each).build for each in ("90-real", "80-real;90-real")}
    assert len(folders) == 2 and not any(";" in folder.name for folder in folders)


def test_what_is_built_is_in_the_build():
    text = cmake_files()
    for target in BUILT:
        kind, _, folder = target.partition("_")
        declared = {"test": f"ballast_tests({folder} ", "benchmark": f"ballast_benchmark({folder} "}.get(kind, "")
        assert declared and declared in text or re.search(rf"add_(executable|library)\({target} |add_module\({target} ", text)


def test_all_programs_are_built_together_before_their_steps():
    together = {*targets_of(next(step for step in STEPS if step.name == "build-all"))}
    assert BUILT - together <= {"test_kernels", "_core"}  # there is no target _core where Python's headers are missing


def test_each_folder_with_gpu_tests_is_built_and_chosen_by_one_step():
    tagged = {path.parent.name for path in (ROOT / "tests").rglob("*_test.cpp") if "[gpu]" in path.read_text()}
    chosen = [step for step in STEPS if step.command[:1] == ("ctest",)]
    for folder in tagged:
        assert f"test_{folder}" in BUILT
        assert sum(chooses(step.command, f"{folder}:a test") for step in chosen) == 1


def chooses(command: tuple[str, ...], test: str) -> bool:
    option, pattern = next(pair for pair in zip(command, command[1:]) if pair[0] in ("-R", "-E"))
    return (re.search(pattern, test) is not None) == (option == "-R")


def test_each_python_file_with_gpu_tests_is_run():
    command = next(step.command for step in STEPS if step.name == "test-python")
    files = (ROOT / "tests" / "python").rglob("test_*.py")
    marked = [path for path in files if "from python.wrap.support.devices import" in path.read_text()]
    assert len(marked) > 1
    assert {str(path.relative_to(ROOT)) for path in marked} <= set(command)


def test_each_case_has_a_step_and_each_verdict_a_case_or_a_step():
    assert [name for name in NAMES if name.startswith("train-")] == [f"train-{case}" for case in CASES]
    assert {case.system for case in CASES.values()} == set(SYSTEMS)
    judged = [name for pair in [*LOSSES, *SPEEDS] for name in pair[:2]] + [case for case, *_ in LANES]
    assert set(judged) <= set(CASES)
    assert set(TESTS) <= set(NAMES)


def test_trainings_come_before_the_tests_that_have_passed_on_the_emulation():
    trainings = [NAMES.index(f"train-{case}") for case in CASES]
    tests = [NAMES.index(name) for name in NAMES if name.startswith("test-") or name.endswith("check")]
    assert max(NAMES.index("kernels-quick"), NAMES.index("llama-losses"), NAMES.index("rates-gpu")) < min(trainings)
    assert max(trainings) < min(tests)


def test_a_rehearsal_compiles_nothing(tmp_path):
    names = {step.name for step in all_steps(Machine(tmp_path, emulated=tmp_path))}
    assert names == {name for name in NAMES if name != "configure" and not name.startswith("build-")}


def call_of(steps, seconds):
    """Return the steps of a call, as the runner begins them, and those that it leaves."""
    begun, left_over = [], []
    for step in steps:
        fits = step.estimate_s <= seconds
        seconds -= step.estimate_s if fits else 0
        (begun if fits else left_over).append(step)
    return begun, left_over


def test_all_steps_fit_a_call_of_8_and_one_of_5_minutes():
    packed = [step for step in STEPS if step.name != "configure" and not step.name.startswith("build-")]
    assert all(step.estimate_s > 0 and step.limit_s >= 2 * step.estimate_s for step in packed)
    first, left_over = call_of(packed, 8 * 60)
    assert {f"train-{case}" for case in CASES} <= {step.name for step in first}
    second, never = call_of(left_over, 5 * 60)
    assert never == []


def test_packed_programs_find_the_tree_at_the_path_where_they_were_compiled(tmp_path):
    root, there = tmp_path / "tree", tmp_path / "srv" / "ballast"
    folder = tmp_path / "packed" / "build" / "on_a_gpu"
    folder.mkdir(parents=True)
    (folder / "compiled_at.txt").write_text(f"{there}\n")
    (root / "build").mkdir(parents=True)
    assert unpack_built(root) == ""  # nothing is packed
    subprocess.run(["tar", "-cJf", root / "build" / "on_a_gpu_built.tar.xz", "-C", tmp_path / "packed", "build"], check=True)
    for _ in range(2):
        assert unpack_built(root) == ""
        assert there.samefile(root)
    there.unlink()
    there.mkdir()
    assert str(there) in unpack_built(root)


def test_the_tests_of_a_step_run_together_except_those_that_look_at_free_memory():
    text = (ROOT / "tests" / "CMakeLists.txt").read_text()
    assert "RESOURCE_LOCK" not in text
    assert re.findall(r"ballast_tests\((\w+) ALONE_ON_GPU", text) == ["runtime"]


def test_the_pack_has_each_library_of_the_build():
    bootstrap, pack = (ROOT / ".ci" / "bootstrap").read_text(), (ROOT / "tests" / "on_a_gpu" / "pack").read_text()
    tables = re.findall(r'^(?:package|build)_packages=".*?\n(.*?)^"', bootstrap, re.M | re.S)
    assert len(tables) == 2
    rows = [line.split() for line in "".join(tables).splitlines() if "certificates" not in line]
    asked_of_dpkg = {row[0] for row in rows if row[1] == "-"}
    packed = set(re.search(r"^libraries=\((.*)\)", pack, re.M).group(1).split())
    assert asked_of_dpkg - packed == {"libgloo-dev", "libdnnl-dev"}  # optional; `pack` says why


def test_the_list_needs_nothing_built(tmp_path):
    command = [str(ROOT / "tests" / "on_a_gpu" / "run"), "--list"]
    environment = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path)}
    listed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert [line.split()[0] for line in listed.stdout.splitlines()] == NAMES


def test_a_step_is_chosen_with_those_before_it(tmp_path):
    command = [str(ROOT / "tests" / "on_a_gpu" / "run"), "--list", "--only", "test-k*"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OUT": str(tmp_path)})
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["configure", "build-kernels", "test-kernels"]


def test_an_unknown_step_is_refused():
    refused = subprocess.run([str(Path(ROOT, "tests/on_a_gpu/run")), "--only", "everything"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "there is no step everything" in refused.stderr
