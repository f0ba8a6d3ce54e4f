"""Tests of checkpoints of other programs: they are read, or refused with a remedy."""

from __future__ import annotations

import copy
import logging
import sys
import types
from contextlib import contextmanager
from unittest import mock

import ballast
import pytest
import torch
from python.wrap.support import saved
from python.wrap.support.loops import Loop, Tower, check_close, keywords, mlp
from python.wrap.support.models import Tall
from python.wrap.support.ranks import run_ranks
from python.wrap.support.saved import Values, other_parameters
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict


def loads_foreign(rank: int, folder: str) -> Values:
    """Load a checkpoint of another program in stage 3."""
    model = other_parameters(Tower())
    model.unused.requires_grad_(False)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    ballast.load_checkpoint(folder, model, optimizer)
    with ballast.gather(model):
        return {name: value.clone() for name, value in model.state_dict().items()}


def saves_with_fsdp2(rank: int, folder: str) -> Values:
    """Train with FSDP2 and save each rank's shards with torch.distributed.checkpoint."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        model(torch.full((2, 5), 0.5 * step + rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    own, state = get_state_dict(model, optimizer)
    dcp.save({"model": own, "optim": state}, checkpoint_id=folder)
    return {name: value.full_tensor() for name, value in own.items()}


def trained_by_torch():
    """Return a run of plain torch, and the state of each parameter by its name in the model."""
    run = Loop(make_model=Tower, steps=3).run()
    return run, {name: run.optimizer.state.get(each, {}) for name, each in run.model.named_parameters()}


def as_distributed(folder, run):
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)


def as_universal(folder, run):
    """Write a checkpoint as DeepSpeed's ds_to_universal does for stages 1 and 2."""
    names = {id(each): name for name, each in run.model.named_parameters()}
    for parameter in run.model.parameters():
        if not parameter.requires_grad:
            continue
        place = folder / "zero" / names[id(parameter)]
        place.mkdir(parents=True)
        state = run.optimizer.state.get(parameter, {})
        torch.save({"param": parameter.detach().clone()}, place / "fp32.pt")
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": state.get(moment, torch.zeros_like(parameter))}, place / f"{moment}.pt")
        torch.save(int(state.get("step", 0)), place / "step.pt")


@contextmanager
def object_of(module, name):
    """Yield an object whose class cannot be imported after this block."""
    kind = type(name, (), {"__module__": module})
    modules = {module.partition(".")[0]: types.SimpleNamespace(), module: types.SimpleNamespace(**{name: kind})}
    with mock.patch.dict(sys.modules, modules):
        yield kind()


def as_universal_of_stage_3(folder, run, in_state=True, in_group=0):
    """Write a checkpoint as for stage 3: tensors are flat, and parameters have no files with their number of steps."""
    as_universal(folder, run)
    shapes, step = {}, 3
    for path in (folder / "zero").glob("*/*.pt"):
        if path.stem == "step":
            path.unlink()
            continue
        tensor = torch.load(path)["param"]
        shapes[path.parent.name] = tensor.shape
        torch.save(tensor.reshape(-1), path)
    state = {0: {"exp_avg": torch.zeros(5), **({"step": torch.tensor(float(step))} if in_state else {})}}
    groups = [{"lr": 1e-2, "step": in_group}]
    own = {"state": state, "param_groups": groups}
    with object_of("deepspeed_is_not_here", "LossScaler") as scaler:
        scaler.scale = 1.0
        checkpoint = {"loss_scaler": scaler, "optimizer_state_dict": own, "param_groups": groups}
        torch.save(checkpoint, folder / "zero" / "optimizer_state.pt")
        torch.save({"param_shapes": [shapes], "rng": scaler}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")


def fresh(model=None, **options):
    model = saved.other_parameters(Tower() if model is None else model)
    return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **keywords(**options))


