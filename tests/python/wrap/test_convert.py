"""Tests of trainings that come from other programs: `ballast.load_checkpoint()` resumes them, and so does what `ballast
convert` makes of them, with the same bits."""

from __future__ import annotations

import json
import logging
import re

import ballast
import pytest
import torch
from ballast.checkpoint.foreign import source_of
from ballast.checkpoint.manifest import problems_of
from ballast.tools.command_line import main
from python.wrap.support import others, saved
from python.wrap.support.loops import Loop, Run, keywords
from python.wrap.support.others import as_zero, classes, optimizer_state, save_in_parts
from python.wrap.support.resident import peak_resident
from python.wrap.test_foreign import as_universal
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict


def as_zero_1(folder, run):
    as_zero(folder, run, stage=1, ranks=3)


def as_older_zero_2(folder, run):
    as_zero(folder, run, paddings=False)


def as_zero_3(folder, run):
    as_zero(folder, run, stage=3, ranks=3)


def as_accelerate(folder, run):
    """Write the folders of Accelerate's FSDP plugin."""
    dcp.save({"model": get_model_state_dict(run.model)}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    state = get_optimizer_state_dict(run.model, run.optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=folder / "optimizer_0", no_dist=True)


def as_torch_dict(folder, run, named=True):
    """Write one file with the model inside of DistributedDataParallel and its optimizer."""
    folder.mkdir(parents=True, exist_ok=True)
    model = {f"module.{name}": each for name, each in run.model.state_dict().items()}
    torch.save({"model": model, "optimizer": optimizer_state(run, named), "epoch": 2}, folder / "last.pt")


def as_zero_0(folder, run, named=True):
    """Write a checkpoint of DeepSpeed's engine without ZeRO, in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"module": run.model.state_dict(), "optimizer": optimizer_state(run, named), "global_steps": 3}
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def as_lightning(folder, run, named=True):
    """Write a .ckpt, with an object of the script and the state of a callback."""
    folder.mkdir(parents=True, exist_ok=True)
    with classes("of_a_script.Settings") as (settings,):
        content = {"state_dict": run.model.state_dict(), "optimizer_states": [optimizer_state(run, named)]}
        content |= {"hyper_parameters": {"settings": settings()}, "callbacks": {"best": {"score": torch.tensor(0.5)}}}
        torch.save(content, folder / "last.ckpt")


def as_safetensors(folder, run):
    """Write the folder of Accelerate without FSDP. Shared parameters have one name; pytorch_model.bin has other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = dict(run.model.named_parameters()).keys() | {name for name, _ in run.model.named_buffers()}
    save_in_parts(folder, {name: each for name, each in run.model.state_dict().items() if name in kept}, 1)
    torch.save({"position": torch.zeros(16)}, folder / "pytorch_model.bin")
    torch.save(optimizer_state(run, True), folder / "optimizer.bin")


def as_distributed(folder, run):
    model, optimizer = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder, no_dist=True)


# Each writer, and the place in its folder that a user names.
KINDS = {
    "zero 1": (as_zero_1, ""),
    "zero 2": (others.as_zero, "global_step3"),
    "older zero 2": (as_older_zero_2, ""),
    "zero 3": (as_zero_3, ""),
    "universal": (as_universal, ""),
    "distributed": (as_distributed, ""),
    "accelerate": (as_accelerate, ""),
    "torch.save": (as_torch_dict, "last.pt"),
    "lightning": (as_lightning, "last.ckpt"),
    "transformers": (others.as_transformers, ""),
    "safetensors": (as_safetensors, ""),
}


@pytest.fixture(scope="module")
def run():
    """Return a training of plain torch, with two groups, buffers, and tied, frozen and unused parameters."""
    loop = Loop(make_model=saved.Buffered, steps=3)
    model = saved.Buffered()
    return loop.train(model, torch.optim.AdamW(saved.groups_of(model)))


@pytest.fixture(scope="module")
def places(run, tmp_path_factory):
    """Return the path of the training's checkpoint in each format."""
    found = {}
    for kind, (writes, place) in KINDS.items():
        folder = tmp_path_factory.mktemp("other") / "checkpoint"
        writes(folder, run)
        found[kind] = folder / place
    return found


def resumed(path, dtype=torch.float32, **options):
    """Return a training with other values that has loaded a checkpoint."""
    model = saved.other_parameters(saved.Buffered()).to(dtype)
    optimizer = ballast.wrap(torch.optim.AdamW(saved.groups_of(model)), model, **keywords(**(options or {"stage": 3})))
    assert ballast.load_checkpoint(path, model, optimizer) is None
    return Run(model, optimizer, [])


