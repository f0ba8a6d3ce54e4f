"""Tests of deferred models: their initial values have the same bits as those of models made at once."""

from __future__ import annotations

import copy
import gc
import pickle

import ballast
import pytest
import torch
from ballast.torch.parameters.deferred_init import history_of, stored_of
from python.wrap.support.loops import Loop, Tower, check_equal, keywords
from python.wrap.support.models import Tall
from python.wrap.support.ranks import run_ranks
from torch import nn


class Positions(nn.Module):
    """A module with two computed buffers, one of which is in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(200, 64)
        place = torch.arange(200).float()[:, None]
        pace = torch.exp(torch.arange(0, 64, 2) * -0.1)
        table[:, 0::2] = torch.sin(place * pace)
        table[:, 1::2] = torch.cos(place * pace)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))


class Zoo(nn.Module):
    """A model with every kind of initialization that we know models to use."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.own = nn.Parameter(torch.randn(50, 50) * 0.02)
        self.small = nn.Linear(4, 4)
        self.orthogonal = nn.Linear(60, 60)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Linear(60, 60)
        nn.init.trunc_normal_(self.truncated.weight, std=1.5)  # redraws the values that lie outside
        self.sparse = nn.Linear(60, 60)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.embedding = nn.Embedding(100, 30, padding_idx=3)
        self.recurrent = nn.LSTM(50, 40)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128), 2)  # copies its layer
        self.convolution = nn.Conv2d(20, 30, 3)
        self.half = nn.Linear(60, 60).to(torch.bfloat16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(60, 60))
        self.tied = nn.Linear(60, 60)
        self.tied.weight = self.orthogonal.weight
        with torch.no_grad():
            self.convolution.weight.mul_(2).add_(self.convolution.weight.flip(0))
        for name, parameter in self.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / 8**0.5)
        self.chances = torch.linspace(0, 1, 5).tolist()


def constructs_with_its_own_seed(rank: int) -> list[list[torch.Tensor]]:
    """Return the initial parameters in stages 2 and 3, where each rank has set its own seed."""
    made = []
    for stage in (2, 3):
        torch.manual_seed(rank)
        with ballast.deferred():
            model = Tall()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
        with ballast.gather(model):
            made.append([parameter.detach().clone() for parameter in model.parameters()])
        optimizer.close()
    return made


def constructs_differently(rank: int) -> str:
    with ballast.deferred():
        model = Tall()
        if rank == 1:
            torch.nn.init.ones_(model.blocks[0].weight), torch.nn.init.normal_(model.blocks[0].weight)
    try:
        ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    except ballast.Error as error:
        return str(error)
    return ""


def at_once_and_deferred(make, seed=1):
    """Make a model at once and deferred. Return both, each with the next random number."""
    torch.manual_seed(seed)
    plain, after_plain = make(), torch.rand(1)
    torch.manual_seed(seed)
    with ballast.deferred():
        ours = make()
    return plain, after_plain, ours, torch.rand(1)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_initialization_gives_the_same_bits(stage):
    plain, after_plain, ours, after_ours = at_once_and_deferred(Zoo)
    assert torch.equal(after_plain, after_ours)
    large = [name for name, parameter in ours.named_parameters() if parameter.is_meta]
    assert len(large) > 15 and "own" in large and "orthogonal.weight" in large
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=stage)
    with ballast.gather(ours):
        names = {name: tensor for name, tensor in (*plain.named_parameters(), *plain.named_buffers())}
        for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
            assert tensor.dtype == names[name].dtype
            assert torch.equal(tensor, names[name]), name
    assert ours.tied.weight is ours.orthogonal.weight
    assert optimizer.memory()


def deferred_tower():
    with ballast.deferred():
        return Tower(width=48)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_deferred_model_trains_as_a_plain_one(stage):
    """A deferred model with frozen, tied and unused parameters trains to the bits of a plain one."""
    plain = Loop(make_model=lambda: Tower(width=48), micro_steps=2).run(stage=stage)
    ours = Loop(make_model=deferred_tower, micro_steps=2).run(stage=stage)
    with ballast.gather(plain.model), ballast.gather(ours.model):
        check_equal(plain, ours)


def test_all_ranks_make_the_values_of_rank_0():
    plain, _, _, _ = at_once_and_deferred(Tall, seed=0)
    for stages in run_ranks(2, constructs_with_its_own_seed):
        for made in stages:
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(plain.parameters(), made))


def test_ranks_that_construct_different_models_are_refused():
    for said in run_ranks(2, constructs_differently):
        assert "different ways" in said


