"""Trainings that several threads, or a forked process, use at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import ballast
import torch
from python.wrap.support.loops import mlp


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
