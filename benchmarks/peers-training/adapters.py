"""Train adapters over a frozen Llama of 4 billion parameters in 2 GiB of memory: with Ballast, whose base is on the drive, with
plain PEFT, and with FSDP2 that offloads to the host.

The base has random values in bf16, which are written to files once. Each training reads these files as its users do.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import fio
import ladder
import suite
from ladder import MODELS, Llama, Outcome, make_step

TOKENS, RANK = 16, 16  # of a step, few, so that the drive is the limit; of the adapters
WARM_UP, STEPS = 3, 4  # Ballast learns the order of units in the first ones, and reads ahead of none
OURS, PEFT, FSDP = "Ballast, base on the drive", "PEFT", "PEFT, FSDP2 that offloads to the CPU"
BLOCK, DEPTH, READ = 4 << 20, 16, 4 << 30  # bytes of a request of fio, requests at once, bytes in all


class Case(NamedTuple):
    name: str
    model: Llama = MODELS[0]
    base: Path = Path()

    @property
    def drive_bytes(self) -> float:
        return 2 * self.model.parameters if self.name == OURS else 0

    def command(self, _: str, folder: Path) -> list[str]:
        return [sys.executable, __file__, "--rank", self.name, str(self.base), str(folder)]


CASES = [Case(OURS), Case(PEFT), Case(FSDP)]


# --- The base ---


def write_base(model: Llama, folder: Path) -> None:
    """Write files with random values, as a download has them: one for each block, and one for all else."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        shapes = {name: each.shape for name, each in LlamaForCausalLM(LlamaConfig(**model.config)).named_parameters()}
    of_file: dict[str, list[str]] = {}
    for name in shapes:
        block = name.split(".")[2] if ".layers." in name else "others"
        of_file.setdefault(f"{block}.safetensors", []).append(name)
    for file, names in of_file.items():
        values = {name: (0.02 * torch.randn(shapes[name])).to(torch.bfloat16) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in of_file.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(model.config))


def read_rate(base: Path) -> float:
    """Return the bytes a second of fio's fastest engine."""
    files = [str(each) for each in base.glob("[0-9]*.safetensors")]
    of_file = min(READ // len(files), min(os.path.getsize(each) for each in files)) // BLOCK * BLOCK
    job = fio.Job(files, "read", BLOCK, DEPTH, of_file * len(files))
    return job.bytes / min(fio.run(job, engine).seconds for engine in fio.ENGINES)


def bytes_of_step(model: Llama) -> int:
    """Return what a step reads of the base, in bf16: each matrix of the blocks twice, for forward and for recomputation and
    backward together, and the tied embedding at both ends of a pass."""
    return 2 * 2 * model.parameters


# --- One training ---


def train(name: str, base: Path, folder: Path) -> None:
    """Train in this process."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    def say(text: str) -> None:
        print(text, flush=True)

    say("reading the base")
    torch.manual_seed(0)
    if name == OURS:
        from ballast.integrations.transformers import from_pretrained

        model = from_pretrained(AutoModelForCausalLM, base)
    else:
        model = AutoModelForCausalLM.from_pretrained(base)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    say("adding adapters")
    model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"))
    say("wrapping the model")
    optimizer = optimizer_of(name, model, folder)
    model.train()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for step in range(WARM_UP + STEPS):
        loss = make_step(step, TOKENS, (model, torch.Tensor.backward, update), say)
        if step >= WARM_UP - 1:
            say(f"loss {loss:.4f}")
    os._exit(0)


def optimizer_of(name: str, model: Any, folder: Path) -> Any:
    import torch

    if name == FSDP:
        from torch.distributed import init_process_group
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        init_process_group("gloo")
        policy = CPUOffloadPolicy(pin_memory=False)
        for block in model.get_base_model().model.layers:
            fully_shard(block, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    if name == OURS:
        import ballast

        drive = {"parameters": f"nvme:{folder}", "state": f"nvme:{folder}"}
        return ballast.wrap(optimizer, model, stage=3, offload=drive)
    return optimizer


# --- The suite ---


def named(name: str) -> Llama:
    return next(model for model in MODELS if model.name == name)


def records(case: Case, outcome: Outcome, memory: int, rates: list[float]) -> list[dict]:
    """Return the lines of the ladder; that of the seconds has the floor."""
    rows = ladder.records(case, outcome, memory)
    if rates:
        floor = bytes_of_step(case.model) / statistics.fmean(rates)
        rows[0] |= {"against": "fio", "against_value": floor, "ratio": floor / rows[0]["value"]}
    return rows


def measure(cases: list[Case], base: Path, directory: Path, model: Llama, memory: int) -> None:
    # Another process writes the base, because trainings inherit the peak of this one.
    subprocess.run([sys.executable, __file__, "--write", model.name, base], check=True)
    for case in (each._replace(model=model, base=base) for each in cases):
        rates = [read_rate(base)] if case.name == OURS and fio.is_installed() else []
        outcome = ladder.attempt(case, "", directory, memory)
        rates += [read_rate(base)] if rates else []
        suite.emit("adapters", records(case, outcome, memory, [] if outcome.ended else rates))


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    if sys.argv[1:2] == ["--write"]:
        write_base(named(sys.argv[2]), Path(sys.argv[3]))
        return
    parser = ladder.parser_of("adapters", __doc__, gigabytes=25, memory=2)
    parser.add_argument("--model", choices=[model.name for model in MODELS], default="4B")
    options = suite.choose(parser, CASES, lambda case: case.name)
    with tempfile.TemporaryDirectory(prefix="ballast-base-", dir=options.directory) as base:
        measure(options.cases, Path(base), options.directory, named(options.model), options.memory)


if __name__ == "__main__":
    main()
