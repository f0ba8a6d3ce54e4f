"""Conditions for training: ranks have the same options and parameters, and begin with the same values, no two parameters share
memory, and a run resumes as it began."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NoReturn

import torch

from ballast._torch_compat import scripted_in, without_torch_function
from ballast.checks import refuse, refuse_order, refuse_unsupported
from ballast.formats import AUTO, Formats, that_need_bf16
from ballast.ranks import Group
from ballast.tiers import fractions_by_tier
from ballast.torch.parameters.managed_parameter import Lifecycle, has_foreign_class, is_on_meta, is_without_values, managed
from ballast.torch.parameters.units import UnitParameter, named_buffers, named_parameters
from ballast.torch.parameters.writes import require_same_values
from ballast.torch.process_groups import broadcast_initial_values
from ballast.wrap_options import WrapOptions

# SyncBatchNorm is none of them.
AVERAGING = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
)

log = logging.getLogger("ballast")


def require_parameters_of(model: torch.nn.Module | None, mine: Collection[torch.Tensor]) -> None:
    """Refuse an optimizer of another model: it would never get a gradient."""
    if model is None:
        return
    known = {id(each) for _, each in named_parameters(model)}
    if not any(id(each) in known for each in mine):
        refuse(
            f"cannot wrap the optimizer: none of its {len(mine)} parameters is in the model",
            needed="an optimizer that was made from model.parameters() of this model",
        )


def require_initialized(model: torch.nn.Module | None, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse parameters and buffers of lazy modules that have not been called yet."""
    model_tensors = [] if model is None else [*named_parameters(model), *named_buffers(model)]
    optimizer_tensors = [
        (f"{each} of param_groups[{number}]", parameter)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for each, parameter in enumerate(group["params"])
    ]
    if lazy := [name for name, each in (*model_tensors, *optimizer_tensors) if torch.nn.parameter.is_lazy(each)]:
        refuse(
            "cannot wrap the optimizer: a lazy module has no values yet",
            where=f"parameter {lazy[0]}",
            needed="parameters with shapes",
            remedy="Call the model once before ballast.wrap(): that initializes its lazy modules.",
        )


def require_no_scripted(model: torch.nn.Module, what: str, needed: str) -> None:
    """Refuse a model with a module that cannot wait for its parameters."""
    if (name := scripted_in(model)) is not None:
        why = "torch.jit has scripted or traced a module, which cannot wait for its parameters"
        refuse(f"cannot {what}: {why}", where=f"module {name}", needed=needed)


def begin_with_same_values(
    group: Group,
    model: torch.nn.Module | None,
    mine: Iterable[torch.Tensor],
    sharing: Callable[[torch.Tensor], Group] | None = None,
) -> None:
    """Copy rank 0's parameters and buffers to all ranks, trained or not, and those of the first rank with a part of a parameter
    to the ranks with the same part, which `sharing` says. All ranks call it together.

    Parameters of another library's class must be the same on all ranks already: scales, which are not in the parameter, may
    belong to its values.
    """
    if group.size == 1:
        return
    model_tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    known = {id(each): each for each in [*mine, *model_tensors]}
    there = [each for each in known.values() if not (is_without_values(each) or is_on_meta(each))]
    names = {} if model is None else {id(each): name for name, each in named_parameters(model)}
    foreign = [UnitParameter(each, names[id(each)], None) for each in there if id(each) in names and has_foreign_class(each)]
    require_same_values(group, foreign, "cannot wrap the optimizer")
    foreign_ids = {id(member.parameter) for member in foreign}
    for each in there:
        if id(each) not in foreign_ids:
            broadcast_initial_values(group if sharing is None else sharing(each), [each])


def tell_of_own_values(rank: int, ranks: int, model: torch.nn.Module | None) -> None:
    """Log which values of the model each rank has of its own, from the beginning or after its calls."""
    if rank != 0 or ranks == 1:
        return
    if model is None:
        log.info(
            "ballast.wrap() has no model: ranks begin with rank 0's values of the optimizer's parameters, and each with its "
            "own frozen parameters and buffers; ballast.wrap(optimizer, model) copies rank 0's"
        )
        return
    normalizing = [each for each in model.modules() if isinstance(each, AVERAGING) and each.running_mean is not None]
    if normalizing:
        counts = Counter(type(each).__name__ for each in normalizing)
        _warn_of_averages(", ".join(f"{count} {name}" for name, count in sorted(counts.items())))


@cache  # a process says it once, and not for each optimizer of a model
def _warn_of_averages(modules: str) -> None:
    log.warning(
        "each rank averages the statistics of its own batches in %s, and ballast.save() keeps rank 0's; "
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm() averages over all ranks, or send rank 0's buffers with "
        "torch.distributed.broadcast() before an evaluation",
        modules,
    )


