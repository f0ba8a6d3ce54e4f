"""Tests that a process ends without output, whatever still holds a wrapped optimizer."""

import subprocess
import sys

import pytest
from python.exits import ROOT, folder_with_dill, folder_without_dill, run_silently

TRAINING = """
import atexit, sys, threading
import ballast, torch
from python.wrap.support.loops import mlp, mean_square

def trained(stage=2, **options):
    model = mlp()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage, **options)
    mean_square(model, torch.ones(20)).backward()
    optimizer.step()
    optimizer.model = model
    return optimizer
"""
HOLDERS = """
atexit.register(lambda: in_a_global.close())  # called after Ballast's own, which are registered later
atexit.register(lambda: globals().update(born_at_exit=trained(stage=3)))
in_a_global = trained()
closed = trained(stage=3)
closed.close()
torch.kept = trained(stage=3)  # in a module
sys.modules["a module of its own"] = type(sys)("own")
sys.modules["a module of its own"].kept = trained(stage=0)

def closure(optimizer):
    return lambda: optimizer.steps

by_a_closure = closure(trained())
in_a_cycle = trained(stage=3)
in_a_cycle.cycle = [in_a_cycle]
del in_a_cycle
state = trained().state_dict()
in_the_middle_of_a_step = trained(stage=3)
in_the_middle_of_a_step.zero_grad()
mean_square(in_the_middle_of_a_step.model, torch.ones(20)).backward()
try:
    ballast.wrap(torch.optim.AdamW(mlp().parameters()), stage=3)
except ballast.Error as error:
    refused = error  # and its traceback, which has the session

def in_a_daemon_thread():
    kept = trained()
    there.set()
    stays.wait()

there, stays = threading.Event(), threading.Event()
thread = threading.Thread(target=in_a_daemon_thread, daemon=True)
thread.start()
there.wait()
"""
SYS_MODULES_ARE_CLEARED = """
kept = trained(stage=3)
all_of_them = list(sys.modules.values())
sys.modules.clear()
"""


@pytest.mark.parametrize("with_dill", [True, False])
def test_exit_is_silent_whatever_holds_an_optimizer(with_dill, environment, tmp_path):
    folder = folder_with_dill() if with_dill else folder_without_dill(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(f'{TRAINING}assert bool(sys.modules.get("dill")) is {with_dill}\n{HOLDERS}')
    run_silently([program], environment, folder)


def test_exit_is_silent_after_sys_modules_is_cleared(environment, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TRAINING + SYS_MODULES_ARE_CLEARED)
    run_silently([program], environment)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_exception_in_a_step_is_the_only_output(stage, environment, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        f"{TRAINING}kept = trained(stage={stage})\nkept.zero_grad()\n"
        'mean_square(kept.model, torch.ones(20)).backward()\nraise ValueError("mine")\n'
    )
    paths = {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{ROOT / 'tests'}"}
    ended = subprocess.run([sys.executable, program], env=paths, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback") and ended.stderr.endswith("\nValueError: mine\n")
    assert ended.stderr.count("Traceback") == 1
