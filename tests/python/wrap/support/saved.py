"""The functions that ranks run in the tests of checkpoints, and a reader of everything in a checkpoint."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from ballast.checkpoint import manifest
from ballast.checkpoint.manifest import cover
from ballast.checkpoint.tensors import PlainTensor, Stream, Target, TrainedTensor
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, Tower

Configuration = Mapping[str, Any]  # options of wrap(), and "dtype"
Values = dict[str, torch.Tensor]
STEPS = 4


class Buffered(Tower):
    """A Tower with buffers, one of which is not saved. Another one counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("table", torch.arange(5), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.to(self.position.dtype)
        self.calls += 1
        self.mean.mul_(0.9).add_(self.first(batch).detach().mean(0), alpha=0.1)
        return super().forward(batch)


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[::2], "lr": 1e-2},
        {"params": parameters[1::2], "lr": 3e-3, "betas": (0.8, 0.95), "weight_decay": 0.1},
    ]


class Training:
    """A training loop with a wrapped optimizer of two parameter groups."""

    def __init__(self, configuration: Configuration, model: torch.nn.Module | None = None):
        options = dict(configuration)
        kind = getattr(torch.optim, options.pop("optimizer", "AdamW"))
        self.model = (Buffered() if model is None else model).to(options.pop("dtype", torch.float32))
        plain = kind(groups_of(self.model), lr=1.0)
        self.optimizer = ballast.wrap(plain, self.model, **keywords(**options))
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.loop = Loop(rank=dist.get_rank() if ranks > 1 else 0, ranks=ranks, steps=STEPS)

    def train(self, first: int, steps: int) -> list[float]:
        self.loop.steps = first + steps
        return self.loop.train(self.model, self.optimizer, first).losses

    def everything(self) -> Values:
        """Return the full parameters and the buffers, as in torch's state_dict()."""
        with ballast.gather(self.model):
            return {name: value.clone() for name, value in self.model.state_dict().items()}


def train_and_save(rank: int, folder: str, configurations: list[Configuration]) -> list[Values]:
    """Train two steps, then two more with frozen parameters that have state, and with a changed learning rate. Then save."""
    seen = []
    for number, configuration in enumerate(configurations):
        training = Training(configuration)
        training.train(0, 2)
        training.model.blocks[3].requires_grad_(False)
        training.optimizer.param_groups[1]["lr"] = 1e-3
        training.train(2, 2)
        ballast.save(f"{folder}/{number}", training.model, training.optimizer, extra={"rank": rank})
        seen.append(training.everything())
    return seen


def load_and_save(rank: int, pairs: list[tuple[str, str, Configuration]]) -> list[tuple[Values, int, Any, list[float]]]:
    """Load each checkpoint with the given options, save it in another directory, thaw a block and train two more steps."""
    seen = []
    for source, target, configuration in pairs:
        torch.manual_seed(1)  # other parameters than those that were saved
        training = Training(configuration, other_parameters(Buffered()))
        training.model.blocks[3].requires_grad_(False)
        extra = ballast.load_checkpoint(source, training.model, training.optimizer)
        everything, steps = training.everything(), training.optimizer.steps
        ballast.save(target, training.model, training.optimizer, extra=extra)
        training.model.blocks[3].requires_grad_(True)
        losses = training.train(STEPS, 2)
        seen.append((everything, steps, extra, losses))
    return seen


def saves_in_data_parallelism(rank: int, folder: str, stage: int) -> Values:
    """Train and save a DDP module around the model, as Accelerate and Trainer do."""
    training = Training({"stage": stage})
    around = torch.nn.parallel.DistributedDataParallel(training.model)
    training.loop.steps = 2
    training.loop.train(around, training.optimizer)
    ballast.save(f"{folder}/saved", around, training.optimizer)
    ballast.export(around, f"{folder}/model.safetensors")
    return training.everything()