def refused(folder, said, model=None):
    """Require that loading is refused and changes nothing, and that the model can then be trained."""
    model, optimizer = fresh(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ballast.UsageError, match=f"B1001(.|\n)*{said}"):
        ballast.load_checkpoint(folder, model, optimizer)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), before))
    Loop(steps=1).train(model, optimizer)


@pytest.mark.parametrize("writes", [as_distributed, as_universal, as_universal_of_stage_3])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_training_of_torch_is_resumed(writes, stage, tmp_path):
    run, _ = trained_by_torch()
    # Torch has no state for unused parameters, while Ballast has a state of zeros.
    run.model.unused.requires_grad_(False)
    writes(tmp_path, run)
    model = Tower()
    saved.other_parameters(model.blocks[0])
    model.unused.requires_grad_(False)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
    assert ballast.load_checkpoint(tmp_path, model, optimizer) is None
    assert optimizer.steps == 3
    with ballast.gather(model):
        for (name, mine), theirs in zip(model.named_parameters(), run.model.parameters()):
            assert torch.equal(mine, theirs), name
    for mine, theirs in zip(model.parameters(), run.model.parameters()):
        if mine.requires_grad:
            state, expected = optimizer.state[mine], run.optimizer.state[theirs]
            assert float(state["step"]) == 3
            assert torch.equal(torch.clone(state["exp_avg_sq"]), expected["exp_avg_sq"])
    longer = Loop(make_model=Tower, steps=6)
    expected = longer.train(run.model, run.optimizer, 3)
    torch.testing.assert_close(
        torch.tensor(longer.train(model, optimizer, 3).losses), torch.tensor(expected.losses), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("stage", [2, 3])
def test_a_meta_model_gets_its_values_from_another_program(stage, tmp_path):
    """A model on the meta device gets its parameters and its buffers, such as a running mean, from torch's checkpoint."""
    run = Loop(make_model=Tall, steps=2).run()
    as_distributed(tmp_path, run)
    with torch.device("meta"):
        model = Tall()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=stage)
    ballast.load_checkpoint(tmp_path, model, optimizer)
    with ballast.gather(model):
        assert saved.same(model.state_dict(), run.model.state_dict())


def test_objects_that_deepspeed_saves_with_a_parameter_are_ignored(tmp_path):
    run, _ = trained_by_torch()
    as_universal(tmp_path, run)
    path = tmp_path / "zero" / "position" / "fp32.pt"
    with object_of("deepspeed.checkpoint.universal_checkpoint", "SubparamShape") as shape:
        shape.partition_dim = 0
        torch.save({"param": run.model.position.detach().clone(), "sub_param_shape": shape}, path)
    model, optimizer = fresh()
    ballast.load_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(model.position, run.model.position)


def test_a_checkpoint_of_fsdp2_ranks_is_read(tmp_path):
    expected, _ = run_ranks(2, saves_with_fsdp2, str(tmp_path))
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    ballast.load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.steps == 3 and saved.same(model.state_dict(), expected)
    assert all(torch.clone(optimizer.state[each]["exp_avg_sq"]).any() for each in model.parameters())


def test_ranks_load_their_shards(tmp_path):
    run, _ = trained_by_torch()
    run.model.unused.requires_grad_(False)
    as_distributed(tmp_path, run)
    for everything in run_ranks(2, loads_foreign, str(tmp_path)):
        expected = run.model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in everything.items())


def test_missing_tensors_are_named(tmp_path):
    run, _ = trained_by_torch()
    as_universal(tmp_path, run)
    (tmp_path / "zero" / "position" / "exp_avg.pt").unlink()
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*exp_avg(.|\n)*position"):
        ballast.load_checkpoint(tmp_path, model, optimizer)
    (tmp_path / "zero" / "position" / "fp32.pt").unlink()
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*lacks a parameter(.|\n)*position"):
        ballast.load_checkpoint(tmp_path, model, optimizer)


