"""Train one rank of one system: rank.py SYSTEM WORKLOAD DIRECTORY TEXT. Write times and memory to standard output, in JSON."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 3  # steps in which Ballast and DeepSpeed learn the order in which units are used


def memory(field: str) -> int:
    """Return the bytes in the line of this name in the kernel's status of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    from comparisons import WORKLOADS
    from systems import SYSTEMS

    name_of_system, name_of_workload, directory, kept = sys.argv[1:]
    system = next(each for each in SYSTEMS if each.name == name_of_system)
    workload = next(each for each in WORKLOADS if each.name == name_of_workload)
    train(system, workload, Path(directory), Path(kept), dict)


def train(system: Any, workload: Any, directory: Path, kept: Path, count: Callable[[], dict[str, float]]) -> None:
    """Train, print what it took, and end the process. The difference of `count()` over the timed steps is printed too."""
    import torch
    import torch.distributed

    imported = memory("VmRSS")
    import gpt
    import trainers

    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed and its compilers write to standard output
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    options = {key: of_run(value, str(directory)) for key, value in system.options.items()}

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, workload.dtype))
    shape = workload.shape
    model = gpt.GPT(shape.layers, shape.width, shape.width // 64, shape.context)
    torch.set_default_dtype(torch.float32)  # as DeepSpeed expects it
    trainer = getattr(trainers, system.trainer)(model, workload, **options)
    keep_text(kept)
    text = torch.frombuffer(bytearray(kept.read_bytes()), dtype=torch.uint8)

    losses, seconds, before = [], [], {}
    for step in range(WARM_UP + shape.steps):
        batches = [
            gpt.batch(text, step * workload.micro_steps + number, shape.sequences, shape.context)
            for number in range(workload.micro_steps)
        ]
        before = count() if step == WARM_UP else before
        begin = time.perf_counter()
        losses.append(trainer.train(batches))
        seconds.append(time.perf_counter() - begin)
    counted = {name: value - before[name] for name, value in count().items()}
    took = {"seconds": seconds[WARM_UP:], "losses": losses, "imported_bytes": imported, "peak_bytes": memory("VmHWM")}
    print(json.dumps({**took, **counted}), file=output, flush=True)
    trainer.close()
    os._exit(0)  # torch's groups under DDP and DeepSpeed sometimes fail at exit, or hang


def keep_text(path: Path) -> None:
    """Write the text once: all runs train on the text of the first, even if the documents change meanwhile."""
    import gpt

    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as own:  # ranks on imitated hosts share process numbers
            own.write(bytes(gpt.text_of_this_project().tolist()))
        Path(own.name).replace(path)


def of_run(value: object, directory: str) -> object:
    return f"nvme:{directory}" if value in ("nvme", "nvme:") else value


if __name__ == "__main__":
    main()