def require_averaged(unaveraged: Sequence[str], *, in_data_parallel: bool, warns: bool) -> None:
    """Refuse parameters whose gradients nothing averages over ranks any more, although DistributedDataParallel is around their
    model. Without it warn of them: nothing else would average them either."""
    if not unaveraged:
        return
    count, more = len(unaveraged), len(unaveraged) - 3
    names = ", ".join(unaveraged[:3]) + (f" and {more} more" if more > 0 else "")
    if in_data_parallel:
        refuse(
            f"cannot make a step: no wrapped optimizer has {count} of the model's parameters, and DistributedDataParallel does "
            "not average their gradients while Ballast averages the others",
            where=f"parameter {names}",
            needed="all optimizers of the model in ballast.wrap(), such as ballast.wrap([one, other], model)",
            remedy="If no optimizer trains them, call requires_grad_(False) of each.",
        )
    if warns:
        log.warning(
            "no wrapped optimizer has %d of the model's parameters, so nothing averages their gradients over ranks: %s. If an "
            "optimizer trains them, wrap it too: ballast.wrap([one, other], model). If none does, call requires_grad_(False) "
            "of each.",
            count,
            names,
        )


def warn_of_layout(rank: int, members: Iterable[UnitParameter]) -> None:
    """Warn of parameters that lose their memory format when they are partitioned."""
    with without_torch_function():  # some may be without values, which have no format
        found = [each.name for each in members if _is_channels_last(each.parameter)]
    if found and rank == 0:
        log.warning(
            "Ballast keeps parameters contiguous, so parameter %s%s loses torch.channels_last, and results may differ by "
            "rounding. To compute in that format, convert the model's inputs: inputs.to(memory_format=torch.channels_last)",
            found[0],
            f" (and {len(found) - 1} more)" if len(found) > 1 else "",
        )


def warn_of_formats(rank: int, formats: Formats, members: Iterable[UnitParameter]) -> None:
    """Warn of formats that no parameter has: they are those of bfloat16 parameters."""
    unused = that_need_bf16(formats)
    if rank == 0 and unused and not any(each.dtype == torch.bfloat16 for each in members):
        log.warning(
            "%s has no effect: no trained parameter is in bfloat16, and others keep state and gradients in fp32. Autocast "
            "leaves parameters in fp32: for parameters in bfloat16 call model.bfloat16() before ballast.wrap()",
            " and ".join(f'{name}="{value}"' for name, value in unused.items()),
        )


def warn_of_frozen(rank: int, offload: str, members: Iterable[UnitParameter]) -> None:
    """Warn of frozen parameters that stay on the device though they are most of the model: a tier alone moves the state."""
    sizes: Counter[bool] = Counter()  # bytes, by whether they are frozen
    for each in members:
        sizes[each.group is None] += each.elements * each.dtype.itemsize
    if rank == 0 and sizes[True] > sizes[False]:
        log.warning(
            'offload="%s" moves the optimizer\'s state. Most of the model are frozen parameters, which stay on the device. To '
            'move them too, name the kinds: offload={"parameters": "%s", "state": "%s"}',
            *(offload, offload, offload),
        )