def test_steps_are_found_where_an_old_fused_adam_kept_them(tmp_path):
    run, _ = trained_by_torch()
    as_universal_of_stage_3(tmp_path, run, in_state=False, in_group=3)
    model, optimizer = fresh()
    ballast.load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.steps == 3


def test_moments_without_steps_are_refused(tmp_path):
    run, _ = trained_by_torch()
    as_universal_of_stage_3(tmp_path, run, in_state=False)
    refused(tmp_path, "not the number of steps(.|\n)*optimizer_state.pt")
    (tmp_path / "zero" / "optimizer_state.pt").unlink()
    refused(tmp_path, "not the number of steps")


def test_parameters_that_torch_never_used_begin_at_zero(tmp_path, caplog):
    run, _ = trained_by_torch()
    as_distributed(tmp_path, run)
    model, optimizer = fresh()
    with caplog.at_level(logging.WARNING, "ballast"):
        ballast.load_checkpoint(tmp_path, model, optimizer)
    assert "unused.bias, unused.weight" in caplog.text and "first" not in caplog.text
    assert torch.equal(model.unused.weight, run.model.unused.weight)
    state = optimizer.state[model.unused.weight]
    assert float(state["step"]) == 0 and not torch.clone(state["exp_avg_sq"]).any()
    assert float(optimizer.state[model.position]["step"]) == optimizer.steps == 3


def transposed(tensor):
    return tensor.T.contiguous() if tensor.dim() == 2 else torch.cat([tensor, tensor])


@pytest.mark.parametrize("name", ["last.weight", "blocks.1.up.weight", "blocks.2.up.bias", "mean"])
def test_all_shapes_are_compared_before_anything_changes(name, tmp_path):
    """Shapes of a trained parameter, of frozen ones and of a buffer are compared."""
    run = Loop(make_model=saved.Buffered, steps=1).run()
    model, optimizer = get_state_dict(run.model, run.optimizer)
    model[name] = transposed(model[name])
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    refused(tmp_path, rf"shape \({model[name].shape[0]}, ?(.|\n)*{name}", saved.Buffered())


def test_shapes_of_moments_are_compared(tmp_path):
    run, _ = trained_by_torch()
    as_universal(tmp_path, run)
    torch.save({"param": torch.zeros(3)}, tmp_path / "zero" / "position" / "exp_avg_sq.pt")
    refused(tmp_path, r"exp_avg_sq of shape \(3,\)(.|\n)*position")


def test_shapes_of_stage_3_are_in_the_files_of_the_ranks(tmp_path):
    run, _ = trained_by_torch()
    as_universal_of_stage_3(tmp_path, run)
    torch.save({"param_shapes": [{"last.weight": (16, 20)}]}, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    refused(tmp_path, r"shape \(16, 20\)(.|\n)*last.weight")


def test_two_models_in_a_checkpoint_are_refused(tmp_path):
    run, _ = trained_by_torch()
    model, optimizer = get_state_dict(run.model, run.optimizer)
    checkpoint = {"model": model, "optim": optimizer, "ema": {"module": {name: 2 * each for name, each in model.items()}}}
    dcp.save(checkpoint, checkpoint_id=tmp_path / "two", no_dist=True)
    refused(tmp_path / "two", r"choose parameters(.|\n)*these names 2 times(.|\n)*ema.module.\*, model.\*")
    del checkpoint["ema"]["module"]["position"]
    dcp.save(checkpoint, checkpoint_id=tmp_path / "part", no_dist=True)
    model, optimizer = fresh()
    ballast.load_checkpoint(tmp_path / "part", model, optimizer)
    assert torch.equal(model.last.weight, run.model.last.weight)
    dcp.save({"one": checkpoint["optim"], **checkpoint, "ema": {}}, checkpoint_id=tmp_path / "states", no_dist=True)
    refused(tmp_path / "states", r"choose optimizer's state(.|\n)*these names 2 times(.|\n)*one.\*, optim.\*")


class Averaging(Tower):
    """A model that contains a frozen copy of itself, like an average of its weights."""

    def __init__(self):
        super().__init__()
        self.ema = copy.deepcopy(Tower()).requires_grad_(False)


def test_an_average_inside_of_the_model_is_its_own(tmp_path):
    run = Loop(make_model=Averaging, steps=1).run()
    as_distributed(tmp_path, run)
    model, optimizer = fresh(Averaging())
    ballast.load_checkpoint(tmp_path, model, optimizer)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), run.model.parameters()))


