"""Tests that one thread at a time trains, in the process that has wrapped the optimizer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import mlp
from python.wrap.support.ranks import run_ranks


class Waiting(torch.optim.RMSprop):
    """An optimizer whose step waits inside of the library until it may go on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.is_inside, self.may_go_on = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> Any:
        self.is_inside.set()
        assert self.may_go_on.wait(100)
        return super().step(closure)


class Training:
    """A training of two steps, with a thread that makes the second."""

    def __init__(self, stage: int) -> None:
        self.model = mlp()
        optimizer = Waiting(self.model.parameters(), lr=0.01)
        self.is_inside, self.may_go_on = optimizer.is_inside, optimizer.may_go_on
        self.may_go_on.set()
        self.optimizer: Any = ballast.wrap(optimizer, self.model, stage=stage, tuning=ballast.Tuning(elementwise=True))
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        self.model(torch.ones(20)).square().sum().backward()

    def values(self) -> list[torch.Tensor]:
        with ballast.gather(self.model):
            return [each.detach().clone() for each in self.model.parameters()]

    def step_while(self, do: Callable[[], None]) -> None:
        """Call `do` in this thread while another one is in step()."""
        self.backward()
        self.is_inside.clear(), self.may_go_on.clear()
        thread = threading.Thread(target=self.optimizer.step, name="the other")
        thread.start()
        assert self.is_inside.wait(100)
        try:
            do()
        finally:
            self.may_go_on.set()
            thread.join()
        self.optimizer.zero_grad()


CALLS: dict[str, Callable[[Training], object]] = {
    "step()": lambda training: training.optimizer.step(),
    "zero_grad()": lambda training: training.optimizer.zero_grad(),
    "clip_grad_norm_()": lambda training: training.optimizer.clip_grad_norm_(1.0),
    "the model": lambda training: training.model(torch.ones(20)),
    "backward()": lambda training: training.model[2].weight.sum().backward(),
}


def trained_in_a_fork(rank: int, stage: int) -> int:
    """Return the exit code of a child that trains, which is 7 if it was refused."""
    model = mlp()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)

    def step() -> None:
        model(torch.ones(20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # the alarm ends a child that waits for threads that it does not have
        try:
            step()
        except ballast.UsageError as error:
            os._exit(7 if "is a fork of" in str(error) else 8)
        except BaseException:
            os._exit(9)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    step()
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("what", [name for name in CALLS if name != "backward()"])
def test_a_call_is_refused_while_another_thread_is_in_a_step(what, stage):
    def refused():
        with pytest.raises(ballast.UsageError, match=r"B1007 cannot (.|\n)*thread the other, in step\(\)") as info:
            CALLS[what](ours)
        assert f"a call of {what}:" in str(info.value)

    ours, alone = Training(stage), Training(stage)
    ours.step_while(refused)
    alone.step_while(lambda: None)
    assert all(map(torch.equal, ours.values(), alone.values()))


def test_a_backward_pass_is_refused_while_another_thread_is_in_a_step():
    def refused():
        with pytest.raises(ballast.UsageError, match=r"cannot make a call of backward\(\): another thread is in a call"):
            CALLS["backward()"](ours)

    ours = Training(2)
    ours.step_while(refused)


def test_in_stage_3_a_call_is_refused_while_another_thread_is_in_one():
    """The refused call leaves the other one, and the hooks of autograd in its thread, as they are."""

    def call_in_another_thread(*_):
        with ThreadPoolExecutor(1) as other, pytest.raises(ballast.UsageError, match="B1007 cannot make a call of the model"):
            other.submit(ours.model, torch.ones(20)).result()

    ours, alone = Training(3), Training(3)
    for training in (ours, alone):
        hook = training.model[1].register_forward_pre_hook(call_in_another_thread) if training is ours else nullcontext()
        with hook:
            training.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert all(map(torch.equal, ours.values(), alone.values()))


def test_the_library_refuses_calls_of_two_threads():
    def refused():
        core = ours.optimizer._ballast.current.core
        for call in (core.release, core.finish, lambda: core.acquire_gradients(0)):
            with pytest.raises(ballast.UsageError, match="B1007 cannot use the training: another thread is in a call of it"):
                call()

    ours = Training(2)
    ours.step_while(refused)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_process_that_trains_is_refused(stage, ranks):
    assert run_ranks(ranks, trained_in_a_fork, stage) == [7] * ranks
