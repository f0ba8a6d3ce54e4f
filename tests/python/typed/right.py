"""Uses of a wrapped optimizer that type checkers accept."""

import ballast
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
optimizer = ballast.wrap(optimizer, model, stage=3, offload="host", max_grad_norm=1.0)
values: dict[str, float] = optimizer.metrics()
optimizer.set_tokens_per_step(128, peak_flops=1e15)
with optimizer.no_sync():
    optimizer.zero_grad()
norm: torch.Tensor = optimizer.clip_grad_norm_(1.0)
print(optimizer.memory().splitlines(), optimizer.param_groups[0]["lr"], optimizer.steps)
same: torch.optim.AdamW = optimizer
line = ballast.StepLine(optimizer, every=10)
line(norm)
shown: dict[str, str] = line.postfix(2.5)
ballast.StepLog("runs", optimizer)(norm)


class Mine(torch.optim.Optimizer):
    """A class that Ballast does not know."""


def train(given: torch.optim.Optimizer) -> ballast.WrappedOptimizer:
    wrapped = ballast.wrap(given, model, tuning=ballast.Tuning(elementwise=True))
    wrapped.step(lambda: 1.0)
    return wrapped


mine: torch.optim.Optimizer = Mine(model.parameters(), {})
mine = ballast.wrap(mine)
mine.offload(parameters=False)
train(mine).close()

one, other = ballast.wrap([torch.optim.SGD(model.parameters(), lr=0.1), mine], model, stage=3)
one.step()
ballast.save("checkpoints", model, [one, other])
pending: ballast.PendingSave = ballast.save("checkpoints", model, [one, other], wait=False)
pending.wait()
