"""Tests that a refused ballast.wrap() changes neither the optimizer nor the model, and can be repeated."""

import atexit
import copy

import ballast
import pytest
import torch
from ballast.torch.process_groups import ProcessGroups
from ballast.torch.training import preconditions
from python.wrap.support.loops import keywords, mlp


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


class TrainingFails(PeerHasFailed):
    """Ranks have connected, and this one cannot make its training."""

    def __init__(self, patch, make):
        super().__init__(patch, make)
        patch.undo()
        patch.setattr("ballast.torch.training.model_and_optimizer.ModelAndOptimizer", self.fail)
        self.left, leave = [], ProcessGroups.leave
        patch.setattr(ProcessGroups, "leave", lambda ranks: self.left.append(leave(ranks)))

    def mend(self):
        assert len(self.left) == 1  # the other ranks wait for this one
        super().mend()


class Lazy(Refusal):
    """A module gets the shapes of its parameters when it is called."""

    def __init__(self, **options):
        super().__init__(lambda: torch.nn.Sequential(torch.nn.LazyLinear(80), torch.nn.LazyBatchNorm1d()), **options)

    def mend(self):
        super().mend()
        self.model(torch.ones(2, 20))


class LazyWithoutModel(Lazy):
    def __init__(self, **options):
        super().__init__(**options)
        self.given = None


class ListOfModules(Refusal):
    def __init__(self, **options):
        super().__init__(**options)
        self.given = [*self.model]


class GroupsDiffer(Refusal):
    """Two parameter groups of Adam need different rules."""

    def __init__(self):
        super().__init__(stage=2)
        decoupled, other = ({"params": layer.parameters()} for layer in (self.model[0], self.model[2]))
        self.optimizer = torch.optim.Adam([{**decoupled, "decoupled_weight_decay": True}, other], weight_decay=0.1)

    def mend(self):
        self.optimizer.param_groups[0]["decoupled_weight_decay"] = False


REFUSALS = {
    "no model": lambda folder, patch: WithoutModel(mlp, stage=3),
    "trained by another": lambda folder, patch: TrainedByAnother(),
    "unknown format": lambda folder, patch: UnknownFormat(mlp),
    "deferred, no model": lambda folder, patch: WithoutModel(deferred, stage=2),
    "deferred, unknown format": lambda folder, patch: UnknownFormat(deferred),
    "budget": lambda folder, patch: BudgetIsTooSmallForARun(folder, mlp),
    "deferred, budget": lambda folder, patch: BudgetIsTooSmallForARun(folder, deferred),
    "lazy": lambda folder, patch: Lazy(stage=3),
    "lazy, no model": lambda folder, patch: LazyWithoutModel(stage=2),
    "groups": lambda folder, patch: GroupsDiffer(),
    "list of modules": lambda folder, patch: ListOfModules(stage=3),
    "peer": lambda folder, patch: PeerHasFailed(patch, mlp),
    "training": lambda folder, patch: TrainingFails(patch, mlp),
    "deferred, peer": lambda folder, patch: PeerHasFailed(patch, deferred),
}


SAID = {
    "lazy": r"a lazy module has no values yet(.|\n)*parameter 0.weight(.|\n)*Call the model once before ballast.wrap\(\)",
    "lazy, no model": r"a lazy module has no values yet(.|\n)*parameter 0 of param_groups\[0\]",
    "groups": r"another decoupled_weight_decay(.|\n)*param_groups\[0\], updated as AdamW, and param_groups\[1\], updated as A",
    "list of modules": "cannot wrap an optimizer of a list: it is no model(.|\n)*torch.nn.ModuleList",
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
    with pytest.raises(ballast.Error, match=SAID.get(kind)) as refused:  # its traceback holds the training
        ballast.wrap(optimizer, refusal.given, **keywords(**refusal.options))
    assert (looks(model, optimizer), at_exit) == (before, called)
    refusal.mend()
    optimizer = ballast.wrap(optimizer, model, **keywords(**refusal.options))
    with ballast.gather(model):
        pass
    model(torch.ones(2, 20)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 1
    optimizer.close()
    del refused


class Phases(torch.nn.Module):
    """Multiplies by complex numbers, which are kept as pairs of real ones if `as_real`."""

    def __init__(self, as_real: bool) -> None:
        super().__init__()
        self.as_real, self.first = as_real, torch.nn.Linear(4, 4)
        phases = torch.ones(4, dtype=torch.complex64)
        self.phases = torch.nn.Parameter(torch.view_as_real(phases).clone() if as_real else phases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) * (torch.view_as_complex(self.phases) if self.as_real else self.phases)).abs()


def test_the_remedy_for_a_complex_parameter_helps():
    with pytest.raises(ballast.UsageError, match=r"B1005 [^$]*complex64[^$]*phases[^$]*view_as_real[^$]*view_as_complex"):
        ballast.wrap(torch.optim.SGD((model := Phases(False)).parameters(), lr=0.1), model, stage=3)
    model = Phases(True)
    plain = copy.deepcopy(model)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    for each, its in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        each(torch.ones(2, 4)).sum().backward()
        its.step()
    with ballast.gather(model):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), plain.parameters()))


@pytest.mark.parametrize("what", [1, [1], None, ["weight"]])
def test_only_parameters_are_gathered(what):
    with pytest.raises(ballast.UsageError, match="B1001 cannot gather [^$]*a module, a parameter"), ballast.gather(what):
        pass
