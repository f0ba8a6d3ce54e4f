"""Tests of verify=N: it reports flipped bits, and nothing else."""

import ballast
import pytest
import torch
from ballast.torch.memory import bytes_at
from python.wrap.support.loops import Loop, Tower, keywords


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 2, "offload": "host"}, {"stage": 3}])
def test_a_training_that_is_verified_gives_the_same_bits(options):
    loop = Loop(make_model=Tower, clip=0.1)
    plain, verified = loop.run(**options), loop.run(**options, verify=2)
    for run in (plain, verified):
        with ballast.gather(run.model):
            run.kept = run.parameters
    assert plain.losses == verified.losses
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain.kept, verified.kept))
    assert plain.optimizer.metrics()["verified_tiles"] == 0
    assert verified.optimizer.metrics()["verified_tiles"] > 1


def one_unit(**options):
    model = torch.nn.Linear(64, 4, bias=False)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, **keywords(**options))

    def step():
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def test_a_flipped_bit_ends_the_training():
    model, step = one_unit(stage=2, verify=1)
    step()
    bytes_at(model.weight.data_ptr(), model.weight.nbytes)[5] ^= 1  # bypasses torch, as a fault in memory does
    with pytest.raises(ballast.FailureError, match="B3001 an update found other bits than the last one left(.|\n)*weight"):
        step()


def test_a_parameter_that_its_owner_writes_to_is_no_fault():
    model, step = one_unit(stage=2, verify=1)
    for _ in range(3):
        step()
        with torch.no_grad():
            model.weight.mul_(0.5)


def test_trainings_that_cannot_be_verified_are_refused():
    for wrong in (-1, True, 0.5, "2"):
        with pytest.raises(ballast.UsageError, match="B1001 cannot use verify="):
            one_unit(verify=wrong)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ballast.UsageError, match="B1001 cannot use verify=1(.|\n)*its own step"):
        ballast.wrap(torch.optim.NAdam(model.parameters()), tuning=ballast.Tuning(verify=1))
