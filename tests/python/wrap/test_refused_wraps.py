"""Tests that a refused ballast.wrap() changes neither the optimizer nor the model, and can be repeated."""

import atexit

import ballast
import pytest
import torch
from ballast.wrapper import preconditions
from python.wrap.support.loops import mlp


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class Refusal:
    """A model and an optimizer that wrap() refuses with the given options, until mend() removes the cause."""

    def __init__(self, make=mlp, **options):
        self.model = make()
        self.optimizer = adamw(self.model.parameters())
        self.options = options
        self.given = self.model

    def mend(self):
        self.given = self.model


class WithoutModel(Refusal):
    def __init__(self, make, stage):
        super().__init__(make, stage=stage)
        self.given = None


class TrainedByAnother(Refusal):
    def __init__(self):
        super().__init__(stage=2)
        self.other = ballast.wrap(adamw(self.model.parameters()), self.model)

    def mend(self):
        self.other.close()


class UnknownFormat(Refusal):
    """The last parameter has an unknown format, which is found after the others are accepted."""

    def __init__(self, make):
        super().__init__(make, stage=2)
        self.model[2].bias.data = self.model[2].bias.data.double()

    def mend(self):
        self.model[2].bias.data = self.model[2].bias.data.float()


class BudgetIsTooSmallForARun(Refusal):
    """The budget is too small for a run, whose parameters are partitioned in wrap()."""

    def __init__(self, folder, make):
        super().__init__(make, stage=2, offload=f"nvme:{folder}", run="mine", memory=100)

    def mend(self):
        del self.options["memory"]


class PeerHasFailed(Refusal):
    """Another rank fails while ranks agree on the initial values, which is the last action of wrap() that can fail."""

    def __init__(self, patch, make):
        super().__init__(make, stage=3)
        self.patch = patch
        patch.setattr(preconditions, "begin_with_same_values", self.fail)

    def fail(self, *_):
        raise ballast.FailureError("B3301 rank 1 has left")

    def mend(self):
        self.patch.undo()


def deferred():
    with ballast.deferred():
        return torch.nn.Sequential(torch.nn.Linear(20, 80), torch.nn.Tanh(), torch.nn.Linear(80, 5))


REFUSALS = {
    "no model": lambda folder, patch: WithoutModel(mlp, stage=3),
    "trained by another": lambda folder, patch: TrainedByAnother(),
    "unknown format": lambda folder, patch: UnknownFormat(mlp),
    "deferred, no model": lambda folder, patch: WithoutModel(deferred, stage=2),
    "deferred, unknown format": lambda folder, patch: UnknownFormat(deferred),
    "budget": lambda folder, patch: BudgetIsTooSmallForARun(folder, mlp),
    "deferred, budget": lambda folder, patch: BudgetIsTooSmallForARun(folder, deferred),
    "peer": lambda folder, patch: PeerHasFailed(patch, mlp),
    "deferred, peer": lambda folder, patch: PeerHasFailed(patch, deferred),
}


def looks(model, optimizer):
    """Return everything that wrap() changes."""
    return (
        [(type(each), each.device, sorted(vars(each)), len(hooks_of(each))) for each in model.parameters()],
        [(len(each._forward_pre_hooks), len(each._forward_hooks)) for each in model.modules()],
        (type(optimizer), sorted(vars(optimizer)), dict(optimizer.state)),
    )


def hooks_of(parameter):
    return parameter._post_accumulate_grad_hooks or {}


@pytest.fixture
def at_exit(monkeypatch):
    """Return the functions that are registered with atexit, which has no list of them."""
    ballast.connect(rank=0, size=1).close()  # the first group of a process registers a function that stays
    called, register, unregister = {}, atexit.register, atexit.unregister
    monkeypatch.setattr(atexit, "register", lambda call: called.setdefault(id(call), register(call)))
    monkeypatch.setattr(atexit, "unregister", lambda call: (called.pop(id(call), None), unregister(call)))
    return called


@pytest.fixture
def patch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refused_wrap_leaves_nothing(kind, at_exit, tmp_path, patch):
    refusal = REFUSALS[kind](tmp_path, patch)
    model, optimizer = refusal.model, refusal.optimizer
    before, called = looks(model, optimizer), {**at_exit}
    with pytest.raises(ballast.Error) as refused:  # its traceback holds the session
        ballast.wrap(optimizer, refusal.given, **refusal.options)
    assert (looks(model, optimizer), at_exit) == (before, called)
    refusal.mend()
    optimizer = ballast.wrap(optimizer, model, **refusal.options)
    with ballast.gather(model):
        pass
    model(torch.ones(20)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 1
    optimizer.close()
    del refused
