"""Measure the loss of a large vocabulary in chunks of tokens, in stage 3, vs. torch's cross entropy of all logits at once.

Each training is a process of its own with one thread: chunked_loss.py KIND trains, and prints in JSON what it took.
"""

import json
import subprocess
import sys
import time

import suite
from suite import status

WORDS, WIDTH, TOKENS, CHUNK = 152_064, 64, 4096, 128  # the vocabulary of Qwen2.5
WARM_UP, STEPS = 2, 3
NAME = f"loss of {WORDS:,} words in chunks, stage 3"
OURS, PLAIN = "chunked_loss()", "cross_entropy() of all logits"


def train(kind: str) -> dict[str, float]:
    """Return the seconds of a step, and the peak of all steps above what the process had before."""
    import ballast
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    words, head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
    model = torch.nn.ModuleDict({"words": words, "block": torch.nn.Linear(WIDTH, WIDTH), "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind == OURS:
        optimizer = ballast.wrap(optimizer, model, stage=3)
    seconds, before = [], status("VmRSS")
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        tokens = torch.randint(WORDS, (TOKENS + 1,))
        hidden = torch.tanh(model["block"](words(tokens[:-1])))
        if kind == OURS:
            loss = ballast.chunked_loss(hidden, head, tokens[1:], chunk=CHUNK)
        else:
            loss = torch.nn.functional.cross_entropy(head(hidden), tokens[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return {"seconds": sum(seconds[WARM_UP:]) / STEPS, "peak": status("VmHWM") - before}


def in_own_process(kind: str) -> dict[str, float]:
    ended = subprocess.run([sys.executable, __file__, kind], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout)


def rows_of(ours: list[dict[str, float]], plain: list[dict[str, float]]) -> list[dict]:
    """Return a line for the seconds and one for the memory."""
    rows = []
    for suffix, unit, key, scale in (("", "s", "seconds", 1.0), (", memory", "MiB", "peak", 2.0**-20)):
        samples = ([each[key] for each in kind] for kind in (ours, plain))
        rows.append(suite.versus(NAME + suffix, PLAIN, unit, *samples, value_of=scale.__mul__))
    return rows


def measure(rounds: int) -> list[dict]:
    taken = suite.in_turn((OURS, PLAIN), in_own_process, rounds)
    return rows_of(taken[OURS], taken[PLAIN])


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1])))
