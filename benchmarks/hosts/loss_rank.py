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
from contest import TRAINING
from loss_training import Plan, Training
from losses import CASES, CONTEXT, LossCase

POINTS = 10  # points of a curve, after the beginning

Point = tuple[int, float, float, int]  # step, loss, seconds and sent bytes until then


class HostTraining(Training):
    """A training whose hosts begin with the same parameters, and share the sequences of each step."""

    def __init__(self, case: LossCase, steps: int):
        torch.manual_seed(case.seed)
        self.size = size = case.size
        model = gpt.GPT(size.layers, size.width, size.width // 64, CONTEXT)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=size.learning_rate)
        self.trained: torch.nn.Module = model
        if case.scheme.every is None:
            self.trained = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            outer = ballast.DiLoCo(every=case.scheme.every, wire=case.scheme.wire)
            optimizer = ballast.wrap(optimizer, model, stage=2, outer=outer, tuning=ballast.Tuning(threads=1))
        super().__init__(Plan(TRAINING, case.seed, steps), model, [optimizer])

    def curve(self) -> list[Point]:
        """Train to the end. Points have the loss of this host's parameters, which between two exchanges are not those of the
        other host."""
        before, taken, steps = network.sent_bytes(), 0.0, self.plan.steps
        points = [(0, self.validate(self.size.held_out), 0.0, 0)]
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            self.step(step)
            taken += time.perf_counter() - begin
            if step * POINTS // steps > (step - 1) * POINTS // steps:
                points.append((step, self.validate(self.size.held_out), round(taken, 3), network.sent_bytes() - before))
        return points

    def batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [gpt.batch(self.text.trained, 1_000_000 * self.plan.seed + step, self.size.sequences, CONTEXT)]

    def loss(self, inputs: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return (self.trained if torch.is_grad_enabled() else self.model)(inputs, following)


def main() -> None:
    name, steps = sys.argv[1:]
    case = next(each for each in CASES if each.name == name)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = HostTraining(case, int(steps))
    curve = training.curve()
    metrics = training.optimizers[0].metrics() if case.scheme.every else {}
    figures = {name: value for name, value in metrics.items() if name.startswith("outer/")}
    print(json.dumps({"curve": curve, "text": training.text.digest, "figures": figures}), flush=True)
    dist.barrier()  # no rank leaves while another one works
    os._exit(0)  # torch's groups sometimes fail at exit, or hang


if __name__ == "__main__":
    main()
