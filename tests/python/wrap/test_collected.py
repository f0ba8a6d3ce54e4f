"""Tests that Python's collector may delete a model and its optimizer together."""

import gc
import sys
import weakref

import ballast
import pytest
import torch
from python.wrap.support.loops import keywords, mean_square, mlp

CONFIGURATIONS = [
    {"stage": 0},
    {"stage": 2, "offload": "host"},
    {"stage": 3},
    {"stage": 3, "offload": "host"},
    {"stage": 3, "update_in_backward": True},
]


class Trainer:
    """Holds a model and its optimizer, and both hold it."""

    def __init__(self, configuration, *, ends_in_backward):
        self.model = mlp()
        self.optimizer = ballast.wrap(torch.optim.AdamW(self.model.parameters()), self.model, **keywords(**configuration))
        for _ in range(2):
            mean_square(self.model, torch.ones(20)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if ends_in_backward:
            mean_square(self.model, torch.ones(20)).backward()
        self.model.trainer = self.optimizer.trainer = [self]


@pytest.mark.parametrize("ends_in_backward", [False, True])
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_a_cycle_of_model_and_optimizer_ends_without_an_error(configuration, ends_in_backward, monkeypatch):
    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_value))
    gone = weakref.ref(Trainer(configuration, ends_in_backward=ends_in_backward))
    gc.collect()
    assert gone() is None
    assert ignored == []


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_a_parameter_that_outlives_such_a_cycle_keeps_its_values(configuration):
    trainer = Trainer(configuration, ends_in_backward=False)
    with ballast.gather(trainer.model):
        expected = trainer.model[0].weight.detach().clone()
    kept = trainer.model[0].weight
    del trainer
    gc.collect()
    assert torch.equal(kept, expected)