def test_state_by_number_is_refused(tmp_path):
    run, _ = trained_by_torch()
    checkpoint = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    dcp.save(checkpoint, checkpoint_id=tmp_path, no_dist=True)
    refused(tmp_path, r"by number(.|\n)*optim.state.\d+(.|\n)*get_state_dict\(model, optimizer\)")


def in_two_groups(model, **of_second):
    """Return an optimizer with a group of matrices and one of the rest."""
    sizes = [[each for each in model.parameters() if (each.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    return torch.optim.AdamW([{"params": sizes[0]}, {"params": sizes[1], **of_second}], lr=1e-2)


def by_number(folder, model, optimizer):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": EXTRA}, folder / "all.pt")
    return folder / "all.pt"


def by_name(folder, model, optimizer):
    saved = get_state_dict(model, optimizer)
    torch.save({"model": saved[0], "optim": saved[1], "extra": EXTRA}, folder / "all.pt")
    return folder / "all.pt"


def in_directory(folder, model, optimizer, **options):
    saved = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.save({"model": saved[0], "optim": saved[1], "extra": EXTRA}, checkpoint_id=folder, no_dist=True)
    return folder


def in_flat_directory(folder, model, optimizer):
    return in_directory(folder, model, optimizer, flatten_optimizer_state_dict=True)


EXTRA = {"epoch": 3, "words": ["a", "b"], "data": {"seed": 7, "at": torch.arange(3)}}


@pytest.mark.parametrize("writes", [by_number, by_name, in_directory, in_flat_directory])
@pytest.mark.parametrize("stage", [0, 3])
def test_options_of_groups_and_extra_are_loaded_as_by_torch(writes, stage, tmp_path, caplog):
    """A training continues with learning rates that a scheduler has changed, and with entries that the script does not have."""
    def begin():
        model = mlp()
        return model, in_two_groups(model, weight_decay=0.0)

    model, optimizer = begin()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # adds initial_lr
    Loop(steps=2).train(model, optimizer)
    optimizer.param_groups[0].update(lr=torch.tensor(0.25), betas=(0.5, 0.75), step=2, note="mine")
    optimizer.param_groups[1].update(lr=0.125, weight_decay=0.5)
    path = writes(tmp_path, model, optimizer)

    mine, wrapped = begin()
    wrapped = ballast.wrap(wrapped, mine, stage=stage)
    with caplog.at_level(logging.WARNING, "ballast"):
        extra = ballast.load_checkpoint(path, mine, wrapped)
    assert (extra["epoch"], extra["words"], extra["data"]["seed"]) == (3, ["a", "b"], 7)
    assert torch.equal(extra["data"]["at"], torch.arange(3))
    for group, expected in zip(wrapped.param_groups, optimizer.param_groups):
        assert {**group, "params": []} == {**expected, "params": []}
    for change in ("lr=0.125 instead of 0.01 in param_groups[1]", "weight_decay=0.5 instead of 0.0 in param_groups[1]"):
        assert change in caplog.text
    assert "betas" in caplog.text and "eps" not in caplog.text and "note" not in caplog.text
    longer = Loop(steps=4)
    ours, theirs = longer.train(mine, wrapped, 2).losses, longer.train(model, optimizer, 2).losses
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("writes", [by_number, in_directory])
def test_options_without_state_are_loaded_too(writes, tmp_path):
    """SGD without momentum has no state, and has a learning rate."""
    model = mlp()
    path = writes(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    ballast.load_checkpoint(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("writes", [by_number, in_directory])
def test_momentum_that_a_checkpoint_would_turn_on_is_refused(writes, tmp_path):
    model = mlp()
    path = writes(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ballast.UsageError, match="B1005 cannot turn momentum on after"):
        ballast.load_checkpoint(path, model, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0)


def test_options_that_differ_within_a_group_stay(tmp_path, caplog):
    model = mlp()
    path = in_directory(tmp_path, model, in_two_groups(model, lr=0.5, weight_decay=0.25))
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    ballast.load_checkpoint(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "param_groups[0] keeps options" in caplog.text and "lr, weight_decay" in caplog.text


def test_a_universal_checkpoint_in_the_same_directory_is_read(tmp_path):
    """DeepSpeed names the newest universal checkpoint in a file of its own."""
    (tmp_path / "latest_universal").write_text("step7-universal")
    run, _ = trained_by_torch()
    as_universal(tmp_path / "step7-universal", run)
    model, optimizer = fresh()
    ballast.load_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(model.position, run.model.position)


def test_files_without_optimizer_state_are_refused_with_a_remedy(tmp_path):
    (tmp_path / "model.safetensors").touch()
    refused(tmp_path, r"ballast.load\(")


def test_an_empty_directory_is_refused(tmp_path):
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    with pytest.raises(ballast.UsageError, match="B1001 cannot load a checkpoint: there is none in (.|\n)*checkpoint.json"):
        ballast.load_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*there is no such directory"):
        ballast.load_checkpoint(tmp_path / "nosuch", model, optimizer)


def test_the_directory_of_one_rank_of_a_run_is_refused_with_the_call_that_resumes_it(tmp_path):
    model = Tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = ballast.wrap(optimizer, model, offload={"state": f"nvme:{tmp_path}"}, run="mine")
    assert optimizer.steps == 0
    optimizer.close()
    another = Tower()
    its_optimizer = ballast.wrap(torch.optim.AdamW(another.parameters(), lr=1e-2), another)
    with pytest.raises(ballast.UsageError, match="B1001 cannot load a checkpoint: there is none in") as refused:
        ballast.load_checkpoint(tmp_path / "mine-rank-0", another, its_optimizer)
    assert refused.value.available == "a run: mine"
    assert f'offload="nvme:{tmp_path}", run="mine"' in refused.value.remedy
    ballast.load_checkpoint(tmp_path, another, its_optimizer)  # that of all ranks is read as a checkpoint
    assert its_optimizer.steps == 0


def by_wrapping(model, optimizer, state, path):
    optimizer.load_state_dict(state)
    return ballast.wrap(optimizer, model)


def by_a_state_dict(model, optimizer, state, path):
    optimizer = ballast.wrap(optimizer, model)
    optimizer.load_state_dict(state)
    return optimizer


def by_a_file(model, optimizer, state, path):
    optimizer = ballast.wrap(optimizer, model)
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    ballast.load_checkpoint(path, model, optimizer)
    return optimizer


@pytest.mark.parametrize("takes", [by_wrapping, by_a_state_dict, by_a_file])
def test_momentum_of_torch_that_counts_no_steps_continues(takes, tmp_path):
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    loop = Loop(steps=3, make_optimizer=torch.optim.SGD, optimizer_options=options)
    run, model = loop.run(), mlp()
    model.load_state_dict(run.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), **options)
    optimizer = takes(model, optimizer, copy.deepcopy(run.optimizer.state_dict()), tmp_path / "saved.pt")
    assert optimizer.steps == 1  # the count is a lower bound: SGD keeps none
    loop.steps = 6
    check_close(loop.train(run.model, run.optimizer, 3), loop.train(model, optimizer, 3))
