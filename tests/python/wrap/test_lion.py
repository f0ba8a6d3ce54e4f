"""Tests of optimizers whose class is named Lion: the library's rule serves those that make its steps."""

from __future__ import annotations

from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.loops import Loop, check_close


class Plain(torch.optim.Optimizer):
    """Lion as its paper describes it. Variants differ in the three methods."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), weight_decay: float = 0.1, **options: Any):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **options})
        self.first_lr = lr

    def decay(self, group: dict[str, Any]) -> float:
        return float(group["lr"] * group["weight_decay"])

    def direction(self, mixed: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return mixed.sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - self.decay(group))
                mixed = mean.lerp(parameter.grad, 1 - group["betas"][0])
                parameter.sub_(self.direction(mixed, parameter.grad), alpha=group["lr"])
                mean.lerp_(parameter.grad, 1 - group["betas"][1])


class DecaysByFirstRate(Plain):
    """The decay does not fall with the learning rate."""

    def decay(self, group: dict[str, Any]) -> float:
        return float(group["lr"] * group["weight_decay"] / self.first_lr)


class Cautious(Plain):
    """Elements whose update points against their gradient stay."""

    def direction(self, mixed: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return mixed.sign() * (mixed * gradient > 0)


def named_lion(kind: type[Plain]) -> type[Plain]:
    return type("Lion", (kind,), {})


def loop_of(kind: type[Plain], **options: Any) -> Loop:
    return Loop(make_optimizer=named_lion(kind), optimizer_options={"lr": 1e-2, "weight_decay": 0.01, **options}, steps=8)


@pytest.mark.parametrize("lr", [1e-2, 0.0])
def test_plain_lion_is_updated_by_the_librarys_rule(lr):
    loop = loop_of(Plain, lr=lr, caution=False)  # timm's has an option that makes it another one
    ours = loop.run(stage=0)
    check_close(ours, loop.run())
    assert ours.optimizer.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("kind", [DecaysByFirstRate, Cautious])
def test_a_variant_of_lion_makes_its_own_steps_or_is_refused(kind):
    loop = loop_of(kind)
    with pytest.raises(ballast.Error, match=r"Lion: its step may need full parameters(.|\n)*elementwise=True"):
        loop.run(stage=0)
    check_close(loop.run(stage=0, elementwise=True), loop.run())
