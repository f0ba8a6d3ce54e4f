"""Tests of uncommon uses of autograd: gradients of gradients, and graphs that are used again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import ballast
import pytest
import torch
import torch.utils.checkpoint
from python.wrap.support.loops import keywords, mean_square, mlp
from python.wrap.support.ranks import run_ranks
from torch import nn


def batch() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Field(nn.Module):
    """A model that returns an energy and, if `in_forward` is set, the forces, as models of molecules do."""

    def __init__(self, in_forward: bool):
        super().__init__()
        torch.manual_seed(0)
        self.in_forward = in_forward
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1)

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        energy: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return energy

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        energy = self.energy(x)
        return energy, forces(energy, x) if self.in_forward else x


def forces(energy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(energy.float().sum(), x, create_graph=True)[0]


def penalized(penalty: str, **options: Any) -> torch.Tensor:
    """Return the losses of a training whose loss has gradients in it, and the parameters after it. With options, the
    optimizer is wrapped."""
    model = Field(in_forward=penalty == "in forward")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=penalty == "under autocast"):
            energy, found = model(batch())
        gradient = found if model.in_forward else forces(energy, found)
        loss = energy.square().mean() + (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().reshape(1))
    with ballast.gather(model):
        return torch.cat([*losses, *(each.detach().flatten().clone() for each in model.parameters())])


def penalized_on_each_rank(rank: int, penalties: list[str]) -> list[torch.Tensor]:
    return [penalized(penalty, stage=3) for penalty in penalties]


def retained(*, autocast: bool = False, **options: Any) -> tuple[Field, Any, torch.Tensor]:
    """Return a model after a step, its optimizer, and a loss whose graph has not been used."""
    model = Field(in_forward=False)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(**options))
    model(batch())[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        energy, _ = model(batch())
    return model, optimizer, energy.float().square().mean()


def used(model: Field) -> list[nn.Parameter]:
    return [each for module in (model.first, model.second, model.last) for each in module.parameters()]


def gradients(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, used(model)))


def some_are_unused(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    named = {**dict(model.named_parameters()), "unused": model.unused.weight}
    found = torch.autograd.grad(loss, named, materialize_grads=True)
    assert list(found) == list(named)
    return list(found.values())


def gradients_of_gradients(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    first = torch.autograd.grad(loss, used(model), create_graph=True)
    sum(each.square().sum() for each in first).backward()
    return [each.detach() for each in first]


def of_some_parameters(loss: torch.Tensor, model: Field) -> list[torch.Tensor]:
    loss.backward(inputs=[model.second.weight, model.last.bias])
    return []


BY_HAND = {each.__name__: each for each in (gradients, some_are_unused, gradients_of_gradients, of_some_parameters)}


def gradients_by_hand(kind: str, **options: Any) -> list[torch.Tensor]:
    """Return the gradients that a function computes in each of two steps, and the parameters after the steps."""
    model = Field(in_forward=False)
    model.unused = nn.Linear(2, 2)
    nn.init.ones_(model.unused.weight), nn.init.ones_(model.unused.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    found = []
    for _ in range(2):
        loss = model(batch())[0].square().mean()
        found += BY_HAND[kind](loss, model)
        if kind in ("gradients_of_gradients", "of_some_parameters"):
            optimizer.step()
            optimizer.zero_grad()
        model(batch())  # other units than those of the last backward pass are open
    with ballast.gather(model):
        return [*found, *(each.detach().clone() for each in model.parameters())]


class Recomputes(nn.Module):
    """A model that checkpoints a method, which uses parameters of its own."""

    def __init__(self, reentrant: bool, is_last: bool):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant, self.is_last = reentrant, is_last
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale, self.weight = nn.Parameter(torch.rand(4)), nn.Parameter(torch.randn(4, 4))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.weight) if self.is_last else torch.tanh(self.first(x)) * self.scale.view(1, -1)
        x = torch.tanh(self.second(x))
        x = x * self.scale if self.is_last else x @ self.weight
        return torch.tanh(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.reentrant)
        result: torch.Tensor = x if self.is_last else self.last(x)
        return result


def recomputed(reentrant: bool, is_last: bool, **options: Any) -> list[torch.Tensor]:
    """Return the losses of three steps, and the parameters after them."""
    model = Recomputes(reentrant, is_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options:
        optimizer = ballast.wrap(optimizer, model, **keywords(**options))
    losses = []
    for _ in range(3):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with ballast.gather(model):
        return [*losses, *(each.detach().clone() for each in model.parameters())]


def recomputed_on_each_rank(rank: int, cases: list[tuple[bool, bool]]) -> list[list[torch.Tensor]]:
    return [recomputed(*case, stage=3) for case in cases]


PENALTIES = ["at the end", "in forward", "under autocast"]


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("keep_gathered", [False, True])
def test_a_penalty_on_gradients_trains_as_in_torch(penalty, keep_gathered, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    expected = penalized(penalty)
    ours = penalized(penalty, stage=3, offload=on_drive, keep_gathered=keep_gathered)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_penalty_on_gradients_trains_as_in_torch_on_two_ranks():
    expected = [penalized(penalty) for penalty in PENALTIES]
    for ours in run_ranks(2, penalized_on_each_rank, PENALTIES):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


AFTER_AN_UPDATE = {
    "of torch": (RuntimeError, "modified by an inplace operation"),
    "of Ballast": (ballast.UsageError, "B1007 cannot continue a backward pass(.|\n)*parameter last.weight"),
}


@pytest.mark.parametrize(
    "options",
    [
        *({"stage": 0}, {"stage": 2, "offload": "host"}, {"stage": 2, "overlap_gathers": True}),
        *({"stage": 3}, {"stage": 3, "autocast": True}),
    ],
    ids=str,
)
def test_a_graph_is_refused_after_an_update_of_its_parameters(options):
    model, optimizer, loss = retained(**options)
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    error, said = AFTER_AN_UPDATE["of Ballast" if options["stage"] == 3 else "of torch"]
    with pytest.raises(error, match=said):
        loss.backward(retain_graph=True)
    with ballast.gather(model), pytest.raises(error, match=said):
        loss.backward()


# Stage, autocast, frozen. Casts below stage 3, and those of frozen parameters, are tensors of their own: no write reaches them.
AFTER_A_WRITE = [(0, False, False), (2, False, False), (2, False, True), (3, False, False), (3, False, True), (3, True, False)]


@pytest.mark.parametrize(("stage", "autocast", "is_frozen"), AFTER_A_WRITE)
@pytest.mark.parametrize("when", ["after the block", "in the block"])
def test_a_graph_is_refused_after_a_write_to_its_parameters(stage, autocast, is_frozen, when):
    model, optimizer, loss = retained(stage=stage, autocast=autocast)
    if is_frozen:
        optimizer.zero_grad()
        model.last.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch())[0].float().square().mean()
    error, said = AFTER_AN_UPDATE["of Ballast" if stage == 3 else "of torch"]
    with pytest.raises(error, match=said):
        with ballast.gather(model), torch.no_grad():
            model.last.weight.mul_(2)
            if when == "in the block":
                loss.backward()
        loss.backward()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_graph_is_refused_after_a_load(stage, tmp_path):
    model, optimizer, loss = retained(stage=stage)
    ballast.save(tmp_path, model, optimizer)
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    error, said = AFTER_AN_UPDATE["of Ballast" if stage == 3 else "of torch"]
    for load in (lambda: ballast.load_checkpoint(tmp_path, model, optimizer), lambda: ballast.load(model, tmp_path)):
        load()
        with pytest.raises(error, match=said):
            loss.backward(retain_graph=True)
        loss = model(batch())[0].square().mean()
        loss.backward(retain_graph=True)
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_graph_is_used_after_writes_that_do_not_concern_it(stage, autocast):
    model, optimizer, loss = retained(stage=stage, autocast=autocast)
    with ballast.gather(model), torch.no_grad():
        model.first.bias.mul_(2)  # backward does not use it
        model.last.weight.data.mul_(2)  # torch does not count it
    loss.backward()
    optimizer.zero_grad()
    with ballast.gather(model):
        with torch.no_grad():
            model.last.weight.mul_(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch())[0].float().square().mean()
    loss.backward()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_graph_is_used_again_where_nothing_was_updated(stage):
    """A step is skipped where gradients are not finite, and frozen parameters are never updated."""
    model, optimizer, loss = retained(stage=stage)
    (loss * float("inf")).backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.metrics()["skipped"] == 1.0
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.second.requires_grad_(False)
    x = torch.ones(1, 6, requires_grad=True)
    through_frozen = model.second(x).sum()
    model(batch())[0].sum().backward()
    optimizer.step()
    through_frozen.backward()
    with ballast.gather(model):
        torch.testing.assert_close(x.grad, model.second.weight.sum(0, keepdim=True))


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3}, {"stage": 3, "parameters": "nvme"}], ids=str)
@pytest.mark.parametrize("kind", BY_HAND)
def test_gradients_of_parameters_are_those_of_torch(kind, options, tmp_path):
    if options.pop("parameters", None):
        options["offload"] = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    expected, ours = gradients_by_hand(kind), gradients_by_hand(kind, **options)
    torch.testing.assert_close(ours, expected)


CHECKPOINTED = [(reentrant, is_last) for reentrant in (True, False) for is_last in (True, False)]


@pytest.mark.parametrize(("reentrant", "is_last"), CHECKPOINTED)
def test_a_checkpointed_method_uses_parameters_of_its_own(reentrant, is_last, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    expected = recomputed(reentrant, is_last)
    torch.testing.assert_close(recomputed(reentrant, is_last, stage=3, offload=on_drive), expected)


def test_a_checkpointed_method_uses_parameters_of_its_own_on_two_ranks():
    expected = [recomputed(*case) for case in CHECKPOINTED]
    for ours in run_ranks(2, recomputed_on_each_rank, CHECKPOINTED):
        torch.testing.assert_close(ours, expected)


class OneCheckpoint(nn.Module):
    """A model that is one checkpoint over all blocks. Its last product has no bias: autograd unpacks the weight before the
    input, which the recomputation of all blocks makes. Nothing of the module after it is saved."""

    def __init__(self, keeps_products: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.options: dict[str, Any] = {"context_fn": keeping_products} if keeps_products else {}
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)) for _ in range(5))
        self.shift = Shift()

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        shifted: torch.Tensor = self.shift(x)
        return shifted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.utils.checkpoint.checkpoint(self.run, x, use_reentrant=False, **self.options)
        return result


keeping_products = partial(
    torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def trained_in_one_checkpoint(
    rank: int, options: dict[str, Any] | None, optimizers: int, stops: bool, keeps_products: bool
) -> list[float]:
    model = OneCheckpoint(keeps_products)
    parts = [model] if optimizers == 1 else [model.blocks, model.shift]
    every: Any = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    if options is not None:
        every = ballast.wrap(every, model, **keywords(**options))
    losses = []
    with torch.utils.checkpoint.set_checkpoint_early_stop(stops):
        for step in range(4):
            loss = model(torch.randn(8, 8, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            losses.append(loss.item())
            for each in every:
                each.step()
                each.zero_grad()
    return losses


@pytest.mark.parametrize(("stops", "keeps_products"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_one_checkpoint_of_several_units_has_the_gradients_of_torch(optimizers, stops, keeps_products, tmp_path):
    """Where the recomputation uses the memory of the unit whose parameter backward needs first. Selective checkpointing counts
    the operations of both passes."""
    drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    how = optimizers, stops, keeps_products
    expected = trained_in_one_checkpoint(0, None, *how)
    for options in ({}, {"keep_gathered": False, "prefetch": 0}, {"keep_gathered": False, "offload": drive}):
        for losses in run_ranks(2, trained_in_one_checkpoint, {"stage": 3, **options}, *how):
            assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_pass_that_makes_a_graph_is_the_first_of_its_step(stage):
    model, optimizer, loss = retained(stage=stage)
    loss.backward(create_graph=True)
    model(batch())[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for makes_graph in (False, True):
        said = pytest.raises(ballast.UsageError, match="create_graph=True: those of an earlier(.|\n)*torch.autograd.grad")
        with said if makes_graph else nullcontext():
            model(batch())[0].square().mean().backward(create_graph=makes_graph)


TRANSFORMED = {
    "grad": lambda model, x: torch.func.grad(lambda each: model(each).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(3, 5))[0],
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
    "vmap": lambda model, x: torch.func.vmap(model)(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_torch_func_transforms_a_model(stage, name):
    def transformed():
        return TRANSFORMED[name](model, torch.ones(3, 20)).detach()

    model = mlp()
    expected = transformed()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, stage=stage)
    for _ in range(2):
        mean_square(model, torch.ones(20)).backward()
        optimizer.step()
        optimizer.zero_grad()
        is_refused = stage == 3 and name not in ("jvp", "vmap")
        with pytest.raises(RuntimeError, match="saved tensor hooks") if is_refused else nullcontext():
            torch.testing.assert_close(transformed(), expected)


def test_a_graph_of_parameters_from_before_the_first_forward_pass_is_refused():
    model = Field(in_forward=False)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    penalty = torch.stack([each.square().sum() for each in model.parameters()]).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (model(batch())[0].sum() + penalty).backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gathered_model_is_exported(stage):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with ballast.gather(model):
        exported = torch.export.export(model, (torch.ones(2, 4),)).module()
        assert torch.equal(exported(torch.ones(2, 4)), model(torch.ones(2, 4)))
