"""Find the largest Llama that each system trains in a limited memory: sizes of 125M to 32B, each until it is killed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import suite
from control_group import ControlGroup
from systems import DDP, FSDP, System, Workload, peer

TOKENS, STEPS = 128, 2  # of a step; of a training
TIME_LIMIT = 3600  # seconds of a training
LEFT_FREE = 5 << 30  # bytes of the drive
GIBIBYTE = 1 << 30
KILLED, FAILED, NOT_TRIED = "killed", "failed", "not tried"
CPP = "llama"  # the trainer of this name is a program in C++
VOCABULARY = 32000


class Llama(NamedTuple):
    """A model in the shape of Llama 3, with tied embeddings and the vocabulary of Llama 2."""

    name: str
    layers: int
    width: int
    inner: int
    heads: int
    key_value_heads: int

    vocabulary = VOCABULARY

    @property
    def config(self) -> dict[str, Any]:
        """Return what transformers and the C++ trainer read."""
        return {
            **{"model_type": "llama", "vocab_size": VOCABULARY, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
            **{"hidden_size": self.width, "intermediate_size": self.inner, "num_hidden_layers": self.layers},
            **{"num_attention_heads": self.heads, "num_key_value_heads": self.key_value_heads, "use_cache": False},
        }

    @property
    def parameters(self) -> int:
        attention = 2 * self.width**2 * (1 + self.key_value_heads / self.heads)
        layer = attention + 3 * self.width * self.inner + 2 * self.width
        return int(self.layers * layer + (VOCABULARY + 1) * self.width)


MODELS = (
    Llama("125M", 16, 768, 2048, 12, 4),
    Llama("350M", 28, 1024, 2816, 16, 4),
    Llama("1B", 21, 2048, 5632, 32, 8),
    Llama("2B", 28, 2560, 6912, 20, 4),
    Llama("4B", 39, 3072, 8192, 24, 8),  # that of examples/llama/larger-than-memory
    Llama("8B", 36, 4096, 14336, 32, 8),
    Llama("13B", 40, 5120, 13824, 40, 40),
    Llama("32B", 64, 5120, 27648, 40, 8),
)

SMALL = "all on the drive, 4-bit state"
BF16 = {"gradient_format": "bf16"}
ON_DRIVE = {"stage": 3, "offload": {"parameters": "nvme:", "state": "nvme:"}, "update_in_backward": True}
# Each with the bytes on the drive for each parameter.
SYSTEMS = {
    peer(DDP, "Ddp"): 0,
    peer(f"{FSDP}, offload to the CPU", "Fsdp", offload=True): 0,
    peer("DeepSpeed ZeRO 3, all on the drive", "DeepSpeed", stage=3, offload="nvme:", parameters="nvme:", subgroup=10**7): 18,
    peer("Ballast, all on the drive", "Ballast", **ON_DRIVE): 14.5,
    peer(f"Ballast, {SMALL}", "Ballast", state_format="4bit", **ON_DRIVE): 4.2,
    peer(f"Ballast, {SMALL}, bf16 gradients", "Ballast", state_format="4bit", **BF16, **ON_DRIVE): 4.2,
    peer(f"Ballast in C++, {SMALL}", CPP): 4.2,
    peer(f"Ballast in C++, {SMALL}, bf16 gradients", CPP, **BF16): 4.2,
}


class Case(NamedTuple):
    system: System
    model: Llama

    @property
    def name(self) -> str:
        return f"{self.system.name}: {self.model.name}"

    @property
    def drive_bytes(self) -> float:
        return SYSTEMS[self.system] * self.model.parameters

    def command(self, program: str, folder: Path) -> list[str]:
        if self.system.trainer != CPP:
            return [sys.executable, __file__, "--rank", self.name, str(folder)]
        sizes = f"--new --context {TOKENS} --chunk {TOKENS} --steps {STEPS} --drive {folder}"
        tiers = "--stage 3 --parameters nvme --state nvme --state-format 4bit"
        gradients = f"--gradient-format {self.system.options.get('gradient_format', 'fp32')}"
        options = f"{sizes} {tiers} {gradients} --update-in-backward --staging 16 --lr 2e-6"
        return [program, str(folder), str(suite.ROOT / "README.md"), *options.split()]


CASES = [Case(system, model) for system in SYSTEMS for model in MODELS]


# --- One training ---


def limit_memory(group: ControlGroup, byte_count: int) -> None:
    """Let its processes together have so many bytes of memory and swap."""
    first = {"memory.limit_in_bytes": byte_count, "memory.memsw.limit_in_bytes": byte_count}
    group.limit(first, {"memory.max": byte_count, "memory.swap.max": 0})


def kills_in(group: ControlGroup) -> int:
    events = group.folder / ("memory.oom_control" if group.is_first else "memory.events")
    return next(int(line.split()[1]) for line in events.read_text().splitlines() if line.startswith("oom_kill "))


class Outcome(NamedTuple):
    seconds: float = 0.0  # of a step after the first
    peak_bytes: int = 0
    ended: str = ""  # why it did not train


def attempt(case: Case, program: str, directory: Path, memory: int) -> Outcome:
    """Train in a process of its own, which writes a line when it begins something, and "loss ..." at the end of a step."""
    free = shutil.disk_usage(directory).free - LEFT_FREE
    if case.drive_bytes > free:
        needed = f"it needs {case.drive_bytes / 1e9:.0f} GB of the drive, which has {free / 1e9:.0f}"
        return Outcome(ended=f"{NOT_TRIED}: {needed}")
    limited = ControlGroup("ladder", "memory", "memory")
    with tempfile.TemporaryDirectory(prefix="ballast-ladder-", dir=directory) as name, limited:
        folder = Path(name)
        limit_memory(limited, memory)
        (folder / "config.json").write_text(json.dumps(case.model.config))
        log = folder / "log"
        own = {"stdout": subprocess.PIPE, "stderr": log.open("w"), "text": True, "preexec_fn": limited.enter}
        [process] = suite.start_ranks(1, lambda rank: case.command(program, folder), lambda rank: own)
        timer = threading.Timer(TIME_LIMIT, process.kill)
        timer.start()
        said = [(time.perf_counter(), line.strip()) for line in process.stdout]
        peak = suite.end_of(process)
        timer.cancel()
        ended = [when for when, line in said if line.startswith("loss ")]
        if process.returncode == 0:
            steps = [later - when for when, later in zip(ended, ended[1:])]
            return Outcome(statistics.fmean(steps), peak)
        phase = said[-1][1] if said else "starting"
        if kills_in(limited):
            return Outcome(ended=f"{KILLED} while {phase}")
        print(log.read_text()[-4000:], file=sys.stderr)
        return Outcome(ended=f"{FAILED} while {phase}, with code {process.returncode}")


def train(case: Case, folder: Path) -> None:
    """Train in this process."""
    import torch
    import trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    output = suite.own_output()
    say: Callable[[str], None] = lambda text: print(text, file=output, flush=True)
    workload = Workload(case.model.name, case.model, ranks=1)
    options = trainers.with_directory(case.system.options, str(folder))
    kind = getattr(trainers, case.system.trainer)

    class Model(LlamaForCausalLM):
        @property
        def blocks(self) -> torch.nn.ModuleList:
            return self.model.layers

    say("building the model")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with kind.building(workload, **options):
        model = Model(LlamaConfig(**case.model.config))
    torch.set_default_dtype(torch.float32)  # as DeepSpeed expects it
    model.gradient_checkpointing_enable()
    model.train()
    say("wrapping the model")
    trainer = kind(model, workload, **options)
    for step in range(STEPS):
        loss = make_step(step, TOKENS, (trainer.model, trainer.backward, trainer.step), say)
        say(f"loss {loss:.4f}")
    os._exit(0)  # without close(), in which Ballast gathers all parameters


def make_step(step: int, length: int, parts: tuple[Callable, Callable, Callable], say: Callable[[str], None]) -> float:
    """Train on a part of a text with the calls of forward, backward and update; say when each begins. Return the loss."""
    import torch

    forward, backward, update = parts
    text = torch.frombuffer(bytearray((suite.ROOT / "README.md").read_bytes()), dtype=torch.uint8).long()
    tokens = text[step * length :][:length].unsqueeze(0)
    say(f"in forward of step {step + 1}")
    loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
    say(f"in backward of step {step + 1}")
    backward(loss)
    say(f"in the update of step {step + 1}")
    update()
    return loss.item()


# --- The ladder ---


def climb(cases: list[Case], attempt: Callable[[Case], Outcome]) -> Iterator[tuple[Case, Outcome]]:
    """Try the cases of each system, which are in the order of their sizes, up to the first that does not train. What is killed
    is tried once more: at the limit, chance decides."""
    stopped = set()
    for case in cases:
        if case.system in stopped:
            continue
        outcome = attempt(case)
        if outcome.ended.startswith(KILLED):
            outcome = attempt(case)
        if outcome.ended:
            stopped.add(case.system)
        yield case, outcome


def records(case: Case, outcome: Outcome, memory: int) -> list[dict]:
    """Return a line of the seconds and a line of the peak; of what did not train, one with the limit and the reason."""
    if outcome.ended:
        return [suite.line(f"{case.name}, {outcome.ended}", memory / GIBIBYTE, "GiB")]
    peak = suite.line(f"{case.name}, memory", outcome.peak_bytes / GIBIBYTE, "GiB")
    return [suite.line(case.name, outcome.seconds, "s"), peak]


def parser_of(name: str, about: str, gigabytes: int, memory: int) -> argparse.ArgumentParser:
    if os.geteuid() != 0 and not {"--help", "-h", "--list"} & set(sys.argv):
        sys.exit(f"{name}: cannot limit memory: control groups need root")
    parser = suite.parser_of(name, about, directory=f"a directory on a drive with {gigabytes} GB")
    help = "GiB of memory and swap of a training (%(default)s)"
    parser.add_argument("--memory", type=lambda text: int(float(text) * GIBIBYTE), default=str(memory), help=help)
    return parser


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        train(next(case for case in CASES if case.name == sys.argv[2]), Path(sys.argv[3]))
    parser = parser_of("ladder", __doc__, gigabytes=20, memory=4)
    parser.add_argument("--program", required=True, help=argparse.SUPPRESS)
    options = suite.choose(parser, CASES, lambda case: case.name)
    for case, outcome in climb(options.cases, lambda case: attempt(case, options.program, options.directory, options.memory)):
        suite.emit("ladder", records(case, outcome, options.memory))


if __name__ == "__main__":
    main()
