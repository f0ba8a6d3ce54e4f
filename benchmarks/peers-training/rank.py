"""One rank of one system: rank.py SYSTEM WAY DIRECTORY TEXT. What it took is written to standard output, in JSON."""

import json
import os
import sys
import time
from pathlib import Path

WARM_UP = 3  # steps in which Ballast and DeepSpeed learn the order in which units are used


def memory(field: str) -> int:
    """Bytes, of the line of that name in what the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    import torch
    import torch.distributed

    imported = memory("VmRSS")
    import gpt
    import trainers
    from comparisons import WAYS
    from systems import SYSTEMS

    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed and its compilers write to standard output
    name_of_system, name_of_way, directory, kept = sys.argv[1:]
    system = next(each for each in SYSTEMS if each.name == name_of_system)
    way = next(each for each in WAYS if each.name == name_of_way)
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    options = {key: of_run(value, directory) for key, value in system.options.items()}

    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, way.dtype))
    shape = way.shape
    model = gpt.GPT(shape.layers, shape.width, shape.width // 64, shape.context)
    torch.set_default_dtype(torch.float32)  # as DeepSpeed expects it
    trainer = getattr(trainers, system.trainer)(model, way.micro_steps, way.max_norm, **options)
    keep_text(Path(kept))
    text = torch.frombuffer(bytearray(Path(kept).read_bytes()), dtype=torch.uint8)

    losses, seconds = [], []
    for step in range(WARM_UP + shape.steps):
        batches = [
            gpt.batch(text, step * way.micro_steps + number, shape.sequences, shape.context)
            for number in range(way.micro_steps)
        ]
        begin = time.perf_counter()
        losses.append(trainer.train(batches))
        seconds.append(time.perf_counter() - begin)
    took = {"seconds": seconds[WARM_UP:], "losses": losses, "imported_bytes": imported, "peak_bytes": memory("VmHWM")}
    print(json.dumps(took), file=output, flush=True)
    trainer.close()
    os._exit(0)  # torch's groups end badly now and then, or not at all: those of DDP and DeepSpeed


def keep_text(path: Path) -> None:
    """That of the first run is the one of all, whatever is edited meanwhile."""
    import gpt

    if not path.exists():
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(bytes(gpt.text_of_this_project().tolist()))
        own.replace(path)


def of_run(value: object, directory: str) -> object:
    return f"nvme:{directory}" if value in ("nvme", "nvme:") else value


if __name__ == "__main__":
    main()
