"""The memory and the bandwidths that each rank may use. All ranks use the smallest of their figures."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from ballast import _core
from ballast.connecting import Group
from ballast.hardware import (
    RATES,
    Budget,
    Rates,
    available_memory,
    gpu_like,
    machine,
    products_of,
    products_of_cpus,
    rates_of,
    rates_of_cpus,
    this_machine,
)
from ballast.torch.collectives import from_all_ranks
from ballast.torch.gpu import free_bytes, name_and_bytes, return_cached_memory
from ballast.torch.parameters.managed_parameter import is_without_values
from ballast.torch.parameters.units import UnitParameter, gpu_of
from ballast.wrap_options import WrapOptions

# The part of free memory to use. The rest is for activations, CUDA and other uses, whose sizes are not known yet.
USED_FRACTION = 0.75
BYTES = ("device_bytes", "host_bytes", "nvme_bytes")


@dataclass(frozen=True)
class AvailableMachine:
    """The machine that a rank is on. Sizes are in bytes."""

    name: str
    ranks: int  # that share the machine, according to the launcher
    device: int | None  # for this rank alone; None: its part of the host
    parameter_bytes: int  # on the host by torch, for the parameters that are about to be partitioned
    free: int  # of the host
    drives: int
    rates: Rates
    products: float  # operations a second: of the GPU, or of all cores
    on_gpu: bool


def budget_of_all_ranks(group: Group, options: WrapOptions, members: Sequence[UnitParameter]) -> _core.Machine:
    """Return the machine that each rank plans for. All ranks call it together."""
    machines = from_all_ranks(group, _available_machine(options, members))
    budgets = [_machine(each, machines) for each in machines]
    least = budgets[group.rank]
    for name in (*BYTES, *RATES, "products"):
        setattr(least, name, min(getattr(each, name) for each in budgets))
    return least


def _available_machine(options: WrapOptions, members: Sequence[UnitParameter]) -> AvailableMachine:
    found, gpu = this_machine(), gpu_of(members)
    known = None if gpu is None else gpu_like(*name_and_bytes(gpu))
    device = None if options.memory is None else int(options.memory)
    if device is None and gpu is not None:  # torch holds parameters there until all is reserved: they are not free
        return_cached_memory(gpu)
        device = int(USED_FRACTION * free_bytes(gpu))
    on_host = [each.parameter for each in members if gpu is None and not is_without_values(each.parameter)]
    by_drive = {os.stat(path).st_dev: shutil.disk_usage(path).free for path in options.directories}
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return AvailableMachine(
        name=socket.gethostname(),
        ranks=int(local) if local.isdigit() else 1,
        device=device,
        parameter_bytes=sum(parameter.nbytes for parameter in on_host),
        free=available_memory(found),
        drives=sum(by_drive.values()),
        rates=rates_of_cpus(found["cores"]) if known is None else rates_of(known, {}),
        products=products_of_cpus(found["cores"]) if known is None else products_of(known),
        on_gpu=gpu is not None,
    )


def _machine(of: AvailableMachine, machines: Sequence[AvailableMachine]) -> _core.Machine:
    sharing = max(of.ranks, sum(each.name == of.name for each in machines))
    host = int(USED_FRACTION * of.free) // sharing
    # Torch's memory is freed piece by piece.
    device = min(host + of.parameter_bytes, of.free) if of.device is None else of.device
    budget = Budget(device, host, of.drives // sharing)
    made = machine(budget, of.rates, ranks=len(machines), ranks_of_machine=sharing)
    made.products = of.products if of.on_gpu else of.products / sharing
    if not of.on_gpu:
        made.device_memory = made.host_memory
        made.shares_cores = made.host_is_device = True
    return made
