"""Train a small byte-level GPT in plain PyTorch on the text of this project. One line of it adds Ballast.

python gpt.py                                                    plain PyTorch, one process
torchrun --nproc-per-node 2 gpt.py                               two ranks, DistributedDataParallel
torchrun --nproc-per-node 2 gpt.py --stage 3                     two ranks, each with half of everything
torchrun --nproc-per-node 2 gpt.py --stage 3 --offload nvme:.    and the optimizer state on this drive
torchrun --nproc-per-node 2 gpt.py --stage 3 --every 8 --hosts 2     two imitated hosts, which exchange parameters every 8 steps
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences, length, width = x.shape
        heads = self.queries_keys_values(self.attention_norm(x)).view(sequences, length, 3, self.heads, -1)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of predicting the following byte."""
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), following.flatten())


def text_of_this_project() -> torch.Tensor:
    root = Path(__file__).resolve().parents[1]
    files = (file for file in root.rglob("*.md") if not {"build", "venv", ".venv"} & set(file.relative_to(root).parts))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in sorted(files))), dtype=torch.uint8)


def batch(text: torch.Tensor, number: int, sequences: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a batch. All ranks together train on the same sequences, for any number of ranks."""
    chance = torch.Generator().manual_seed(number)
    begins = torch.randint(len(text) - context, (sequences,), generator=chance).tolist()
    rows = torch.stack([text[begin : begin + context + 1].long() for begin in begins[RANK::RANKS]])
    return rows[:, :-1], rows[:, 1:]


def choose_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    return torch.device("cuda")


def peak_of_process() -> int:
    """Return the peak of this process in host memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def options_of_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=640, help="width; there is a head for each 64")
    parser.add_argument("--context", type=int, default=256, help="bytes in a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="sequences in a step of all ranks")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--stage", type=int, help="ZeRO stage of Ballast (default: plain PyTorch)")
    parser.add_argument("--offload", help="tier of the optimizer state: host, or nvme:DIRECTORY")
    parser.add_argument("--every", type=int, help="let hosts train on their own, and exchange parameters every N steps")
    parser.add_argument("--hosts", type=int, help="imitate so many hosts with --every (default: the machines)")
    parser.add_argument("--json", type=Path, help="write losses, speed and memory of rank 0 to this file")
    return parser.parse_args()


def main() -> None:
    options = options_of_command()
    device, library_bytes = choose_device(), peak_of_process()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, options.dtype))
    text = text_of_this_project()
    model: nn.Module = GPT(options.layers, options.width, options.width // 64, options.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if options.stage is not None:
        import ballast

        placement = {"stage": options.stage, "offload": options.offload}
        if options.every is not None:
            torch.distributed.init_process_group("gloo")
            placement["outer"] = ballast.DiLoCo(every=options.every, hosts=options.hosts)
        optimizer = ballast.wrap(optimizer, model, **placement)  # the one added line
    elif RANKS > 1:
        torch.distributed.init_process_group()
        model = nn.parallel.DistributedDataParallel(model)

    losses, speeds = [], []
    for step in range(options.steps):
        begin = time.perf_counter()
        loss = model(*(part.to(device) for part in batch(text, step, options.sequences, options.context)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        speeds.append(options.sequences * options.context / (time.perf_counter() - begin))
        if RANK == 0:
            print(f"step {step + 1:>3}   loss {losses[-1]:.4f}   {speeds[-1]:,.0f} tokens/s", flush=True)
    if options.json and RANK == 0:
        held = getattr(optimizer, "metrics", dict)()  # plain PyTorch has none
        took = {"losses": losses, "tokens_per_second": speeds, "process_bytes": peak_of_process() - library_bytes}
        options.json.write_text(json.dumps({**took, "gpu_bytes": torch.cuda.max_memory_allocated(), "held": held}))


if __name__ == "__main__":
    main()
    if torch.distributed.is_initialized():  # the model is gone by now: otherwise DDP may never end
        torch.distributed.destroy_process_group()
