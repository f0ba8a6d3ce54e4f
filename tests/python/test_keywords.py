"""Tests of the keywords of wrap(), plan() and pareto_front(): type checkers and help() see them, misspelt ones are refused."""

import doctest
import inspect
import os
import pydoc
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import ballast
import pytest
from ballast import _core
from ballast.formats import StateFormat
from ballast.options import Options
from ballast.schema import options_of
from ballast.wrap_options import WrapOptions

ROOT = Path(__file__).resolve().parents[2]
TYPED = Path(__file__).with_name("typed")  # programs that use a wrapped optimizer
WITH_KEYWORDS = (ballast.wrap, ballast.plan, ballast.pareto_front)
SCREEN = 60  # lines

RIGHT = """
import ballast
import torch
from torch.distributed.device_mesh import init_device_mesh

model = torch.nn.Linear(4, 1)
adamw = torch.optim.AdamW(model.parameters())
wrapped: torch.optim.AdamW = ballast.wrap(
    adamw,
    model,
    stage=3,
    offload={"state": {"device": 0.25, "nvme:/scratch": 0.75}, "gradients": "host"},
    memory="40GiB",
    state_format="compact",
    gradient_format=("fp32", "bf16"),
    mesh=init_device_mesh("cpu", (2,)),
    run=ballast.Run("mine", mirror=True),
    tuning=ballast.Tuning(units=["Block"], keep_gathered="4GiB"),
)
ballast.wrap(adamw, stage="auto", offload="auto", memory=1 << 30, run="mine", max_grad_norm=1)
seconds: float = ballast.plan("gpt2", ranks=2, stage="auto", rates={"read": "3GB/s"}, state_format="bf16").seconds
plans: list[ballast.Plan] = ballast.pareto_front({"h.0.weight": (4, 4)}, offload={"state": "host"}, gpu_memory="8GiB")
"""

NO_VARIANT = 'No overload variant of "__call__" of "Wrap" matches argument types "AdamW",'
# A line of a user's script, and mypy's first error for it.
WRONG = [
    ("ballast.wrap(adamw, stag=3)", 'Unexpected keyword argument "stag" for overloaded function "__call__" of "Wrap"'),
    ("ballast.wrap(adamw, stage=2.5)", 'No overload variant of "__call__" of "Wrap" matches argument types "AdamW", "float"'),
    ('ballast.wrap(adamw, stage="three")', NO_VARIANT),
    ('ballast.wrap(adamw, state_format="fp8")', 'Argument "state_format" to "__call__" of "Wrap" has incompatible type'),
    ('ballast.wrap(adamw, gradient_format="fp8")', 'Argument "gradient_format" to "__call__" of "Wrap"'),
    ('ballast.wrap(adamw, offload={"state": 3})', "Dict entry 0 has incompatible type"),
    ('ballast.wrap(adamw, tuning="fast")', NO_VARIANT),
    ('ballast.Tuning(timeline="yes")', 'Argument "timeline" to "Tuning" has incompatible type "str"'),
    ("ballast.wrap(model)", 'No overload variant of "__call__" of "Wrap" matches argument type "Linear"'),
    ('ballast.plan("gpt2", rank=2)', 'Unexpected keyword argument "rank" for "__call__" of "Planning"'),
    ('ballast.plan("gpt2", ranks="2")', 'Argument "ranks" to "__call__" of "Planning" has incompatible type "str"'),
    ('ballast.pareto_front("gpt2", rank=2)', 'Unexpected keyword argument "rank" for "__call__" of "Planning"'),
    ('ballast.pareto_front("gpt2", state_format="fp8")', 'Argument "state_format" to "__call__" of "Planning"'),
]


def lines_with_errors() -> set[tuple[str, int]]:
    """Return the marked lines of typed/wrong.py. typed/right.py has none."""
    lines = (TYPED / "wrong.py").read_text().splitlines()
    return {("wrong.py", number) for number, line in enumerate(lines, start=1) if line.endswith("# error")}


def mypy(script: Path) -> dict[tuple[str, int], str]:
    """Return the first error of each line of the script, and of the programs of typed/. One call takes half a minute: it
    reads torch."""
    pytest.importorskip("mypy", reason="mypy is not installed: .ci/bootstrap venv")
    pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")
    folder = script.parent
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python"), "MYPY_CACHE_DIR": str(folder / "cache")}
    programs = [shutil.copy(program, folder) and program.name for program in TYPED.glob("*.py")]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", script.name, *programs]
    ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    errors = [line.split(":", maxsplit=3) for line in ended.stdout.splitlines() if ": error:" in line]
    assert {file for file, *_ in errors} <= {script.name, *programs}, ended.stdout
    return {(file, int(number)): text for file, number, _, text in reversed(errors)}


