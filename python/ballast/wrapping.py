"""Wrap an optimizer: the one line that shards a training over ranks and memory tiers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

from ballast.checks import refuse
from ballast.formats import GradientFormats, StateFormats, read_gradient_formats, read_state_formats
from ballast.keep_gathered import KeepGathered, read_keep_gathered, read_prefetch
from ballast.keywords import with_nearest_names
from ballast.options import Stage, read_stage
from ballast.outer.options import DiLoCo, read_outer
from ballast.replicas import Replicas, read_replicas
from ballast.sizes import Size
from ballast.tiers import Offload
from ballast.wire import WireFormats, read_wire
from ballast.wrapper.activation_options import read_activation_options
from ballast.wrapper.options import (
    WrapOptions,
    checked,
    for_custom_step,
    for_stored_step,
    read_calls_differ,
    read_memory,
    read_units,
)
from ballast.wrapper.several import for_several

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ballast.outer.optimizer import OuterOptimizer
    from ballast.torch.optimizer import WrappedOptimizer
    from ballast.torch.process_groups import ProcessGroups
    from ballast.torch.training.session import Session
    from ballast.torch.typing import Wrap

Parameters = ParamSpec("Parameters")


def _keeping_class(function: Callable[Concatenate[Any, Parameters], object]) -> Wrap[Parameters]:
    """Let type checkers see the optimizer's own class in the result."""
    return cast("Wrap[Parameters]", function)


