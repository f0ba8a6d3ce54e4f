"""Tests of models whose parameters are DTensors: the local tensors are trained, and the norm counts each element once."""

from __future__ import annotations

import re
from typing import Any

import ballast
import pytest
import torch
from ballast.torch.parts import Part
from python.wrap.support.frameworks import as_launched, tiny_model
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

WORDS, WIDTH, TOKENS, STEPS, CLIP = 24, 12, 12, 6, 0.4


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 30)
        self.down = torch.nn.Linear(30, WIDTH)
        self.last = torch.nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        result: torch.Tensor = self.last(hidden)
        return result


class Words(torch.nn.Module):
    """A model with a layer of each kind: sharded by rows and by columns, replicated, plain, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(2)])
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        for frozen in (self.blocks[0].up.weight, self.blocks[0].down.weight):
            frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def parallel(model: Words, mesh: Any) -> Words:
    """Shard the model over the ranks of the mesh. The norms of the second block treat a part of each sequence."""
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate())})
    parallelize_module(model.blocks[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "last": SequenceParallel(),
    }
    parallelize_module(model.blocks[1], mesh, plan)
    sequence = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(model.blocks[1], mesh, sequence)
    parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    return model


def batches(step: int, ranks: int, rank: int | None) -> torch.Tensor:
    """Return the tokens of one rank with other data, or those of all."""
    tokens = torch.randint(WORDS, (12, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return tokens if rank is None else tokens.chunk(ranks)[rank]


def plain_losses(steps: int = STEPS) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train on one rank, without Ballast. Return losses, norms before clipping, and the parameters."""
    model = Words()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        loss = model(batches(step, 1, None))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: each.detach() for name, each in model.named_parameters()}


def train(model: Any, optimizer: Any, first: int, last: int, place: tuple[int, int]) -> list[float]:
    """Return the losses of all ranks with other data, whose number and place are given."""
    losses = []
    for step in range(first, last):
        loss = model(batches(step, *place))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        [total] = optimizer._ballast.group.all_reduce([round(loss.item() * 2**40)])
        losses.append(total / 2**40 / place[0])
    return losses


def wrapped(model: torch.nn.Module, **options: Any) -> Any:
    trained = [each for each in model.parameters() if each.requires_grad]
    return ballast.wrap(torch.optim.AdamW(trained, lr=1e-2), model, max_grad_norm=CLIP, **options)