def interrupted(rank: int, folder: str, configurations: list[Configuration]) -> tuple[list[list[float]], list[list[float]]]:
    """Return the losses after a save, of the training that continues and of another one that loads the checkpoint."""
    straight, again = [], []
    for number, configuration in enumerate(configurations):
        one = Training(configuration)
        one.train(0, 2)
        ballast.save(f"{folder}/{number}", one.model, one.optimizer)
        straight.append(one.train(2, 3))
        other = Training(configuration, other_parameters(Buffered()))
        ballast.load_checkpoint(f"{folder}/{number}", other.model, other.optimizer)
        again.append(other.train(2, 3))
    return straight, again


def one_rank_cannot_write(rank: int, folder: str) -> tuple[str, int, bool]:
    """Return the error, the step of the checkpoint that is there afterwards, and whether the training is unaffected."""
    training, other = Training({"stage": 2}), Training({"stage": 2})
    training.train(0, 1), other.train(0, 1)
    ballast.save(folder, training.model, training.optimizer)
    training.train(1, 1), other.train(1, 1)
    said = ""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limit[1]))
    try:
        ballast.save(folder, training.model, training.optimizer)
    except ballast.Error as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return said, manifest.read(folder).step, training.train(2, 1) == other.train(2, 1)


def one_rank_has_state_that_cannot_be_saved(rank: int, folder: str) -> str:
    training = Training({"stage": 2, "optimizer": "NAdam", "timeout": 30})
    training.train(0, 1)
    if rank == 1:
        next(iter(training.optimizer.state.values()))["phase"] = None
    try:
        ballast.save(folder, training.model, training.optimizer)
    except ballast.Error as error:
        return str(error)
    return ""


def one_rank_reads_a_flipped_bit(rank: int, folder: str) -> str:
    training = Training({"stage": 3, "offload": f"nvme:{folder}"})
    training.train(0, 1)
    ballast.save(f"{folder}/saved", training.model, training.optimizer)
    if rank == 0:
        piece = manifest.read(f"{folder}/saved").tensors["blocks.0.up.weight"].pieces[0]
        [path] = Path(folder, "saved").rglob(f"rank-{piece.file:05}.data")
        content = bytearray(path.read_bytes())
        content[piece.offset] ^= 1
        path.write_bytes(content)
    training.optimizer._ballast.group.barrier()
    try:
        ballast.load_checkpoint(f"{folder}/saved", training.model, training.optimizer)
    except ballast.Error as error:
        return str(error)
    return ""


def other_parameters(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def values_in(directory: str | Path) -> Values:
    """Return all values in a checkpoint: masters and moments in fp32, others in their own dtype."""
    checkpoint = manifest.read(directory)
    values: Values = {}
    for name, entry in checkpoint.tensors.items():
        target: Target
        if entry.role == "trained":
            moments = {kind: torch.zeros(entry.shape) for saved in checkpoint.optimizers for kind in saved.moments}
            values[name] = torch.zeros(entry.shape)
            values.update((f"{name}/{kind}", moment) for kind, moment in moments.items())
            target = TrainedTensor(name, entry, values[name], moments)
        else:
            values[name] = torch.zeros(entry.shape, dtype=getattr(torch, entry.dtype))
            target = PlainTensor(name, entry, values[name])
        stream = Stream(manifest.data_files(directory, checkpoint), entry.pieces)
        target.begin()
        for cut in cover(entry.pieces, 0, entry.elements):
            target.take(stream.go_to(cut.piece, name), cut)
        target.finish()
    return values


def same(one: Values, other: Values) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )


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


def loads_weights(rank: int, folder: str) -> Values:
    """Load the weights of a checkpoint into a deferred model in stage 3."""
    with ballast.deferred():
        model = Buffered()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2), model, stage=3)
    ballast.load(model, folder)
    optimizer.memory()
    with ballast.gather(model):
        return {name: value.clone() for name, value in model.state_dict().items()}