def test_using_a_parameter_before_training_is_refused_with_a_remedy():
    _, _, ours, _ = at_once_and_deferred(Tall)
    weight = ours.blocks[0].weight
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=3)
    assert weight is ours.blocks[0].weight
    assert weight.shape == (48, 48)
    with pytest.raises(ballast.UsageError, match=r"B1007(.|\n)*blocks.0.weight(.|\n)*ballast.gather"):
        weight.sum()
    del optimizer
    with pytest.raises(ballast.UsageError, match="optimizer is gone"), ballast.gather(weight):
        pass


@pytest.mark.parametrize("close", [True, False])
def test_the_next_optimizer_takes_over_a_model_that_was_never_trained(close):
    plain, _, ours, _ = at_once_and_deferred(Tall)
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=3)
    if close:
        optimizer.close()
    del optimizer
    optimizer = ballast.wrap(torch.optim.AdamW(ours.parameters()), ours, stage=3)
    with pytest.raises(ballast.UsageError, match=r"blocks.0.weight(.|\n)*ballast.gather"):
        ours.blocks[0].weight.sum()
    with ballast.gather(ours):
        assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    optimizer.close()


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_hooks_of_deferred_parameters_are_called(stage, is_loaded, tmp_path):
    def train(called):
        with ballast.deferred():
            model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 4))
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda gradient, name=name: called.append(f"{name} before"))
            parameter.register_post_accumulate_grad_hook(lambda each, name=name: called.append(f"{name} after"))
        if called:
            ballast.load(model, tmp_path)
            called.clear()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
        model(torch.ones(2, 600)).sum().backward()
        optimizer.step()
        ballast.save(tmp_path, model, optimizer)
        optimizer.close()
        return sorted(called)

    names = [f"{layer}.{kind} {when}" for layer in "01" for kind in ("bias", "weight") for when in ("after", "before")]
    called = []
    assert train(called) == names
    assert not is_loaded or train(called) == names


@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_without_values_are_named(stage):
    with torch.device("meta"):
        model = Tall()
    with pytest.raises(ballast.UsageError, match="without a model"):
        ballast.wrap(torch.optim.AdamW(model.parameters()), stage=2)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
    with pytest.raises(ballast.UsageError, match=r"norm.running_mean(.|\n)*ballast.load"):
        model(torch.ones(8, 20))
    model.norm = torch.nn.Identity()
    with pytest.raises(ballast.UsageError, match=r"first.weight(.|\n)*ballast.load"):
        optimizer.memory()


def test_a_run_resumes_without_initial_values(tmp_path):
    options = {"offload": f"nvme:{tmp_path}", "run": "mine"}

    def train(model, steps):
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(stage=3, **options))
        run = Loop(steps=steps).train(model, optimizer, optimizer.steps)
        optimizer.close()
        return run

    def without_norm(model):
        model.norm = torch.nn.Identity()
        return model

    torch.manual_seed(0)
    uninterrupted = Loop(make_model=lambda: without_norm(Tall())).run(stage=3)
    torch.manual_seed(0)
    train(without_norm(Tall()), 3)
    with torch.device("meta"):
        model = without_norm(Tall())
    resumed = train(model, 6)
    assert resumed.losses == uninterrupted.losses[3:]


def test_histories_outlive_a_garbage_collection():
    """The history of a tensor survives, also if its values are computed from its earlier values."""
    with torch.no_grad(), ballast.deferred():
        weight = torch.empty(60, 60).uniform_()
        weight.copy_(weight.new_empty((60, 60)).normal_() + weight)
    gc.collect()
    assert history_of(weight) is not None


def initialized_again(model):
    model.apply(lambda each: torch.nn.init.xavier_uniform_(each.weight) if isinstance(each, torch.nn.Linear) else None)
    return model


def doubled(model):
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return model


def halved_by_a_load(model):
    model.load_state_dict({name: values * 0.5 for name, values in model.state_dict().items()})
    return model


def read(model):
    assert model.large.weight.sum().item() == pytest.approx(model.large.weight.detach().double().sum().item(), rel=1e-5)
    return model


class Casts(torch.nn.Module):
    """A model with a large and a small layer, and with a large buffer."""

    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Linear(64, 64), torch.nn.Linear(64, 3)
        self.register_buffer("mask", torch.rand(64, 64))

    def forward(self, batch):
        return self.small(torch.relu(self.large(batch @ self.mask)))


