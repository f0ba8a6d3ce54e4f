"""The types that type checkers give to wrapped optimizers. At run time, `class_for()` makes each class when it is needed.

Python's types have no intersections. So each class of torch that wrap() trains has a type here, a subclass of it and of
WrappedOptimizer: `optimizer = ballast.wrap(optimizer, model)` keeps the type of the variable, and has the methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ParamSpec, Protocol, overload

import torch

from ballast.torch.optimizer import WrappedOptimizer

Options = ParamSpec("Options")


class WrappedAdamW(WrappedOptimizer, torch.optim.AdamW): ...


class WrappedAdam(WrappedOptimizer, torch.optim.Adam): ...


class WrappedSGD(WrappedOptimizer, torch.optim.SGD): ...


class WrappedAdagrad(WrappedOptimizer, torch.optim.Adagrad): ...


class WrappedRMSprop(WrappedOptimizer, torch.optim.RMSprop): ...


class WrappedNAdam(WrappedOptimizer, torch.optim.NAdam): ...


class WrappedRAdam(WrappedOptimizer, torch.optim.RAdam): ...


class WrappedAdamax(WrappedOptimizer, torch.optim.Adamax): ...


class WrappedAdadelta(WrappedOptimizer, torch.optim.Adadelta): ...


class WrappedASGD(WrappedOptimizer, torch.optim.ASGD): ...


class WrappedRprop(WrappedOptimizer, torch.optim.Rprop): ...


class WrappedAdafactor(WrappedOptimizer, torch.optim.Adafactor): ...


class WrappedMuon(WrappedOptimizer, torch.optim.Muon): ...


class Wrap(Protocol[Options]):
    """`ballast.wrap()`. `Options` are its parameters after the optimizer."""

    @overload
    def __call__(
        self, optimizers: Sequence[torch.optim.Optimizer], /, *_: Options.args, **__: Options.kwargs
    ) -> list[WrappedOptimizer]: ...

    @overload
    def __call__(self, optimizer: torch.optim.AdamW, /, *_: Options.args, **__: Options.kwargs) -> WrappedAdamW: ...

    @overload
    def __call__(self, optimizer: torch.optim.Adam, /, *_: Options.args, **__: Options.kwargs) -> WrappedAdam: ...

    @overload
    def __call__(self, optimizer: torch.optim.SGD, /, *_: Options.args, **__: Options.kwargs) -> WrappedSGD: ...

    @overload
    def __call__(self, optimizer: torch.optim.Adagrad, /, *_: Options.args, **__: Options.kwargs) -> WrappedAdagrad: ...

    @overload
    def __call__(self, optimizer: torch.optim.RMSprop, /, *_: Options.args, **__: Options.kwargs) -> WrappedRMSprop: ...

    @overload
    def __call__(self, optimizer: torch.optim.NAdam, /, *_: Options.args, **__: Options.kwargs) -> WrappedNAdam: ...

    @overload
    def __call__(self, optimizer: torch.optim.RAdam, /, *_: Options.args, **__: Options.kwargs) -> WrappedRAdam: ...

    @overload
    def __call__(self, optimizer: torch.optim.Muon, /, *_: Options.args, **__: Options.kwargs) -> WrappedMuon: ...

    @overload
    def __call__(self, optimizer: torch.optim.Adafactor, /, *_: Options.args, **__: Options.kwargs) -> WrappedAdafactor: ...

    @overload
    def __call__(self, optimizer: torch.optim.Adamax, /, *_: Options.args, **__: Options.kwargs) -> WrappedAdamax: ...

    @overload
    def __call__(self, optimizer: torch.optim.Adadelta, /, *_: Options.args, **__: Options.kwargs) -> WrappedAdadelta: ...

    @overload
    def __call__(self, optimizer: torch.optim.ASGD, /, *_: Options.args, **__: Options.kwargs) -> WrappedASGD: ...

    @overload
    def __call__(self, optimizer: torch.optim.Rprop, /, *_: Options.args, **__: Options.kwargs) -> WrappedRprop: ...

    @overload
    def __call__(self, optimizer: torch.optim.Optimizer, /, *_: Options.args, **__: Options.kwargs) -> WrappedOptimizer: ...
