"""Tests of uncommon uses of autograd: gradients of gradients, and graphs that are used again."""

from contextlib import nullcontext

import ballast
import pytest
import torch
from python.wrap.support import graphs
from python.wrap.support.loops import mean_square, mlp
from python.wrap.support.ranks import run_ranks

PENALTIES = ["at the end", "in forward", "under autocast"]


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("keep_gathered", [False, True])
def test_a_penalty_on_gradients_trains_as_in_torch(penalty, keep_gathered, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    expected = graphs.penalized(penalty)
    ours = graphs.penalized(penalty, stage=3, offload=on_drive, keep_gathered=keep_gathered)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_penalty_on_gradients_trains_as_in_torch_on_two_ranks():
    expected = [graphs.penalized(penalty) for penalty in PENALTIES]
    for ours in run_ranks(2, graphs.penalized_on_each_rank, PENALTIES):
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
    model, optimizer, loss = graphs.retained(**options)
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
    model, optimizer, loss = graphs.retained(stage=stage, autocast=autocast)
    if is_frozen:
        optimizer.zero_grad()
        model.last.requires_grad_(False)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(graphs.batch())[0].float().square().mean()
    error, said = AFTER_AN_UPDATE["of Ballast" if stage == 3 else "of torch"]
    with pytest.raises(error, match=said):
        with ballast.gather(model), torch.no_grad():
            model.last.weight.mul_(2)
            if when == "in the block":
                loss.backward()
        loss.backward()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_graph_is_refused_after_a_load(stage, tmp_path):
    model, optimizer, loss = graphs.retained(stage=stage)
    ballast.save(tmp_path, model, optimizer)
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    error, said = AFTER_AN_UPDATE["of Ballast" if stage == 3 else "of torch"]
    for load in (lambda: ballast.load_checkpoint(tmp_path, model, optimizer), lambda: ballast.load(model, tmp_path)):
        load()
        with pytest.raises(error, match=said):
            loss.backward(retain_graph=True)
        loss = model(graphs.batch())[0].square().mean()
        loss.backward(retain_graph=True)
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_graph_is_used_after_writes_that_do_not_concern_it(stage, autocast):
    model, optimizer, loss = graphs.retained(stage=stage, autocast=autocast)
    with ballast.gather(model), torch.no_grad():
        model.first.bias.mul_(2)  # backward does not use it
        model.last.weight.data.mul_(2)  # torch does not count it
    loss.backward()
    optimizer.zero_grad()
    with ballast.gather(model):
        with torch.no_grad():
            model.last.weight.mul_(2)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(graphs.batch())[0].float().square().mean()
    loss.backward()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_graph_is_used_again_where_nothing_was_updated(stage):
    """A step is skipped where gradients are not finite, and frozen parameters are never updated."""
    model, optimizer, loss = graphs.retained(stage=stage)
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
    model(graphs.batch())[0].sum().backward()
    optimizer.step()
    through_frozen.backward()
    with ballast.gather(model):
        torch.testing.assert_close(x.grad, model.second.weight.sum(0, keepdim=True))


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3}, {"stage": 3, "parameters": "nvme"}], ids=str)
@pytest.mark.parametrize("kind", graphs.BY_HAND)
def test_gradients_of_parameters_are_those_of_torch(kind, options, tmp_path):
    if options.pop("parameters", None):
        options["offload"] = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    expected, ours = graphs.gradients_by_hand(kind), graphs.gradients_by_hand(kind, **options)
    torch.testing.assert_close(ours, expected)


CHECKPOINTED = [(reentrant, is_last) for reentrant in (True, False) for is_last in (True, False)]


@pytest.mark.parametrize(("reentrant", "is_last"), CHECKPOINTED)
def test_a_checkpointed_method_uses_parameters_of_its_own(reentrant, is_last, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    expected = graphs.recomputed(reentrant, is_last)
    torch.testing.assert_close(graphs.recomputed(reentrant, is_last, stage=3, offload=on_drive), expected)


def test_a_checkpointed_method_uses_parameters_of_its_own_on_two_ranks():
    expected = [graphs.recomputed(*case) for case in CHECKPOINTED]
    for ours in run_ranks(2, graphs.recomputed_on_each_rank, CHECKPOINTED):
        torch.testing.assert_close(ours, expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_pass_that_makes_a_graph_is_the_first_of_its_step(stage):
    model, optimizer, loss = graphs.retained(stage=stage)
    loss.backward(create_graph=True)
    model(graphs.batch())[0].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    for makes_graph in (False, True):
        said = pytest.raises(ballast.UsageError, match="create_graph=True: those of an earlier(.|\n)*torch.autograd.grad")
        with said if makes_graph else nullcontext():
            model(graphs.batch())[0].square().mean().backward(create_graph=makes_graph)


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