@_keeping_class
@with_nearest_names
def wrap(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None = None,
    *,
    stage: Stage = 2,
    offload: Offload | None = None,
    memory: Size | None = None,
    activations: str | None = None,
    max_grad_norm: float | None = None,
    state_format: StateFormats | None = None,
    gradient_format: GradientFormats = "fp32",
    update_in_backward: bool = False,
    overlap_gathers: bool = False,
    prefetch: int = 1,
    keep_gathered: KeepGathered = False,
    elementwise: bool = False,
    units: str | Iterable[str] = (),
    run: str = "",
    mirror: bool = False,
    checkpoint: str | os.PathLike[str] = "",
    outer: DiLoCo | None = None,
    process_group: ProcessGroup | None = None,
    norm_group: ProcessGroup | None = None,
    replicated: Iterable[torch.Tensor] = (),
    timeline: bool = False,
    verify: int = 0,
    tile: Size = 0,
    wire: WireFormats = "exact",
    replicas: Replicas | None = None,
    calls_differ: bool = False,
    threads: int = 0,
    timeout: float | None = None,
) -> WrappedOptimizer | list[WrappedOptimizer]:
    """Shard the optimizer's state and gradients over the ranks, and return the same optimizer.

    >>> import torch, ballast
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    >>> model(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.metrics()["step"]
    1.0

    All ranks call this together: those of torch.distributed, or else those that a launcher has started. Gradients are averaged
    over the ranks, so the model needs no DistributedDataParallel. Ranks begin with rank 0's values of the optimizer's
    parameters and of the frozen parameters and buffers of `model`, if that is given. It may be `ballast.deferred()`. Rank 0
    logs what "auto" chooses. Several optimizers of a model are wrapped as a list, or, with different options, one by one.

    stage               0 shards nothing; 1 and 2 shard the state and the reduced gradients; 3 also shards the
                        parameters of `model`, and gathers them where torch uses them; "auto" chooses the fastest
    offload             None keeps everything on the device. "host" or "nvme:/scratch" moves the state there. A mapping
                        gives "parameters" (frozen ones too), "gradients" and "state" (left out: with the parameters) a tier,
                        or fractions: {"device": 0.25, "nvme:/scratch": 0.75}. "auto" or "auto:/scratch" chooses
    memory              limits what the library keeps on this rank's device (or CPU), such as "40GiB", without
                        activations. A larger plan is refused before anything is reserved (B2004). All ranks set it, or
                        none: "auto" then counts on three quarters of the free memory
    activations         "host" or "nvme:/scratch" moves there what autograd saves in calls of `model`, until backward; on a CPU
                        a drive only. `ballast.offload_activations()` does so for a part of a program
    max_grad_norm       clips gradients to this norm in each step
    state_format        "split" (default), "fp32", "bf16", "compact" or "4bit": the format of the state of bfloat16
                        parameters. Several of them, or "auto" for all: chooses the most exact ones that fit and cost at
                        most 5 % of a step. None: "split", or "fp32" for an optimizer with its own step
    gradient_format     "fp32" or "bf16": the format of the reduced gradients of bfloat16 parameters, which are summed in
                        fp32, until the update. Both, or "auto": chooses as with `state_format`
    update_in_backward  in stage 3, updates a unit once it is reduced; excludes clipping, loss scaling, accumulation, skipping
    overlap_gathers     below stage 3, lets step() return while parameters are gathered: each use waits for those that it needs
    prefetch            in stage 3, how many units are gathered ahead, each in memory of its own: 2 keeps a slow link at work
    keep_gathered       in stage 3, True keeps parameters gathered from forward to backward, "4GiB" as many as fit into that
    elementwise         declares that an unknown optimizer treats each element alone, so that it can work on shards
    units               in stage 3, names of module classes that are gathered as one; default: the repeated blocks
    run                 a name under which drives keep state and trained parameters, not buffers: a training of the same model
                        and optimizer resumes after its last step, on any ranks, in any stage and format; others are refused
    mirror              keeps a run's records on another host's drive too (on one host: another rank's), to survive its loss
    checkpoint          a directory of `ballast.save()`: a run that has no records, or lost them, begins from its newest one
    outer               lets each host train on its own, and exchange parameters with the others every N steps:
                        `outer=ballast.DiLoCo(every=64)`. Its memory is part of `memory`
    process_group       the ranks that share this training
    norm_group          the ranks with other parts of the same model, which the gradient norm includes
    replicated          parameters that all ranks of `norm_group` hold, which the norm counts once
    timeline            records when each operation ran, for `optimizer.write_timeline(path)`
    verify              repeats a part of the updates with other code, once in this many steps; different bits raise B3001
    tile                elements that are updated together, such as "1Mi"; 0: all of a unit on the device, else 256Ki to 2Mi
    wire                "int8" for all that ranks send, or formats by kind, such as {"gather": "int8", "reduce": "int8",
                        "across": "int4"}: codes of parameters (in stage 3), of gradients, and of sums between hosts
    replicas            in stage 3, "host" keeps a copy of the parameters in each host, on the device: uses gather inside of
                        hosts only, while all ranks share the state. Or a number of copies, each of as many neighbours
    calls_differ        in stage 3, ranks use different units, as experts without tokens; they see it in the first 10 steps
    threads             CPU threads of updates; 0: one for each core that this process may use
    timeout             seconds of each wait for other ranks
    """
    options = WrapOptions(
        stage=read_stage(stage),
        offload=offload,
        memory=read_memory(memory),
        max_grad_norm=max_grad_norm,
        state_format=None if state_format is None else read_state_formats(state_format),
        gradient_format=read_gradient_formats(gradient_format),
        update_in_backward=update_in_backward,
        overlap_gathers=overlap_gathers,
        prefetch=read_prefetch(prefetch, read_stage(stage)),
        keep_gathered=read_keep_gathered(keep_gathered, read_stage(stage)),
        elementwise=elementwise,
        units=read_units(units, read_stage(stage)),
        run=run, timeline=timeline, verify=verify, tile=tile,
        threads=threads,
        timeout=timeout,
        activations=None if activations is None else read_activation_options(activations),
        wire=read_wire(wire, read_stage(stage)),
        replicas=read_replicas(replicas, read_stage(stage)),
        outer=read_outer(outer),
        mirror=mirror, calls_differ=read_calls_differ(calls_differ, read_stage(stage)),
        checkpoint=os.fspath(checkpoint),
    )
    groups = Groups(process_group, norm_group, tuple(replicated))
    if isinstance(optimizer, (list, tuple)):
        return _wrap(optimizer, model, for_several(checked(options)), groups)
    return _wrap([optimizer], model, checked(options), groups)[0]


@dataclass(frozen=True)
class Groups:
    """The process groups of a training."""

    process_group: ProcessGroup | None
    norm_group: ProcessGroup | None
    replicated: Iterable[torch.Tensor]