def everything_in(training):
    """Return all values of a training by name, with the moments and steps of each parameter."""
    with ballast.gather(training.model):
        found = {name: value.detach().clone() for name, value in training.model.state_dict().items()}
    for name, each in training.model.named_parameters():
        for key, value in training.optimizer.state.get(each, {}).items():
            found[f"{name}: {key}"] = torch.clone(torch.as_tensor(value))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_of_another_program_is_resumed(kind, run, places, tmp_path):
    """Parameters, moments and steps are those of the training, whether its checkpoint is read directly or converted."""
    direct = resumed(places[kind])
    found, expected = everything_in(direct), run.model.state_dict()
    assert direct.optimizer.steps == 3
    for name, each in run.model.named_parameters():
        if kind != "universal" or each.requires_grad:
            assert torch.equal(found[name], expected[name]), name
        for moment, value in others.state_of(run, each).items() if each.requires_grad else ():
            assert torch.equal(found[f"{name}: {moment}"], value), (name, moment)
    for name, value in run.model.named_buffers():
        assert kind == "universal" or name not in expected or torch.equal(found[name], value), name
    assert float(found["position: step"]) == 3
    main(["convert", str(places[kind]), str(tmp_path / "converted")])
    assert problems_of(tmp_path / "converted") == []
    assert saved.same(everything_in(resumed(tmp_path / "converted")), found)
    if kind == "zero 2":
        loop, converted = Loop(make_model=saved.Buffered, steps=5), resumed(tmp_path / "converted")
        losses = [loop.train(each.model, each.optimizer, 3).losses for each in (direct, converted)]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("state_format", ["fp32", "split", "compact"])
def test_masters_have_the_same_bits_in_all_formats(state_format, places, tmp_path):
    """A bf16 model gets the same parameters, masters and moments from a converted checkpoint as from the other program's."""
    main(["convert", str(places["zero 3"]), str(tmp_path / "converted")])
    values = []
    for path in (places["zero 3"], tmp_path / "converted"):
        training = resumed(path, torch.bfloat16, stage=2, state_format=state_format)
        ballast.save(tmp_path / state_format, training.model, training.optimizer)
        values.append(saved.values_in(tmp_path / state_format))
        training.optimizer.close()
    assert saved.same(*values)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_alone_are_read(kind, run, places, tmp_path):
    model = saved.other_parameters(saved.Buffered())
    ballast.load(model, places[kind])
    kept = {name for name, each in run.model.named_parameters() if each.requires_grad}
    names = kept if kind == "universal" else run.model.state_dict().keys()
    assert all(torch.equal(model.state_dict()[name], run.model.state_dict()[name]) for name in names)
    assert main(["export", str(places[kind]), str(tmp_path / "weights")]) == 0
    exported = saved.other_parameters(saved.Buffered())
    if kind != "universal":
        ballast.load(exported, tmp_path / "weights")
        assert saved.same(exported.state_dict(), run.model.state_dict())


BY_NUMBER = [as_torch_dict, as_lightning, others.as_transformers, as_zero_0]


