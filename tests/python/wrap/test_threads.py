"""Tests that one thread at a time trains, in the process that has wrapped the optimizer."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import ballast
import pytest
import torch
from python.wrap.support.ranks import run_ranks
from python.wrap.support.threads import CALLS, Training, trained_in_a_fork


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
