"""Python files that a step and wrap() run through, and how deep their calls are. The limits may only fall."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ballast
import pytest
import torch
from python.wrap.support.loops import Loop, Tower

FOLDER = f"{Path(ballast.__file__).parent}/"


class Walk(NamedTuple):
    files: dict[str, str]  # each file with the first function that was called there
    deepest: list[str]  # calls inside of each other


class Limits(NamedTuple):
    files: int
    depth: int


# FSDP2 crosses 6 files in a step.
LIMITS = {"step": Limits(14, 7), "wrap": Limits(20, 12)}


def walk(run: Callable[[], Any]) -> Walk:
    """Note the calls of functions of the package, in this thread."""
    stack: list[str] = []
    found = Walk({}, [])

    def note(frame: Any, event: str, _: object) -> None:
        if not (path := frame.f_code.co_filename).startswith(FOLDER):
            return
        if event == "call":
            file = path.removeprefix(FOLDER)
            stack.append(f"{file}: {frame.f_code.co_name}")
            found.files.setdefault(file, stack[-1])
            if len(stack) > len(found.deepest):
                found.deepest[:] = stack
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def make(model: torch.nn.Module) -> Any:
    return ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)


def walk_of_step() -> Walk:
    loop = Loop(make_model=Tower)
    model = loop.make_model()
    optimizer = make(model)

    def step() -> None:
        loop.loss(model, loop.batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):
        step()
    found = walk(step)
    optimizer.close()
    return found


def walk_of_wrap() -> Walk:
    loop = Loop(make_model=Tower)
    make(loop.make_model()).close()  # imports modules
    model = loop.make_model()
    made: list[Any] = []
    found = walk(lambda: made.append(make(model)))
    made[0].close()
    return found


@pytest.mark.parametrize("kind", LIMITS)
def test_a_call_runs_through_few_files(kind: str) -> None:
    found = {"step": walk_of_step, "wrap": walk_of_wrap}[kind]()
    print("\n".join([f"{len(found.files)} files:", *found.files.values(), f"depth {len(found.deepest)}:", *found.deepest]))
    assert len(found.files) <= LIMITS[kind].files
    assert len(found.deepest) <= LIMITS[kind].depth
