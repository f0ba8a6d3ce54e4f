"""Tests that parameters which share memory are refused, and that parts of one tensor are not."""

import ballast
import pytest
import torch
from python.wrap.support.loops import mean_square

SHARED = "cannot partition parameters that share memory"


class Parts(torch.nn.Module):
    """A model whose parameters are views of one tensor."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(part, part.is_floating_point()) for part in parts)

    def forward(self, batch):
        return sum((batch * part.float().sum()).tanh() for part in self.parts)


def trained(model, stage, frozen=()):
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    if stage is not None:
        optimizer = ballast.wrap(optimizer, model, stage=stage)
    for _ in range(2):
        mean_square(model, torch.ones(2, 6)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(model):
        return [each.detach().clone() for each in model.parameters()]


def flat():
    return torch.linspace(-1, 1, 24)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("frozen", [(), ("0.weight",)], ids=["trained", "one is frozen"])
def test_parameters_that_are_tied_through_data_are_refused(stage, frozen):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6))
    model[2].weight.data = model[0].weight.data
    with pytest.raises(ballast.UsageError, match=f"{SHARED}(.|\n)*0.weight(.|\n)*module.weight = other.weight") as refused:
        trained(model, stage, frozen)
    assert "2.weight" in str(refused.value)


@pytest.mark.parametrize(
    "parts",
    [
        lambda whole: (whole[:13], whole[12:]),
        lambda whole: (whole.view(4, 6)[:, :3], whole.view(4, 6)[1]),
        lambda whole: (whole.view(torch.int32)[:13], whole[12:]),  # the first is frozen
        lambda whole: (whole.view(4, 6)[:, 0], whole[1:2], whole[12:13]),
    ],
)
def test_parts_of_a_tensor_with_common_elements_are_refused(parts):
    with pytest.raises(ballast.UsageError, match=SHARED):
        trained(Parts(*parts(flat())), 2)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "parts",
    [
        lambda whole: (whole[:12], whole[12:], torch.ones(3), torch.ones(0)),
        lambda whole: (whole.view(4, 6)[:, :2], whole.view(4, 6)[:, 2:3], whole.view(4, 6)[:, 3:]),
    ],
    ids=["pieces", "columns"],
)
def test_parts_of_a_tensor_without_common_elements_train_as_in_torch(stage, parts):
    expected = trained(Parts(*parts(flat())), None)
    for mine, theirs in zip(trained(Parts(*parts(flat())), stage), expected):
        torch.testing.assert_close(mine, theirs)
