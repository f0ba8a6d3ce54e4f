"""Mistakes that type checkers find: one in each marked line."""

import ballast
import torch

model = torch.nn.Linear(4, 1)
optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
optimizer.metric()  # error
optimizer.set_tokens_per_step("many")  # error
optimizer.metrics()["step"].append(1)  # error
number: int = optimizer.memory()  # error
ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stag=3)  # error
ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, tuning=ballast.Tuning(verify="always"))  # error
ballast.wrap(model)  # error
adam: torch.optim.Adam = optimizer  # error
ballast.save("checkpoints", model, optimizer).wait()  # error