def test_mypy_knows_the_keywords_and_their_types(tmp_path):
    script = tmp_path / "user.py"
    script.write_text(RIGHT + "".join(f"{line}\n" for line, _ in WRONG))
    found = mypy(script)
    expected = {(script.name, RIGHT.count("\n") + number): said for number, (_, said) in enumerate(WRONG, 1)}
    assert set(found) == set(expected) | lines_with_errors(), found  # no errors in the lines of RIGHT
    for place, said in expected.items():
        assert said in found[place]


def keywords_of(function) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


def test_the_signature_has_every_option_and_its_default():
    assert list(keywords_of(ballast.wrap)) == list(options_of(WrapOptions))
    assert list(keywords_of(ballast.plan)) == list(options_of(Options))
    assert keywords_of(ballast.plan) == keywords_of(ballast.pareto_front)
    for function in WITH_KEYWORDS:
        assert inspect.Parameter.empty not in keywords_of(function).values()
        assert not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(function).parameters.values())
    assert (keywords_of(ballast.wrap)["stage"], keywords_of(ballast.plan)["tokens"]) == (2, 8192)


def test_wrap_has_few_keywords():
    assert len(keywords_of(ballast.wrap)) <= 14


@pytest.mark.parametrize("kind", [WrapOptions, Options, ballast.Tuning, ballast.Run])
def test_each_option_has_a_meaning(kind):
    assert all(option.meaning for option in options_of(kind).values())


@pytest.mark.parametrize("kind", [WrapOptions, Options, ballast.Tuning, ballast.Run])
def test_the_library_has_each_option_that_is_for_it(kind):
    names = {option.core for option in options_of(kind).values() if option.core}
    assert names <= {*dir(_core.TrainingOptions), *dir(_core.Question)}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("prefetch", "tuning=ballast.Tuning(prefetch=...)"),
        ("timeout", "tuning=ballast.Tuning(timeout=...)"),
        ("mirror", 'run=ballast.Run("NAME", mirror=...)'),
        ("process_group", "mesh=, a DeviceMesh of these ranks"),
    ],
)
def test_an_option_of_another_place_is_refused_with_that_place(name, place):
    with pytest.raises(ballast.UsageError, match=f'B1001 there is no option "{name}" here') as refused:
        ballast.wrap(object(), **{name: 2})
    assert refused.value.needed == place


def test_each_function_returns_what_its_signature_says():
    assert inspect.signature(ballast.plan).return_annotation == "Plan"
    assert inspect.signature(ballast.pareto_front).return_annotation == "list[Plan]"


def test_the_words_are_those_of_the_library():
    assert set(typing.get_args(StateFormat)) == {known.name for known in _core.StateFormat}


@pytest.mark.parametrize(
    ("function", "name", "nearest"),
    [
        (ballast.wrap, "stag", "stage"),
        (ballast.wrap, "max_norm", "max_grad_norm"),
        (ballast.wrap, "run_name", "run"),
        (ballast.plan, "rank", "ranks"),
        (ballast.pareto_front, "host_mem", "host_memory"),
        (ballast.plan, "state_fmt", "state_format"),
        (ballast.plan, "drives", "drive_space"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_nearest(function, name, nearest):
    with pytest.raises(ballast.UsageError, match=f'B1001 there is no option "{name}"') as refused:
        function(object(), **{name: 2})
    assert refused.value.remedy == f'Did you mean "{nearest}"?'


@pytest.mark.parametrize("function", WITH_KEYWORDS)
def test_help_is_one_screen_and_names_every_option(function):
    page = pydoc.plain(pydoc.render_doc(function)).splitlines()
    assert len(page) <= SCREEN
    explained = {line.split()[0] for line in page if line.startswith("    ") and line.split()}
    if function is not ballast.pareto_front:  # it refers to plan()
        assert set(keywords_of(function)) <= explained


@pytest.mark.parametrize("function", WITH_KEYWORDS)
def test_the_example_in_the_help_runs(function):
    module = sys.modules[function.__module__]
    [found] = doctest.DocTestFinder(recurse=False).find(function, function.__name__, module=module)
    assert len(found.examples) > 1
    if function is ballast.wrap:
        pytest.importorskip("torch", reason="torch is not installed: .ci/bootstrap venv torch")
    assert doctest.DocTestRunner().run(found).failed == 0
