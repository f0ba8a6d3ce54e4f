"""One line that makes an optimizer one of many ranks and tiers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from ballast import _core
from ballast.checks import refuse

if TYPE_CHECKING:
    import torch

    Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def wrap(
    optimizer: Optimizer,
    model: torch.nn.Module | None = None,
    *,
    process_group: Any = None,
    norm_group: Any = None,
    replicated: Iterable[torch.Tensor] = (),
    **options: Any,
) -> Optimizer:
    """The same optimizer, whose state and gradients are partitioned over the ranks, and kept where `offload` says.

    >>> import torch
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> optimizer = wrap(optimizer)
    >>> model(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.zero_grad()
    >>> optimizer.metrics()["step"]
    1.0

    Ranks are those of torch.distributed, or of `process_group`; without it, those that a launcher has started. Gradients
    are averaged over them: the model needs no DistributedDataParallel. Parameters of `model` may be without memory yet: see
    `ballast.deferred()`.

    norm_group      ranks that have other parts of the same model: the norm of gradients is over theirs too
    replicated      parameters that all ranks of `norm_group` have alike: the norm counts each once
    stage           0: every rank keeps everything; 1 and 2 (default): optimizer state and reduced gradients are shared;
                    3: and the parameters of `model`, which are gathered where torch uses them.
                    "auto": the one that is forecast to take least time, of those that fit
    units           names of classes of modules that are gathered as one, in stage 3; without it, repeated blocks
    offload         none (default): all on the device. "host", "nvme:/scratch", or a place for each of "parameters",
                    "gradients" and "state", which can be fractions of places, {"device": 0.25, "nvme:/scratch": 0.75}.
                    "auto": chosen of the device and the host; "auto:/scratch": and of this drive
    memory          "40GiB": all that the library may keep on this rank's device, or on a CPU in its memory. Activations
                    and CUDA's own come on top. What needs more is refused before anything is reserved (B2004). All
                    ranks say it, or none. Without it choices are made for three quarters of what is free when
                    training begins
    max_grad_norm   clips gradients to this norm in each step
    update_in_backward
                    True: in stage 3, a unit is updated as soon as its gradients are summed, so they need no memory until the
                    step. Nothing can be clipped, scaled, accumulated or skipped then
    state_format    "split" (default), "fp32", "bf16" or "compact": what the optimizer keeps for parameters in bfloat16
    elementwise     True: the step of this optimizer, of a class unknown here, does the same to each element, so that it can
                    run on this rank's part of each parameter
    run             a name: state, all of it on drives, is kept under it with the parameters. The same training (model, ranks,
                    stage, formats, kind of optimizer) resumes its last step, `optimizer.steps`; another one is refused
    timeline        True: what ran when is kept, for `optimizer.write_timeline(path)`
    verify          N: every N steps a part of the updates is made a second time by other code, and what they left is looked at
                    again in the next step: bits that differ end the training (B3001)
    tile            "1Mi": so many elements are moved and updated together; without it 256Ki
    threads         of updates on the CPU; without it, one on each core that this process may use
    timeout         seconds, of every wait for other ranks

    What is chosen is logged by rank 0, with the forecast: of transfers and updates alone, since how long the model computes
    nobody knows before its first step. All ranks choose the same, for the one that has least.
    """
    _require_plain(optimizer)
    return _wrap(optimizer, model, process_group, norm_group, replicated, options)


def _wrap(
    optimizer: Optimizer,
    model: torch.nn.Module | None,
    process_group: Any,
    norm_group: Any,
    replicated: Iterable[torch.Tensor],
    options: dict[str, Any],
) -> Optimizer:
    from ballast.wrapper import meeting
    from ballast.wrapper import options as wrap_options
    from ballast.wrapper.optimizer import class_for
    from ballast.wrapper.own_step import updates_of
    from ballast.wrapper.session import Session

    read = wrap_options.read(options)
    updates = updates_of(optimizer, declared=read.elementwise)
    if updates.own_step is not None:
        read = wrap_options.for_own_step(read)
    for group in optimizer.param_groups:
        _core.check_rule(updates.rule(group))
    session = Session(optimizer, model, meeting.meet(process_group, norm_group, replicated, read), updates, read)
    try:
        session.begin()
        session.load({id(parameter): values for parameter, values in optimizer.state.items()})
        if read.run:  # what was kept is there from now on
            session.partition_now()
    except BaseException:
        session.take_back()
        raise
    optimizer.__dict__.pop("step", None)  # by which a learning rate scheduler counts steps of the plain optimizer
    optimizer.__class__ = class_for(type(optimizer))
    optimizer._ballast = session
    return optimizer


def _require_plain(optimizer: object) -> None:
    import torch

    from ballast.wrapper.optimizer import WrappedOptimizer

    if isinstance(optimizer, WrappedOptimizer):
        optimizer._ballast.require_open("call ballast.wrap()")
        refuse("an optimizer was wrapped twice")
    if not isinstance(optimizer, torch.optim.Optimizer):
        refuse(f"a {type(optimizer).__name__} was to be wrapped", needed="a torch.optim.Optimizer")
