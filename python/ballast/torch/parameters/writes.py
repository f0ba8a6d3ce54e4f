"""Find a user's writes to parameters, however they are made, and require that all ranks write the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NoReturn

import torch

from ballast import _core
from ballast._torch_compat import storage_address, users_of_storage
from ballast.checks import refuse, refuse_order, refuse_unsupported
from ballast.ranks import Agreement, Group, from_all_ranks
from ballast.torch.memory import bytes_at
from ballast.torch.parameters.managed_parameter import require_same_kind
from ballast.torch.parameters.units import UnitParameter, places_in

_CHUNK = 4 << 20  # bytes of a GPU's memory that are summed together; as int64 they take eight times as many
REFUSED = "cannot keep a write to a parameter"
LOST_WRITE = f"{REFUSED} outside of ballast.gather(): each rank keeps a shard of it"
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd and without a pattern: 2^64 divided by the golden ratio


class Snapshot:
    """The values of a parameter at one moment. Torch counts most writes; those through `.data`, NumPy or DLPack are
    found by a checksum."""

    def __init__(self, parameter: torch.nn.Parameter):
        self.values = parameter.data  # keeps the memory, so that no other tensor gets its address
        self._version = parameter._version
        self._fingerprint = fingerprint(parameter)

    def differs(self, parameter: torch.nn.Parameter) -> bool:
        return (
            parameter._version != self._version
            or is_elsewhere(parameter, self.values)
            or fingerprint(parameter) != self._fingerprint
        )


def is_elsewhere(parameter: torch.nn.Parameter, values: torch.Tensor) -> bool:
    """Return whether another tensor than `values` was assigned to `parameter.data`."""
    return bool(parameter.data_ptr() != values.data_ptr() or parameter.stride() != values.stride())


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a checksum of the elements in row-major order."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.device.type != "cpu":
        return checksum_on_device(flat)
    return _core.checksum(bytes_at(flat.data_ptr(), flat.numel()) if flat.numel() > 0 else b"")


def checksum_on_device(flat: torch.Tensor) -> int:
    """Return a checksum of bytes without copying them to the host: each byte has a weight of its own, modulo
    2^64."""
    place = torch.arange(1, min(_CHUNK, flat.numel()) + 1, device=flat.device)
    weights = (place * _MIX) ^ ((place * _MIX) >> 29)
    weights = (weights * _MIX) ^ (weights >> 32)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in flat.split(_CHUNK):
        total = total * _MIX + (chunk.long() * weights[: chunk.numel()]).sum()
    return int(total)


def users_of(tensor: torch.Tensor) -> int:
    """Return how many tensors have this one's memory."""
    return users_of_storage(storage_address(tensor.untyped_storage()))


def agree_on_writes(
    group: Group, before: Mapping[UnitParameter, torch.Tensor], written: Collection[UnitParameter], check: Callable[[], None]
) -> list[UnitParameter]:
    """Return the members that were written to on any rank. `before` has each member with its values before the writes.
    All ranks call it together.

    It refuses, on all ranks, writes that cannot be kept: those that `check` refuses on one rank, those that change a
    shape, format or device, and those that differ between ranks.
    """
    agreement = Agreement(group, "keeping what was written to parameters")
    with agreement.attempt():
        check()
    for member in written:
        with agreement.attempt():
            require_same_kind(member.name, kept=before[member], found=member.parameter)
    agreement.settle()
    counts = group.all_reduce([int(member in written) for member in before])
    anywhere = [member for member, count in zip(before, counts) if count > 0]
    require_same_values(group, anywhere, REFUSED)
    return anywhere


def refuse_lost_writes(names: Sequence[str]) -> NoReturn:
    """Refuse writes to parameters that modules gather, after the parameters have their values from before again."""
    refuse_order(
        LOST_WRITE,
        where=f"parameter {', '.join(names)}",
        needed="the write inside of `with ballast.gather(parameter): ...`, on all ranks and with the same values",
        remedy="A write in a forward pass, such as that of nn.Embedding(max_norm=...), belongs before or after it. A tensor "
        "that is not trained can be a buffer, which is not partitioned.",
    )


def require_same_values(group: Group, members: Collection[UnitParameter], what: str) -> None:
    """Refuse parameters that are not the same on all ranks that have the same part of them. All ranks call this together."""
    if group.size == 1 or not members:
        return
    by_rank = from_all_ranks(group, [fingerprint(member.parameter) for member in members])
    for member, found in zip(members, zip(*by_rank)):
        differ = [rank for rank, each in enumerate(found) if each != found[rank % member.parts]]
        if differ:
            ranks, first = ", ".join(map(str, differ)), differ[0] % member.parts
            refuse(
                f"{what}: ranks hold different values",
                where=f"parameter {member.name}; rank {ranks} differs from rank {first}",
                needed="the same values, written on all ranks",
                remedy="Write them on every rank, or send one rank's to the others: torch.distributed.broadcast().",
            )


def is_same_kind(parameter: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether the parameter can be copied back."""
    return (parameter.dtype, parameter.device, parameter.shape) == (before.dtype, before.device, before.shape)


class Slots:
    """The slots of parameters in a model's modules. No other parameter may be assigned to one."""

    def __init__(self, model: torch.nn.Module | None, parameters: Iterable[torch.nn.Parameter]):
        wanted = {id(parameter) for parameter in parameters}
        self._slots = [slot for slot in places_in(model) if id(slot[3]) in wanted]

    def require_unchanged(self) -> None:
        """Refuse a parameter that was assigned to a slot, and put the original back."""
        assigned = []
        for module, name, path, parameter in self._slots:
            now = module._parameters.get(name)
            if now is not None and now is not parameter:
                module._parameters[name] = parameter
                assigned.append(path)
        if assigned:
            refuse_unsupported(
                "cannot keep a new Parameter that was assigned inside ballast.gather()",
                where=f"parameter {', '.join(assigned)}",
                needed="new values in the parameter that is there, which the optimizer trains",
                remedy="Write with torch.no_grad(): parameter.copy_(values); or load_state_dict() without assign=True.",
            )
