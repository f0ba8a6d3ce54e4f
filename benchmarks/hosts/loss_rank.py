"""Train one host's rank with one scheme, and print its curve: loss_rank.py CASE STEPS. Validation takes no time of the
training, and sends nothing."""

import json
import os
import sys
import time
from typing import Any

import ballast
import gpt
import network
import torch
import torch.distributed as dist
from loss_training import python_sources, rate, spread_over
from losses import CASES, CONTEXT, LossCase

POINTS = 10  # points of a curve, after the beginning
WARM_UP = 0.05  # the part of the steps in which the learning rate rises

Point = tuple[int, float, float, int]  # step, loss, seconds and sent bytes until then


class Training:
    """A model with its optimizer. The hosts begin with the same parameters, and share the sequences of each step."""

    def __init__(self, case: LossCase, steps: int):
        torch.manual_seed(case.seed)
        size = case.size
        self.size, self.steps, self.first_batch = size, steps, 1_000_000 * case.seed
        self.model: torch.nn.Module = gpt.GPT(size.layers, size.width, size.width // 64, CONTEXT)
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=size.learning_rate)
        self.trained = self.model
        if case.scheme.every is None:
            self.trained = torch.nn.parallel.DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        else:
            outer = ballast.DiLoCo(every=case.scheme.every, wire=case.scheme.wire)
            self.optimizer = ballast.wrap(self.optimizer, self.model, stage=2, outer=outer, tuning=ballast.Tuning(threads=1))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate(step, steps, WARM_UP))
        self.text = python_sources()
        self.seconds = 0.0

    def train(self) -> list[Point]:
        before = network.sent_bytes()
        curve = [(0, self.validate(), 0.0, 0)]
        for step in range(1, self.steps + 1):
            begin = time.perf_counter()
            self.step(step)
            self.seconds += time.perf_counter() - begin
            if step * POINTS // self.steps > (step - 1) * POINTS // self.steps:
                curve.append((step, self.validate(), round(self.seconds, 3), network.sent_bytes() - before))
        return curve

    def step(self, step: int) -> None:
        self.trained(*gpt.batch(self.text.trained, self.first_batch + step, self.size.sequences, CONTEXT)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()

    def validate(self) -> float:
        """Return the loss of this host's parameters, which between two exchanges are not those of the other host."""
        with torch.no_grad():
            losses = [self.model(*part).item() for part in spread_over(self.text.held_out, self.size.held_out)]
        return sum(losses) / len(losses)


def main() -> None:
    name, steps = sys.argv[1:]
    case = next(each for each in CASES if each.name == name)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(case, int(steps))
    curve = training.train()
    metrics = training.optimizer.metrics() if case.scheme.every else {}
    figures = {name: value for name, value in metrics.items() if name.startswith("outer/")}
    print(json.dumps({"curve": curve, "text": training.text.digest, "figures": figures}), flush=True)
    dist.barrier()  # no rank leaves while another one works
    os._exit(0)  # torch's groups sometimes fail at exit, or hang


if __name__ == "__main__":
    main()