CASTS = {
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "half() and back": lambda model: model.half().float(),
    "bfloat16()": lambda model: model.bfloat16(),
    "to(cpu)": lambda model: model.to("cpu"),
    "several": lambda model: model.bfloat16().to("cpu").float(),
}
CHANGES = {
    "initialized again": initialized_again,
    "doubled": doubled,
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "loaded": halved_by_a_load,
    "read": read,
}


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")  # torch does not know that it is recorded
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    ("change", "when"), [*((each, "before") for each in {**CASTS, **CHANGES}), *((each, "after") for each in CASTS)]
)
def test_the_recording_continues_until_training_begins(change, when, stage):
    """Casts, moves and writes after the block give the bits of a plain model, before wrap(), and casts after it too."""

    def values(make):
        model, after = make
        change_it = {**CASTS, **CHANGES}[change]
        model = change_it(model) if when == "before" else model
        drawn = torch.rand(1)
        optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=stage)
        parameters = [*model.parameters()]
        if when == "after":
            change_it(model)
        assert all(mine is theirs for mine, theirs in zip(parameters, model.parameters()))
        batch = torch.ones(4, 64, dtype=model.small.weight.dtype)
        model(batch).float().square().mean().backward()
        optimizer.step()
        with ballast.gather(model):
            return [after, drawn, *(each.detach().clone() for each in (*model.parameters(), *model.buffers()))]

    plain, after_plain, ours, after_ours = at_once_and_deferred(Casts)
    assert ours.large.weight.is_meta and ours.mask.is_meta and ours.large.weight.device == torch.device("cpu")
    torch.manual_seed(2)
    expected = values((plain, after_plain))
    torch.manual_seed(2)
    for mine, theirs in zip(values((ours, after_ours)), expected):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)


def test_blocks_inside_of_blocks_record_each_operation_once():
    def make():
        with ballast.deferred():
            model = Casts()
            with ballast.deferred(), torch.no_grad():
                model.large.weight.mul_(2)
        return model

    plain, _, _, _ = at_once_and_deferred(Casts)
    _, _, ours, _ = at_once_and_deferred(make)
    optimizer = ballast.wrap(torch.optim.SGD(ours.parameters()), ours, stage=3)
    with ballast.gather(ours):
        assert torch.equal(ours.large.weight, plain.large.weight * 2)
    optimizer.close()


def test_gradients_of_a_deferred_model_are_refused_before_it_is_wrapped():
    plain, _, ours, _ = at_once_and_deferred(Casts)
    batch = torch.ones(4, 64)
    with pytest.raises(ballast.UsageError, match=r"B1007 cannot compute gradients(.|\n)*ballast.wrap"):
        ours(batch)
    with pytest.raises(ballast.UsageError, match="B1007 cannot compute gradients"):
        ours.large.weight.square().sum().backward()
    with torch.no_grad():
        assert torch.equal(ours(batch), plain(batch))


@pytest.mark.parametrize("is_inside", [True, False])
def test_gradients_by_hand_are_refused_before_the_model_is_wrapped(is_inside):
    def set_gradients(model):
        model.small.weight.grad = torch.ones_like(model.small.weight)  # it has values
        model.large.weight.grad = None
        with pytest.raises(ballast.UsageError, match=r"B1007 cannot set gradients(.|\n)*\(64, 64\)(.|\n)*ballast.wrap"):
            model.large.weight.grad = torch.ones_like(model.large.weight)

    with ballast.deferred():
        model = Casts()
        if is_inside:
            set_gradients(model)
    if not is_inside:
        set_gradients(model)
    assert model.large.weight.grad is None


@pytest.mark.parametrize("where", ["in the block", "after it"])
def test_files_that_are_cast_are_read_piece_by_piece(where, tmp_path):
    torch.manual_seed(0)
    saved = Casts()
    ballast.export(saved, tmp_path / "model.safetensors")
    with ballast.deferred():
        model = Casts()
        if where == "in the block":
            ballast.load(model, tmp_path)
    if where == "after it":
        ballast.load(model, tmp_path)
    model.half().float().bfloat16()
    assert stored_of(model.large.weight).dtype == torch.bfloat16
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters()), model, stage=3)
    with ballast.gather(model):
        for mine, theirs in zip(model.parameters(), saved.half().float().bfloat16().parameters()):
            assert torch.equal(mine, theirs)
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("use", ["call", "method"])
@pytest.mark.parametrize("trains", [True, False])
def test_a_deferred_model_is_evaluated_first(stage, context, use, trains):
    plain, _, ours, _ = at_once_and_deferred(Casts)
    ours.requires_grad_(trains)
    optimizer = ballast.wrap(torch.optim.SGD(ours.parameters(), lr=0.1), ours, stage=stage)
    batch = torch.ones(4, 64)
    with context():
        found = ours(batch) if use == "call" else ours.large(batch)
        assert torch.equal(found, plain(batch) if use == "call" else plain.large(batch))
    if trains:
        ours(batch).sum().backward()
        optimizer.step()
        assert optimizer.steps == 1