def _wrap(
    optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None, options: WrapOptions, groups: Groups
) -> list[WrappedOptimizer]:
    """Wrap all of them, or leave all as they were."""
    from ballast.checkpoint.runs import begin_runs
    from ballast.torch.optimizer import class_for
    from ballast.torch.training.joint_runs import name_of_member
    from ballast.torch.training.preconditions import require_initialized, tell_of_own_values

    if not optimizers:
        refuse("cannot wrap an empty list: there is no optimizer in it", needed="the optimizers of a model")
    for optimizer in optimizers:
        _require_plain(optimizer)
    _require_model(model)
    require_initialized(model, optimizers)
    sessions: list[Session] = []
    given = [dict(optimizer.state) for optimizer in optimizers]
    call = object()
    try:
        for member, optimizer in enumerate(optimizers):
            of_this = replace(options, activations=None) if sessions else options  # the first one's hooks see all calls
            if options.run:
                of_this = replace(of_this, run=name_of_member(options.run, member))
            sessions.append(_session_of(optimizer, model, of_this, groups, call))
        if options.run:  # the optimizers show the state of their runs from now on
            begin_runs(sessions, model)
    except BaseException:
        for session in reversed(sessions):
            session.take_back()
        for optimizer, state in zip(optimizers, given):
            optimizer.state.clear()  # a run may have been opened, whose state it showed
            optimizer.state.update(state)
        raise
    tell_of_own_values(sessions[0].group.rank, sessions[0].ranks_of_all_hosts, model)
    for optimizer, session in zip(optimizers, sessions):
        optimizer.__dict__.pop("step", None)  # of a learning rate scheduler, which counts steps of the plain optimizer
        optimizer.__class__ = class_for(type(optimizer))
        cast("WrappedOptimizer", optimizer)._ballast = session
    return cast("list[WrappedOptimizer]", [*optimizers])


def _session_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, options: WrapOptions, groups: Groups, call: object
) -> Session:
    from ballast.checkpoint.runs import newest_checkpoint
    from ballast.torch.process_groups import with_copies_of
    from ballast.torch.training.model_and_optimizer import Wrapped
    from ballast.torch.training.session import Session
    from ballast.torch.updates.rules import rules_of
    from ballast.torch.updates.update_kinds import updates_of

    updates = updates_of(optimizer, declared=options.elementwise, stored=options.needs_stored_state)
    if updates.custom_step is not None:
        options = for_stored_step(options) if options.needs_stored_state else for_custom_step(options)
    rules_of(enumerate(optimizer.param_groups), updates.rule)
    ranks, outer = _connect(groups, options)
    with ExitStack() as undoing:
        undoing.callback(ranks.leave)
        if outer is not None:
            undoing.callback(outer.close)
        options = with_copies_of(ranks.of_data, options)
        if options.checkpoint:
            options = replace(options, checkpoint=newest_checkpoint(ranks.of_data, options.checkpoint, model))
        session = Session(Wrapped(optimizer, model, options, call), ranks, updates, options, outer)
        undoing.pop_all()  # the session leaves the ranks from now on
        undoing.callback(session.take_back)
        session.begin()
        if not options.checkpoint:  # which has the state with which a run begins
            session.load({id(parameter): values for parameter, values in optimizer.state.items()})
        undoing.pop_all()
    return session


def _connect(groups: Groups, options: WrapOptions) -> tuple[ProcessGroups, OuterOptimizer | None]:
    from ballast.outer.hosts import connect_hosts
    from ballast.outer.optimizer import OuterOptimizer
    from ballast.torch.process_groups import connect_groups

    if options.outer is None:
        return connect_groups(groups.process_group, groups.norm_group, groups.replicated, options), None
    if groups.norm_group is not None:
        refuse(
            "norm_group and outer= exclude each other: hosts would exchange parts of a model",
            needed="one of them",
        )
    ranks, hosts = connect_hosts(groups.process_group, options.outer, options.timeout)
    return ranks, OuterOptimizer(hosts, options.outer, options.threads)


def _require_plain(optimizer: object) -> None:
    import torch

    from ballast._torch_compat import replaced_step
    from ballast.torch.optimizer import WrappedOptimizer

    if isinstance(optimizer, WrappedOptimizer):
        optimizer._ballast.require_open("call ballast.wrap()")
        refuse("cannot wrap the optimizer: it is wrapped already", needed="one call of ballast.wrap() for each optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        refuse(f"cannot wrap a {type(optimizer).__name__}: it is no optimizer", needed="a torch.optim.Optimizer")
    if (step := replaced_step(optimizer)) is not None:
        refuse(
            "cannot wrap the optimizer: its step() has been replaced, and the wrapped optimizer would not call the new one",
            where=f"optimizer.step is {getattr(step, '__qualname__', type(step).__name__)}",
            needed="the step() of its class",
            remedy="Run code before or after each step with optimizer.register_step_pre_hook() or "
            "register_step_post_hook(), and remove the other step() with del optimizer.step.",
        )


def _require_model(model: object) -> None:
    import torch

    if not (model is None or isinstance(model, torch.nn.Module)):
        refuse(
            f"cannot wrap an optimizer of a {type(model).__name__}: it is no model",
            needed="a torch.nn.Module",
            remedy="Several modules are one model in torch.nn.ModuleList([one, other]), if they are trained together.",
        )