def _is_channels_last(parameter: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if parameter.dim() not in formats or parameter.is_contiguous():
        return False
    return bool(parameter.is_contiguous(memory_format=formats[parameter.dim()]))


def require_on_device(lifecycle: Lifecycle) -> None:
    if lifecycle is Lifecycle.OFFLOADED:
        refuse_order("cannot use the training: it is off its device", needed="optimizer.reload(), on all ranks")


def refuse_other_parameters(options: WrapOptions) -> None:
    """Refuse other parameters than those with which a run, whose files hold them, or an outer optimizer, which has a copy of
    them, began."""
    needed, remedy = "the same ones, frozen and thawed as they were", "Call ballast.save() before they change; wrap()"
    if name := options.run.name:
        what = f'cannot train other parameters in the run "{name}": it began with others'
        refuse_order(what, needed=needed, remedy=f"{remedy} with another run= or none; and load_checkpoint().")
    if options.outer is not None:
        what = "cannot train other parameters: the outer optimizer began with others"
        refuse_order(what, needed=needed, remedy=f"{remedy} a new optimizer; and load_checkpoint().")


Named = tuple[str, torch.Tensor]


def require_own_memory(members: Iterable[UnitParameter], model: torch.nn.Module | None) -> None:
    """Refuse a member that has elements of another parameter, of the model or among the members. Parameters may be parts of
    one tensor, as cuDNN's are."""
    mine = {id(member.parameter): (member.name, member.parameter) for member in members}
    others = () if model is None else ((name, each) for name, each in named_parameters(model) if id(each) not in mine)
    known = [(name, each) for name, each in chain(mine.values(), others) if _has_memory(each)]
    for group in _that_overlap(known):
        pair = _with_a_common_element(group)
        if pair is not None and any(id(each) in mine for _, each in pair):
            names = " and ".join(name for name, _ in pair)
            refuse_unsupported(
                "cannot partition parameters that share memory: each gets memory of its own, so they would come apart",
                where=f"parameters {names}",
                needed="one Parameter in both places: module.weight = other.weight, without .data",
                remedy="To begin with the same values only, copy them: module.weight.data = other.weight.data.clone().",
            )


def _has_memory(parameter: torch.Tensor) -> bool:
    """Return whether torch has the values in memory that a parameter of torch describes."""
    if managed(parameter) is not None or is_on_meta(parameter) or has_foreign_class(parameter):
        return False
    return bool(parameter.layout == torch.strided and parameter.numel() > 0)


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return int((last + 1) * tensor.element_size())


def _that_overlap(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    """Yield the tensors between whose first and last elements are elements of others, in groups."""
    ordered = sorted(((str(each.device), each.data_ptr(), name, each) for name, each in tensors), key=lambda item: item[:2])
    group: list[Named] = []
    device, end = "", 0
    for where, begin, name, each in ordered:
        if where != device or begin >= end:
            if len(group) > 1:
                yield group
            group, device, end = [], where, 0
        group.append((name, each))
        end = max(end, begin + _extent(each))
    if len(group) > 1:
        yield group


def _with_a_common_element(group: list[Named]) -> list[Named] | None:
    """Return two of these tensors that share a byte, if there are two. They are ordered by address."""
    for before, after in zip(group, group[1:]):
        if before[1].is_contiguous() and after[1].data_ptr() < before[1].data_ptr() + before[1].nbytes:
            return [before, after]  # the first element of this one
    begin = group[0][1].data_ptr()
    end = max(each.data_ptr() + _extent(each) for _, each in group)
    owners = torch.full((end - begin,), -1, dtype=torch.int32, device="cpu")
    for number, (name, each) in enumerate(group):
        width = each.element_size()
        strides = [stride * width for stride in each.stride()]
        bytes_of_it = owners.as_strided((*each.shape, width), (*strides, 1), each.data_ptr() - begin)
        if (owner := int(bytes_of_it.max())) >= 0:
            return [group[owner], (name, each)]
        bytes_of_it.fill_(number)
    return None


def describe(
    parameters: Iterable[tuple[int, torch.Tensor]], names: Mapping[int, str], model: torch.nn.Module | None = None
) -> Iterator[str]:
    """Describe parameters of an optimizer, each after the number of its group, and the parameters and buffers of a model."""
    for number, each in parameters:
        yield f"{names[id(each)]}, {_kind_of(each)}, in parameter group {number}"
    for name, each in () if model is None else (*named_parameters(model), *named_buffers(model)):
        yield f"{name}, {_kind_of(each)}"


def _kind_of(tensor: torch.Tensor) -> str:
    values = ", without values" if is_on_meta(tensor) or is_without_values(tensor) else ""
    return f"{tensor.dtype} of shape {list(tensor.shape)}{values}"


def refuse_other_end(are_discarded: Sequence[int]) -> NoReturn:
    """Refuse to make a step on some ranks with gradients that others discard. `are_discarded` has 0 or 1 of each rank."""
    refuse(
        f"cannot make a step: rank {are_discarded.index(1)} discarded its gradients",
        where=f"rank {are_discarded.index(0)} did not",
        needed="zero_grad() and step() on all ranks together, and the same found_inf of gradient scalers",
    )


def described(optimizer: torch.optim.Optimizer, options: WrapOptions) -> dict[str, str]:
    """Return everything that has to be the same on all ranks, by name.

    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    >>> options = WrapOptions(stage=2, offload="host")
    >>> found = described(optimizer, options)
    >>> found["optimizer"], found["stage"], found["offload"], found["lr of parameter group 0"]
    ('SGD', '2', "{'gradients': {'host': 1.0}, 'state': {'host': 1.0}}", '0.5')
    """
    found = {"optimizer": type(optimizer).__name__, "number of parameter groups": str(len(optimizer.param_groups))}
    found |= {name: str(value) for name, value in options.shared().items()}
    by_kind = sorted(options.tiers.items())
    tiers = {kind: fractions_by_tier(of) for kind, of in by_kind}
    found["offload"] = AUTO if options.chooses_tiers else str(tiers)
    return found | described_groups(optimizer)


def described_groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the options of the parameter groups, which may change from step to step, by name."""
    return {
        f"{name} of parameter group {number}": str(plain)
        for number, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if is_plain(plain := value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
    }


def is_plain(value: Any) -> bool:
    """Return whether the text of a value is the same on all ranks.

    >>> is_plain((0.9, 0.999)), is_plain(None), is_plain(print)
    (True, True, False)
    """
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (int, float, str))
