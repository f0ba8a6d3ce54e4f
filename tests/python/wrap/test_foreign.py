"""Checkpoints of other programs: read, or refused with what makes them readable."""

import pytest
import torch
from python.wrap import saved
from python.wrap.loops import Loop, Tower
from python.wrap.ranks import run_ranks
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import ballast


def trained_by_torch():
    """Parameters with the names that they have in the model, and their state."""
    run = Loop(make_model=Tower, steps=3).run()
    return run, {name: run.optimizer.state.get(each, {}) for name, each in run.model.named_parameters()}


def as_distributed(folder, run):
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)


def as_universal(folder, run):
    """As DeepSpeed's ds_to_universal writes it."""
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


@pytest.mark.parametrize("writes", [as_distributed, as_universal])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_training_of_torch_goes_on(writes, stage, tmp_path):
    run, _ = trained_by_torch()
    # Torch leaves parameters alone that nobody uses; here they have a state of zero.
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


def test_ranks_take_their_parts(tmp_path):
    run, _ = trained_by_torch()
    run.model.unused.requires_grad_(False)
    as_distributed(tmp_path, run)
    for everything in run_ranks(2, saved.adopts, str(tmp_path)):
        expected = run.model.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in everything.items())


def test_what_is_missing_is_named(tmp_path):
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


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["latest", "step7/zero_pp_rank_0_mp_rank_00_optim_states.pt"], "ds_to_universal --input_folder .*step7 "),
        (["mp_rank_00_model_states.pt"], "ds_to_universal --input_folder "),
        (["model.safetensors"], r"ballast.load\("),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_way(files, said, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("step7")
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    with pytest.raises(ballast.UsageError, match=f"B1001(.|\n)*{said}"):
        ballast.load_checkpoint(tmp_path, model, optimizer)


def test_a_directory_of_nothing_is_refused(tmp_path):
    model = Tower()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    with pytest.raises(ballast.Error, match="B3201(.|\n)*checkpoint.json"):
        ballast.load_checkpoint(tmp_path, model, optimizer)
