"""Tests of views of parameters that are used after other modules have been called, in stage 3."""

import ballast
import pytest
import torch
from python.wrap.support import views
from python.wrap.support.ranks import run_ranks


@pytest.mark.parametrize("name", views.MODELS)
def test_views_keep_their_values(name):
    expected = views.losses(0, name, None)
    for found in run_ranks(2, views.losses, name, 3):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("grad", [True, False])
def test_the_outermost_module_may_return_views(grad):
    model = views.Returned()
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
    monkeypatch.setattr("ballast.torch.calls.sharded_parameters.MOST_COPIED", most_copied)
    model = views.Queries()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    said = [record.message for record in caplog.records if "a view of" in record.message]
    assert len(said) == int(most_copied == 0)
    assert all("parameter queries.weight" in line for line in said)


def test_a_write_to_a_view_outside_of_its_module_is_refused():
    model = views.Queries()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()

    def write(*_):
        with torch.no_grad():
            model.queries.weight[0].zero_()

    model.blocks[0].register_forward_pre_hook(write)
    with pytest.raises(ballast.UsageError, match="B1007 cannot keep a write[^$]*queries.weight"):
        model(torch.ones(4, 8))
