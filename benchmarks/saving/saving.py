"""Measure how long a save in the background holds a training up, vs. torch.distributed.checkpoint.async_save().

The same processes train one GPT with Ballast in stage 3, and one with FSDP2. Both have 12 bytes of state for each parameter.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import gpt
import suite
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

OURS, THEIRS = "Ballast", "torch.distributed.checkpoint"
MEASURES = {  # the keys are the names in what a rank prints
    "call": "call of a save in the background",
    "step": "first step after that call",
    "total": "from that call until the checkpoint is complete",
    "waits": "save that waits",
    "plain step": "step without a save",
}
LAYERS, WIDTH, CONTEXT, SEQUENCES = 8, 512, 64, 2  # 25 million parameters


class Ballast:
    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)

    def save(self, folder: Path) -> None:
        ballast.save(folder, self.model, self.optimizer)

    def begin(self, folder: Path) -> Callable[[], Any]:
        return ballast.save(folder, self.model, self.optimizer, wait=False).wait


class Fsdp2:
    def __init__(self, model: torch.nn.Module):
        for block in model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW(model.parameters())
        self._group = dist.new_group(backend="gloo")  # its threads exchange while the training does

    def save(self, folder: Path) -> None:
        checkpoint.save(self._state(), checkpoint_id=folder)

    def begin(self, folder: Path) -> Callable[[], Any]:
        return checkpoint.async_save(self._state(), checkpoint_id=folder, process_group=self._group).result

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def step(system: Any) -> None:
    text = torch.randint(256, (SEQUENCES, CONTEXT + 1))
    system.model(text[:, :-1], text[:, 1:]).backward()
    system.optimizer.step()
    system.optimizer.zero_grad()


def timed(do: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the slowest rank, when all begin together, and what this rank gets."""
    dist.barrier()
    begin = time.perf_counter()
    result = do()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item(), result


def saves(system: Any, folder: Path) -> dict[str, float]:
    """Save once in the background and once without it; remove both."""
    plain, _ = timed(lambda: step(system))
    begin = time.perf_counter()
    call, finish = timed(lambda: system.begin(folder / "background"))
    first, _ = timed(lambda: step(system))
    finish()
    dist.barrier()
    total = time.perf_counter() - begin
    waits, _ = timed(lambda: system.save(folder / "waits"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()
    return {"call": call, "step": first, "total": total, "waits": waits, "plain step": plain}


def train_rank(folder: Path, rounds: int) -> None:
    """Train and save with both systems on one rank. Rank 0 prints the seconds of the slowest rank, in JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    systems = {OURS: Ballast, THEIRS: Fsdp2}
    made = {name: kind(gpt.GPT(LAYERS, WIDTH, WIDTH // 64, CONTEXT)) for name, kind in systems.items()}
    samples = suite.in_turn(made, lambda name: saves(made[name], folder / name), rounds, warm_up=1)
    if dist.get_rank() == 0:
        print(json.dumps({name: {key: [save[key] for save in samples[name]] for key in MEASURES} for name in made}), flush=True)
    made[OURS].optimizer.close()
    dist.destroy_process_group()


def rows_of(seconds: dict[str, dict[str, list[float]]]) -> list[dict]:
    """Return a line for each measure, from the seconds of rounds by system and measure. Above 1, Ballast takes less time."""
    return [
        suite.versus(case, THEIRS, "ms", *(seconds[system][key] for system in (OURS, THEIRS)), value_of=lambda each: 1e3 * each)
        for key, case in MEASURES.items()
    ]


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return train_rank(Path(sys.argv[2]), int(sys.argv[3]))
    options = suite.parser_of("saving", __doc__, directory="a directory on the drive for checkpoints", rounds=8).parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-saving-", dir=options.directory) as folder:
        command = [sys.executable, __file__, "--rank", folder, str(options.rounds)]
        [found] = suite.run_ranks("saving", 2, lambda rank: command, Path(folder))
    suite.emit("saving", rows_of(found))


if __name__ == "__main__":
    main()