def two_by_two(rank: int, stages: list[int], folder: str) -> list[Any]:
    """Train in each stage on two ranks with other data and two with other parts, and save there."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for stage in stages:
        model = parallel(Words(), mesh["tp"])
        optimizer = wrapped(model, stage=stage, mesh=mesh["dp"] if stage < 3 else mesh)
        losses, norms = [], []
        for step in range(STEPS // 2):
            losses += train(model, optimizer, step, step + 1, (2, rank // 2))
            norms.append(optimizer.metrics()["grad_norm"])
        ballast.save(f"{folder}/{stage}", model, optimizer, extra=rank)
        ballast.export(model, f"{folder}/{stage}.safetensors")
        losses += train(model, optimizer, STEPS // 2, STEPS, (2, rank // 2))
        full: dict[str, torch.Tensor] = {}
        ballast.sync_weights(model, lambda name, values: full.update({name: values.clone()}))
        with ballast.gather(model):
            kinds = {type(module.weight) for module in (model.head, model.blocks[0].up)}
        results.append((losses, norms, full, kinds == {DTensor}, {*map(type, model.parameters())}))
        optimizer.close()
    return results


def on_three_ranks(rank: int, stages: list[int], folder: str) -> list[Any]:
    """Resume without other parts, and from the exported file."""
    results = []
    for stage in stages:
        model = Words()
        optimizer = wrapped(model, stage=stage)
        extra = ballast.load_checkpoint(f"{folder}/{stage}", model, optimizer)
        results.append((train(model, optimizer, STEPS // 2, STEPS, (3, rank)), extra))
        optimizer.close()
    return results


def on_other_parts(rank: int, stage: int, folder: str) -> list[Any]:
    """Resume on one rank with other data and three with other parts. Save there, and load that."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    model = parallel(Words(), mesh["tp"])
    optimizer = wrapped(model, stage=stage, mesh=mesh)
    ballast.load_checkpoint(f"{folder}/{stage}", model, optimizer)
    pending = ballast.save(f"{folder}/again", model, optimizer, wait=False)
    pending.wait()
    losses = train(model, optimizer, STEPS // 2, STEPS, (1, None))
    optimizer.close()
    model = parallel(Words(), mesh["tp"])
    ballast.load(model, f"{folder}/{stage}.safetensors")
    optimizer = wrapped(model, stage=stage, mesh=mesh)
    ballast.load_checkpoint(f"{folder}/again", model, optimizer)
    return [losses, train(model, optimizer, STEPS // 2, STEPS, (1, None))]


def test_two_by_two_ranks_train_as_one_and_others_resume(tmp_path):
    stages = [0, 2, 3]
    losses, norms, parameters = plain_losses()
    for ranks in run_ranks(4, two_by_two, stages, str(tmp_path)):
        for ours, our_norms, full, are_dtensors, kinds in ranks:
            assert ours == pytest.approx(losses, rel=2e-6)
            assert our_norms == pytest.approx(norms[: STEPS // 2], rel=2e-6)
            assert are_dtensors and DTensor not in kinds
            for name, values in parameters.items():
                torch.testing.assert_close(full[name], values, atol=1e-5, rtol=1e-4)
    after = losses[STEPS // 2 :]
    for rank, results in enumerate(run_ranks(3, on_three_ranks, stages, str(tmp_path))):
        for ours, extra in results:
            assert ours == pytest.approx(after, rel=2e-6)
            assert extra == rank
    for each in run_ranks(3, on_other_parts, 2, str(tmp_path))[0] + run_ranks(3, on_other_parts, 3, str(tmp_path))[0]:
        assert each == pytest.approx(after, rel=2e-6)


# --- Models of transformers ---


def llama_on_ranks(rank: int, folder: str) -> tuple[list[float], list[float], bool]:
    """Train a Llama whose matrices transformers has sharded over two ranks, and evaluate it. Return losses of one rank, and of
    this training."""
    as_launched(rank)
    import transformers
    from transformers.distributed import DistributedConfig

    def train_and_evaluate(model: Any, optimizer: Any) -> list[float]:
        losses = []
        for step in range(3):
            tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        with torch.no_grad():
            return [*losses, float(model(input_ids=tokens, labels=tokens).loss)]

    kind = transformers.LlamaForCausalLM
    plain = kind.from_pretrained(folder)
    expected = train_and_evaluate(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    model = kind.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
    had_dtensors = any(isinstance(each, DTensor) for each in model.parameters())
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3, mesh=model._device_mesh)
    losses = train_and_evaluate(model, optimizer)
    ballast.export(model, f"{folder}/model.safetensors")
    optimizer.close()
    again = kind.from_pretrained(folder)
    with torch.no_grad():
        tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(2))
        return expected + expected[-1:], [*losses, float(again(input_ids=tokens, labels=tokens).loss)], had_dtensors


def test_a_model_of_transformers_is_trained_where_it_is_sharded(tmp_path):
    pytest.importorskip("transformers")
    tiny_model(32).save_pretrained(tmp_path)
    for expected, losses, had_dtensors in run_ranks(2, llama_on_ranks, str(tmp_path), imported=FRAMEWORKS):
        assert had_dtensors
        assert losses == pytest.approx(expected, rel=1e-4)


# --- What is refused, and what else counts ---


class Placed(torch.nn.Module):
    """Parameters with these placements, of which each rank has the local tensors."""

    def __init__(self, mesh: Any, placements: list[Any], sizes: list[int]):
        super().__init__()
        self.each = torch.nn.ParameterList(
            torch.nn.Parameter(DTensor.from_local(torch.ones(size), mesh, [each], run_check=False))
            for each, size in zip(placements, sizes)
        )
        self.plain = torch.nn.Parameter(torch.ones(3))


def message_of(call: Any) -> str:
    with pytest.raises(ballast.UsageError) as caught:
        call()
    return str(caught.value)


def refusals(rank: int) -> dict[str, str]:
    """Return what is said of DTensors that cannot be trained. The model and its optimizer stay as they were."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine, found = mesh["tp"], {}
    model = Placed(mine, [Shard(0), Partial()], [2, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found["partial"] = message_of(lambda: ballast.wrap(optimizer, model, mesh=mesh))
    model = Placed(mine, [Shard(0)], [2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [*model.parameters()]
    found["no mesh"] = message_of(lambda: ballast.wrap(optimizer, model))
    found["run"] = message_of(lambda: ballast.wrap(optimizer, model, mesh=mesh, run="r", offload={"state": "nvme:."}))
    found["outer"] = message_of(lambda: ballast.wrap(optimizer, model, mesh=mesh["dp"], outer=ballast.DiLoCo(every=2)))
    found["no model"] = message_of(lambda: ballast.wrap(optimizer, mesh=mesh))
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    wide = Placed(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), [Shard(0)], [2])
    its_optimizer = torch.optim.SGD(wide.parameters(), lr=0.1)
    found["other ranks"] = message_of(lambda: ballast.wrap(its_optimizer, wide, mesh=mesh))
    found["sharded over data"] = message_of(lambda: ballast.wrap(optimizer, model, mesh=one))
    matrix = torch.nn.Linear(4, 6, bias=False)
    parallelize_module(matrix, mine, ColwiseParallel())
    for kind in (torch.optim.Muon, torch.optim.Adafactor):
        found[kind.__name__] = message_of(lambda kind=kind: ballast.wrap(kind(matrix.parameters()), matrix, mesh=mesh["dp"]))
    apart = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    if rank > 1:
        found["not in mesh"] = message_of(lambda: ballast.wrap(optimizer, model, mesh=apart))
    before[1].register_hook(lambda gradient: gradient)
    found["hook"] = message_of(lambda: ballast.wrap(optimizer, model, mesh=mesh))
    assert all(one is other for one, other in zip(before, [*model.parameters(), *optimizer.param_groups[0]["params"]] * 2))
    assert type(model.each) is torch.nn.ParameterList and type(optimizer) is torch.optim.SGD
    return found


def in_files_of_torch(rank: int, stage: int, folder: str) -> list[Any]:
    """Save with torch.distributed.checkpoint and load in another model. Return shapes, and whether both give the same."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    outputs, shapes = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)
        for each in (first, second):  # the second one has the DTensors of before
            ballast.wrap(each, model, stage=stage, mesh=mesh["dp"])
        model(torch.ones(2, 6)).sum().backward()
        with ballast.gather(model):
            state = model.state_dict()
            if seed == 0:
                torch.distributed.checkpoint.save(state, checkpoint_id=folder)
            else:
                torch.distributed.checkpoint.load(state, checkpoint_id=folder)
                model.load_state_dict(state)
                whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
                model.load_state_dict(whole)
                shapes = [tuple(each.shape) for each in whole.values()]
        outputs.append(model(torch.ones(2, 6)).detach())
        second.close()
        first.close()
    return [shapes, torch.equal(*outputs)]


@pytest.mark.parametrize("stage", [2, 3])
def test_files_of_torch_have_the_full_tensors(tmp_path, stage):
    for found in run_ranks(2, in_files_of_torch, stage, str(tmp_path)):
        assert found == [[(8, 6), (8,), (3, 8), (3,)], True]


def norm_of_placements(rank: int, sizes: list[int]) -> tuple[float, str]:
    """Return the norm of gradients that are 1 everywhere, in a model of sharded, replicated and plain parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Placed(mesh["tp"], [Shard(0), Replicate()], sizes)
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=2, mesh=mesh)
    sum(each.sum() for each in model.parameters()).backward()
    said = message_of(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    norm = float(optimizer.clip_grad_norm_(1.0))
    optimizer.close()
    return norm, said


def test_what_cannot_be_trained_is_named():
    expected = {
        "partial": "cannot train a DTensor(.|\n)*parameter each.1(.|\n)*Shard and Replicate",
        "no mesh": 'mesh does not say which ranks have other data(.|\n)*mesh=mesh."dp".',
        "run": "cannot train DTensors with run=",
        "outer": "exclude each other",
        "no model": "no module of the model has",
        "other ranks": "its mesh has other ranks than those",
        "sharded over data": "mesh does not say(.|\n)*fully_shard",
        "Muon": "shards of a DTensor with Muon(.|\n)*AdamW",
        "Adafactor": "shards of a DTensor with Adafactor",
        "not in mesh": "this process is not in it",
        "hook": "has hooks(.|\n)*parameter each.0",
    }
    for rank, found in enumerate(run_ranks(4, refusals)):
        assert found.keys() == expected.keys() - ({"not in mesh"} if rank < 2 else set())
        for name, said in found.items():
            assert re.search(expected[name], said), said


def test_the_norm_counts_each_element_once():
    sizes = [5, 7]
    elements = 2 * sizes[0] + sizes[1] + 3  # of both shards, of the copy, and of the plain one
    for norm, said in run_ranks(4, norm_of_placements, sizes):
        assert norm == pytest.approx(elements**0.5)
        assert "optimizer.clip_grad_norm_" in said


@pytest.mark.parametrize(("shape", "box"), [
    ((7, 5), ((3, 5), (4, 0))),
    ((7, 5), ((7, 2), (0, 3))),
    ((4, 6, 5), ((2, 6, 5), (2, 0, 0))),
    ((4, 6, 5), ((2, 3, 5), (1, 2, 0))),
    ((4, 6, 5), ((4, 6, 2), (0, 0, 3))),
    ((4, 6), ((0, 6), (4, 0))),
    ((), ((), ())),
])  # fmt: skip
def test_ranges_of_a_part_are_its_elements(shape, box):
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    local = full[tuple(slice(at, at + size) for size, at in zip(*box))].flatten()
    part = Part(None, (), torch.Size(shape), ())
    vars(part)["_box"] = box
    for first in range(len(local)):
        for count in range(len(local) - first + 1):
            found = local.new_full((count,), -1)
            for there, some, at in part.ranges(first, count):
                found[at : at + some] = full.flatten()[there : there + some]
            assert found.equal(local[first : first + count])
