"""What all integrations share: import the framework, read the options of `ballast.wrap()`, and prepare a model for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ballast.api import ELSEWHERE, wrap
from ballast.checks import refuse
from ballast.schema import options_of, require_known
from ballast.torch.calls.hooks import receiver_of
from ballast.torch.optimizer import WrappedOptimizer
from ballast.torch.parameters.deferred_parameters import device_of
from ballast.torch.parameters.managed_parameter import is_on_meta, owner_of
from ballast.wrap_options import Tuning, WrapOptions

FOLDER = "ballast"  # has Ballast's checkpoint, inside of the folder of the framework's


def require_framework(name: str) -> None:
    """Raise ImportError with the remedy if the framework is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        message = f"cannot import ballast.integrations.{name}: {name} is not installed. Install it: pip install {name}"
        raise ImportError(message, name=name) from None


def read_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the keywords for `ballast.wrap()`, after a check that it has them."""
    if options is not None and not isinstance(options, Mapping):
        refuse(f"cannot read ballast={options!r}", needed="keywords of ballast.wrap(), such as ballast=dict(stage=3)")
    require_known(options or {}, options_of(WrapOptions), ELSEWHERE)
    return dict(options or {})


def is_deferred(model: torch.nn.Module) -> bool:
    """Return whether a model has no values yet, and is not wrapped."""
    return any(is_on_meta(parameter) for parameter in model.parameters())


def place(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model to a device. A deferred model has no values to move: they will be made there."""
    if not is_deferred(model):
        model.to(device)
        return
    devices = {device_of(each) if is_on_meta(each) else each.device for each in (*model.parameters(), *model.buffers())}
    if devices != {device}:
        model.to(device)


def is_wrapped(model: torch.nn.Module) -> bool:
    return any(owner_of(parameter) is not None or receiver_of(parameter) is not None for parameter in model.parameters())


def let_place(model: torch.nn.Module, device: torch.device, requested: bool | None) -> bool | None:
    """Place a deferred model, and return whether Accelerate may place a model. A wrapped one is on its device, and may have no
    values that could be moved."""
    if is_deferred(model) and requested is not False:
        place(model, device)
        return False
    return False if is_wrapped(model) else requested


def require_unprepared(model: torch.nn.Module) -> None:
    """Refuse a model that is prepared for another way to train on several devices."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        refuse(
            f"cannot train the model with Ballast: it is in {type(model).__name__}, which would reduce gradients a second time",
            needed="the plain model",
        )


def shard_frozen(model: torch.nn.Module, options: Mapping[str, Any]) -> WrappedOptimizer:
    """Freeze a model, and partition it as `ballast.wrap()` partitions the trained one with these options. The result owns the
    values: the model can be called as long as it is there. All ranks call this together."""
    model.requires_grad_(False)
    kept = {name: options[name] for name in ("mesh", "tuning") if name in options}
    if (tuning := kept.get("tuning")) is not None:  # nothing is trained
        kept["tuning"] = Tuning(units=tuning.units, threads=tuning.threads, timeout=tuning.timeout)
    if isinstance(offload := options.get("offload"), Mapping):  # else it is that of the state, of which there is none
        kept["offload"] = {kind: tier for kind, tier in offload.items() if kind in ("parameters", "state")}
    owner: WrappedOptimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, stage=3, **kept)
    owner._ballast.partition_now()
    return owner


def refuse_other_backend(name: str, remedy: str) -> NoReturn:
    refuse(f"cannot train with Ballast and {name}: both shard the model", needed="one of them", remedy=remedy)


def refuse_options_of_wrapped() -> NoReturn:
    refuse(
        "cannot use ballast=: the optimizer is wrapped already",
        needed="options in ballast.wrap(), or in ballast=",
    )
