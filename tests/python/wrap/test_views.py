"""Tests of parameters, and views of them, that are used outside of their modules' calls, in stage 3."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, reduce
from typing import Any
from unittest import mock

import ballast
import pytest
import torch
from ballast.torch.calls import sharded_parameters
from ballast.torch.parameters import unit_gather
from python.wrap.support.ranks import run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


def blocks() -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])


class Queries(nn.Module):
    """Takes a view of a submodule's parameter, as decoders of DETR do with their queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.blocks = nn.Embedding(6, 8), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries.weight.expand(len(x), -1, -1)
        for block in self.blocks:
            x = torch.relu(block(x))
        return torch.einsum("bqd,bd->bq", queries, x)


class ClassToken(nn.Module):
    """Takes views of its own parameters before its blocks, and uses them afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale, self.blocks = nn.Parameter(torch.randn(1, 8)), nn.Parameter(torch.ones(2, 8)), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        token, scale = self.token.expand(len(x), -1), self.scale[1]
        for block in self.blocks:
            x = torch.relu(block(x))
        return (x + token) * scale


class Position(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8))

    def forward(self, count: int) -> tuple[torch.Tensor, int]:
        return self.weight.expand(count, -1), count


class Positions(nn.Module):
    """Has a submodule that returns a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.blocks = Position(), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        position, _ = self.position(len(x))
        for block in self.blocks:
            x = torch.relu(block(x))
        return x + position


class Returned(nn.Module):
    """Returns views itself, in a dictionary of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.embedding, self.blocks = nn.Parameter(torch.randn(1, 8)), nn.Embedding(8, 8), blocks()

    def forward(self, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
        token = self.token.expand(len(x), -1)
        for block in self.blocks:
            x = torch.relu(block(x))
        return {"all": (x, token, self.embedding.weight.t())}


class UsesReturned(nn.Module):
    """Has a submodule that returns views in a dictionary, detached ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight, self.blocks = Returned(), Weight(), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        detached = self.weight()
        x, token, weight = self.inner(x)["all"]
        for block in self.blocks:
            x = torch.relu(block(x))
        return (x + token) @ weight * detached["values"]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self) -> dict[str, torch.Tensor]:
        return {"values": self.weight.detach()}


VIEW_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "moveaxis": lambda weight: torch.moveaxis(weight, 0, 1),
    "adjoint": lambda weight: weight.adjoint(),
    "hsplit": lambda weight: torch.hsplit(weight, 2)[1],
    "unbind": lambda weight: weight.unbind()[3],
    "einsum": lambda weight: torch.einsum("ij->ji", weight),
    "broadcast_tensors": lambda weight: torch.broadcast_tensors(weight, torch.ones(2, 8, 8))[0],
    "T": lambda weight: weight.T,
    "diagonal": lambda weight: weight.diagonal(),
    "as_strided": lambda weight: weight.as_strided((8,), (9,)),
}


class ManyViews(nn.Module):
    """Takes views of a submodule's parameter in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(8, 8), blocks()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taken = [function(self.embedding.weight) for function in VIEW_FUNCTIONS.values()]
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum() * torch.stack([view.square().sum() for view in taken])


class Product(torch.autograd.Function):
    """Takes views of several parameters, and saves all of them."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        inputs = [x]
        for weight in weights:
            inputs.append(inputs[-1] @ weight.t())
        ctx.save_for_backward(*inputs[:-1], *weights)
        return inputs[-1]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        saved, gradients = ctx.saved_tensors, []
        count = len(saved) // 2
        for x, weight in reversed([*zip(saved[:count], saved[count:])]):
            gradients.append(gradient.t() @ x)
            gradient = gradient @ weight
        return gradient, *reversed(gradients)