@pytest.mark.parametrize("writes", BY_NUMBER)
def test_numbers_of_parameters_are_those_of_the_optimizer(writes, run, tmp_path, capsys):
    """A state_dict() without names gives numbers, in the order of the groups: load_checkpoint() knows the groups, and refuses
    others. A conversion has no optimizer."""
    writes(tmp_path, run, named=False)
    path = next((path for path in tmp_path.iterdir() if path.stem == "last"), tmp_path)
    found = everything_in(resumed(path))
    for name, each in run.model.named_parameters():
        for moment, value in others.state_of(run, each).items() if each.requires_grad else ():
            assert torch.equal(found[f"{name}: {moment}"], value), (name, moment)
    model = saved.Buffered()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    with pytest.raises(ballast.UsageError, match="B1001 cannot load optimizer state by number: the checkpoint has other"):
        ballast.load_checkpoint(path, model, optimizer)
    assert main(["convert", str(path), str(tmp_path / "out")]) == 2
    assert re.search(r"nothing says which parameter each number is(.|\n)*load_checkpoint\(\)", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_what_a_checkpoint_lacks_stays_and_is_named(places, tmp_path, caplog):
    """A universal checkpoint has no frozen parameters and buffers. A trained parameter must be there."""
    main(["convert", str(places["universal"]), str(tmp_path / "converted")])
    with caplog.at_level(logging.WARNING, "ballast"):
        resumed(tmp_path / "converted")
    assert "stay as they are" in caplog.text and "blocks.1.up.weight" in caplog.text and "mean" in caplog.text
    model = saved.Buffered()
    model.more = torch.nn.Linear(3, 3)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    with pytest.raises(ballast.UsageError, match=r"B1001 the checkpoint lacks a parameter that is trained(.|\n)*more\."):
        ballast.load_checkpoint(tmp_path / "converted", model, optimizer)
    optimizer = ballast.wrap(torch.optim.SGD(saved.Buffered().parameters(), lr=0.1, momentum=0.9))
    other = saved.Buffered()
    optimizer = ballast.wrap(torch.optim.SGD(saved.groups_of(other), lr=0.1, momentum=0.9), other)
    with pytest.raises(ballast.UsageError, match="B1001(.|\n)*keeps exp_avg and exp_avg_sq"):
        ballast.load_checkpoint(tmp_path / "converted", other, optimizer)


def test_the_command_says_what_it_has_written(places, run, tmp_path, capsys):
    assert main(["convert", str(places["zero 2"]), str(tmp_path / "out")]) == 0
    assert re.search(r"out: step 3, \d+ tensors, \d+ of them with exp_avg and exp_avg_sq, ", capsys.readouterr().out)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "from a checkpoint of DeepSpeed" in capsys.readouterr().out
    assert main(["convert", "--json", str(places["zero 3"]), str(tmp_path / "json")]) == 0
    trained = sum(each.requires_grad for each in run.model.parameters())
    assert json.loads(capsys.readouterr().out)["trained"] == trained
    safe = tmp_path / "deep" / "safe"
    assert main(["export", str(tmp_path / "out"), str(safe)]) == 0
    files = tmp_path / "files"
    files.mkdir()
    torch.save(run.model.state_dict(), files / "model.pt")
    torch.save({"model": run.model.state_dict(), "optimizer": ranger_state(run)}, files / "ranger.pt")
    for path, said in {
        tmp_path / "out": "it is a checkpoint of Ballast already",
        safe: "no optimizer state",
        files / "model.pt": "without optimizer state(.|\n)*ballast export",
        files / "ranger.pt": "no update rule of Ballast keeps its slow_buffer",
        tmp_path / "nosuch": "there is no such directory",
        tmp_path: "Name one of them, such as .*(json|out)",
        files: "files of torch.save(.|\n)*model.pt, ranger.pt(.|\n)*Name one of them, such as .*model.pt",
    }.items():
        capsys.readouterr()
        assert main(["convert", str(path), str(tmp_path / "no")]) == 2, path
        assert re.search(said, capsys.readouterr().err), path
        assert not (tmp_path / "no").exists()
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "no"), "--to", "distributed"]) == 2
    assert "it has no parameter groups" in capsys.readouterr().err
    assert main(["convert", str(places["zero 2"]), str(tmp_path / "out")]) == 2
    assert "there is a checkpoint already" in capsys.readouterr().err


def ranger_state(run):
    state = others.optimizer_state(run, named=True)
    for each in state["state"].values():
        each["slow_buffer"] = each["exp_avg"]
    return state


@pytest.mark.parametrize("kind", ["zero 2", "zero 3", "torch.save", "transformers"])
def test_a_conversion_needs_memory_for_a_few_tensors(kind, tmp_path):
    """The training has 120 MiB in equal tensors. A conversion needs 10 of them, and 16 MiB to write."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    writes, place = KINDS[kind]
    small = Loop(steps=1).run()
    for folder, each in (("small", small), ("large", Run(model, optimizer, []))):
        writes(tmp_path / folder, each)
    assert main(["convert", str(tmp_path / "small" / place), str(tmp_path / "first")]) == 0
    before = peak_resident(begin=True)
    assert main(["convert", str(tmp_path / "large" / place), str(tmp_path / "out")]) == 0
    assert peak_resident() - before < 10 * model[0].weight.nbytes + (16 << 20)


def test_state_without_its_masters_is_left_out(run, tmp_path, caplog):
    """DeepSpeed's 16-bit training without ZeRO has the masters in a list of its own."""
    path = tmp_path / "mp_rank_00_model_states.pt"
    optimizer = {"optimizer_state_dict": others.optimizer_state(run, named=True), "fp32_groups": [[torch.zeros(3)]]}
    torch.save({"module": run.model.state_dict(), "optimizer": optimizer}, path)
    ballast.load(saved.Buffered(), tmp_path)
    model = saved.Buffered()
    wrapped = ballast.wrap(torch.optim.AdamW(saved.groups_of(model)), model)
    with caplog.at_level(logging.WARNING, "ballast"), pytest.raises(ballast.UsageError, match="lacks the optimizer's exp_avg"):
        ballast.load_checkpoint(tmp_path, model, wrapped)
    assert "its masters are not read" in caplog.text


def test_names_of_wrappers_are_left_out(run, tmp_path):
    """DeepSpeed was given a compiled model."""
    compiled = torch.nn.Module()
    compiled._orig_mod = run.model
    others.as_zero(tmp_path, Run(compiled, run.optimizer, []))
    assert torch.equal(everything_in(resumed(tmp_path))["position"], run.model.position)
    assert "_orig_mod.position" in source_of(tmp_path).names()