class Projection(torch.autograd.Function):
    """Saves one parameter, and backward calls a module between two uses of a view of it, which it keeps."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, between: Callable[[], object], kept: list[Any] | None):
        ctx.save_for_backward(x, weight)
        ctx.between, ctx.kept = between, kept
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        columns = weight.t()
        del weight
        ctx.between()
        if ctx.kept is not None:
            ctx.kept.append(columns)
        return gradient @ columns.t(), gradient.t() @ x, None, None


class Projected(nn.Module):
    def __init__(self, between: bool, keeps: bool) -> None:
        super().__init__()
        self.between, self.keeps, self.blocks = between, keeps, blocks()

    def call_another(self) -> None:
        with torch.no_grad():
            self.blocks[2](torch.ones(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = torch.tanh(self.blocks[0](x)), self.kept if self.keeps else None
        x = torch.tanh(Projection.apply(x, self.blocks[1].weight, self.call_another if self.between else list, kept))
        return torch.tanh(self.blocks[2](x))


class Clones(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.clone.default
        return function(*args, **(kwargs or {}))


def linears(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    return reduce(nn.functional.linear, weights, x)


class Fused(nn.Module):
    """Gives a function the parameters of several submodules, as users of fused kernels do. `reentrant` is that of a checkpoint,
    which is left out if it is None."""

    def __init__(self, function: Callable[..., torch.Tensor], reentrant: bool | None) -> None:
        super().__init__()
        self.function, self.reentrant, self.blocks = function, reentrant, nn.ModuleList([*blocks(), *blocks()])

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.function(x, *(block.weight for block in self.blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks[1](x))
        x = self.product(x) if self.reentrant is None else checkpoint(self.product, x, use_reentrant=self.reentrant)
        return torch.tanh(self.blocks[0](x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: kind for kind in (Queries, ClassToken, Positions, UsesReturned, ManyViews)},
    "in a Function": partial(Fused, Product.apply, None),
    "in a checkpointed Function": partial(Fused, Product.apply, False),
    "in a checkpointed Function, reentrant": partial(Fused, Product.apply, True),
    "in checkpointed operators": partial(Fused, linears, False),
}


def losses(rank: int, name: str, stage: int | None, most_copied: int = sharded_parameters.MOST_COPIED) -> list[float]:
    """Train on the same batches on all ranks; without a stage in plain torch."""
    with mock.patch.object(sharded_parameters, "MOST_COPIED", most_copied):
        return trained(name, stage)


def of_small_and_large(rank: int, name: str) -> list[list[float]]:
    return [losses(rank, name, 3, most_copied) for most_copied in (sharded_parameters.MOST_COPIED, 0)]


def trained(name: str, stage: int | None) -> list[float]:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage, tuning=ballast.Tuning(keep_gathered=False))
    found = []
    for step in range(3):
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            found.append(model(batch).square().mean().item())
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", MODELS)
def test_parameters_keep_their_values(name):
    expected = losses(0, name, None)
    for every in run_ranks(2, of_small_and_large, name):
        for found in every:
            assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("between, keeps", [(False, False), (True, False), (False, True), (True, True)])
def test_a_function_gets_a_copy_of_parameters_only_if_it_uses_them_when_others_come(between, keeps, monkeypatch):
    model = Projected(between, keeps)
    plain = copy.deepcopy(model)
    swap = mock.Mock(wraps=unit_gather.swap_memory)
    monkeypatch.setattr(unit_gather, "swap_memory", swap)
    tuning = ballast.Tuning(keep_gathered=False, units="Linear")
    optimizers = torch.optim.SGD(plain.parameters(), 0.1), torch.optim.SGD(model.parameters(), 0.1)
    optimizers = optimizers[0], ballast.wrap(optimizers[1], model, stage=3, tuning=tuning)
    for step in range(3):
        expected = plain.blocks[1].weight.detach().clone()
        losses = []
        for each, optimizer in zip((plain, model), optimizers):
            each.kept = []
            losses.append(each(torch.full((4, 8), 0.1 * step)).square().mean())
            with Clones() as clones:
                losses[-1].backward()
            assert clones.count == 0
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        assert all(torch.allclose(each, expected.t(), atol=1e-6) for each in model.kept) and len(model.kept) == keeps
        assert swap.call_count == (step + 1 if between or keeps else 0)


@pytest.mark.parametrize("grad", [True, False])
def test_the_outermost_module_may_return_views(grad):
    model = Returned()
    expected = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    with torch.set_grad_enabled(grad):
        _, token, weight = model(torch.ones(4, 8))["all"]
        assert torch.equal(token, expected["token"].expand(4, -1)) and torch.equal(weight, expected["embedding.weight"].t())
    optimizer.close()


def test_a_graph_keeps_places_of_copies():
    """Each opening has a copy of its own. A graph that kept them would grow with the number of calls."""
    cell = torch.nn.Module()
    cell.weight, cell.inner = torch.nn.Parameter(torch.randn(64, 64)), torch.nn.Linear(64, 64)
    cell.forward = lambda x: cell.inner(torch.nn.functional.linear(x, cell.weight))
    optimizer = ballast.wrap(torch.optim.SGD(cell.parameters(), lr=0.1), cell, stage=3)
    x, copies = torch.ones(2, 64), set()

    def note(saved):
        if saved.shape == (64, 64):
            copies.add(saved.data_ptr())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        for _ in range(5):
            x = cell(x)
    x.sum().backward()
    optimizer.step()
    assert not copies


@pytest.mark.parametrize("most_copied", [0, 1 << 20])
def test_a_view_of_a_large_parameter_that_outlives_its_module_is_reported(caplog, monkeypatch, most_copied):
    monkeypatch.setattr(sharded_parameters, "MOST_COPIED", most_copied)
    model = Queries()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    said = [record.message for record in caplog.records if "a view of" in record.message]
    assert len(said) == int(most_copied == 0)
    assert all("parameter queries.weight" in line and "has a copy" in line for line in said)


class Kept(torch.autograd.Function):
    """Keeps a view of a parameter without save_for_backward()."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.columns = weight.t()
        return x @ ctx.columns

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.columns.t(), None


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_warning_of_a_view_names_functions_and_checkpoints(is_checkpointed, caplog, monkeypatch):
    monkeypatch.setattr(sharded_parameters, "MOST_COPIED", 0)
    model = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    plain = copy.deepcopy(model)

    def loss_of(blocks: nn.ModuleList) -> torch.Tensor:
        x, weight = blocks[0](torch.ones(4, 8)), blocks[1].weight
        if is_checkpointed:
            columns = weight.t()
            x = checkpoint(lambda x: x @ columns, x, use_reentrant=False)
        else:
            x = Kept.apply(x, weight)
        return blocks[2](torch.tanh(x)).sum()

    model.forward, plain.forward = partial(loss_of, model), partial(loss_of, plain)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    others = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for each, its in ((model, optimizer), (plain, others)):
            each().backward()
            its.step()
            its.zero_grad()
    assert model().item() == pytest.approx(plain().item(), rel=1e-6)
    [said] = [record.message for record in caplog.records if "a view of" in record.message]
    assert all(word in said for word in ("parameter 1.weight", "ctx.save_for_backward()", "checkpointed"))


def test_a_write_to_a_view_outside_of_its_module_is_refused():
    model = Queries()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()

    def write(*_):
        with torch.no_grad():
            model.queries.weight[0].zero_()

    model.blocks[0].register_forward_pre_hook(write)
    with pytest.raises(ballast.UsageError, match="B1007 cannot keep a write[^$]*queries.weight"):
        model(torch.ones(4, 8))
