"""Wrap an optimizer: the one line that shards a training over ranks and memory tiers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from ballast.checks import refuse
from ballast.schema import changed, options_of, takes
from ballast.wrap_options import Run, Tuning, WrapOptions, checked, for_custom_step, for_several, for_stored_step

if TYPE_CHECKING:
    import torch

    from ballast.outer.optimizer import OuterOptimizer
    from ballast.torch.optimizer import WrappedOptimizer
    from ballast.torch.process_groups import ProcessGroups
    from ballast.torch.training.training import Training
    from ballast.torch.typing import Wrap

Keywords = ParamSpec("Keywords")

# The place of each option that wrap() does not take itself.
ELSEWHERE = {
    **{name: f"tuning=ballast.Tuning({name}=...)" for name in options_of(Tuning)},
    **{name: f'run=ballast.Run("NAME", {name}=...)' for name in options_of(Run) if name != "name"},
    "process_group": "mesh=, a DeviceMesh of these ranks",
    "norm_group": 'mesh=, a DeviceMesh with a dimension "data" and a dimension "tensor"',
}


def _keeping_class(options: Callable[Keywords, object]) -> Callable[[Callable[..., object]], Wrap[Keywords]]:
    """Let type checkers see the optimizer's own class in the result, and the options as keywords."""
    return lambda function: cast("Wrap[Keywords]", function)


@dataclass(unsafe_hash=True)
class Arguments(WrapOptions):
    """What wrap() takes after the optimizer, for type checkers."""

    model: torch.nn.Module | None = field(default=None, kw_only=False)


@_keeping_class(Arguments)
@takes(WrapOptions, ELSEWHERE)
def wrap(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    model: torch.nn.Module | None = None,
    **given: Any,
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

    {options}
    """
    options = checked(WrapOptions(**given))
    if isinstance(optimizer, (list, tuple)):
        return _wrap(optimizer, model, for_several(options))
    return _wrap([optimizer], model, options)[0]


def _wrap(
    optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None, options: WrapOptions
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
    trainings: list[Training] = []
    given = [dict(optimizer.state) for optimizer in optimizers]
    call = object()
    try:
        for member, optimizer in enumerate(optimizers):
            own = changed(options, activations=None) if trainings else options  # the first one's hooks see all calls
            if (run := options.run).name:
                own = changed(own, run=changed(run, name=name_of_member(run.name, member)))
            trainings.append(_training_of(optimizer, model, own, call))
        if options.run.name:  # the optimizers show the state of their runs from now on
            begin_runs(trainings, model)
    except BaseException:
        for training in reversed(trainings):
            training.take_back()
        for optimizer, state in zip(optimizers, given):
            optimizer.state.clear()  # a run may have been opened, whose state it showed
            optimizer.state.update(state)
        raise
    tell_of_own_values(trainings[0].group.rank, trainings[0].ranks_of_all_hosts, model)
    for optimizer, training in zip(optimizers, trainings):
        optimizer.__dict__.pop("step", None)  # of a learning rate scheduler, which counts steps of the plain optimizer
        optimizer.__class__ = class_for(type(optimizer))
        cast("WrappedOptimizer", optimizer)._ballast = training
    return cast("list[WrappedOptimizer]", [*optimizers])


def _training_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, options: WrapOptions, call: object
) -> Training:
    from ballast.checkpoint.runs import newest_checkpoint
    from ballast.torch.process_groups import with_copies_of
    from ballast.torch.training.model_and_optimizer import ModelAndOptimizer
    from ballast.torch.training.training import Training
    from ballast.torch.updates.rules import rules_of, updates_of

    updates = updates_of(optimizer, declared=options.tuning.elementwise, stored=options.needs_stored_state)
    if updates.has_custom_step:
        options = for_stored_step(options) if options.needs_stored_state else for_custom_step(options)
    rules_of(enumerate(optimizer.param_groups), updates.rule)
    ranks, outer = _connect(options)
    with ExitStack() as undoing:
        undoing.callback(ranks.leave)
        if outer is not None:
            undoing.callback(outer.close)
        options = with_copies_of(ranks.of_data, options)
        if checkpoint := options.run.checkpoint:
            checkpoint = newest_checkpoint(ranks.of_data, checkpoint, model)
            options = changed(options, run=changed(options.run, checkpoint=checkpoint))
        training = Training(ModelAndOptimizer(optimizer, model, options, call), ranks, updates, options, outer)
        undoing.pop_all()  # the training leaves the ranks from now on
        undoing.callback(training.take_back)
        training.begin()
        if not checkpoint:  # which has the state with which a run begins
            training.load({id(parameter): values for parameter, values in optimizer.state.items()})
        undoing.pop_all()
    return training


def _connect(options: WrapOptions) -> tuple[ProcessGroups, OuterOptimizer | None]:
    from ballast.outer.hosts import connect_hosts
    from ballast.outer.optimizer import OuterOptimizer
    from ballast.torch.process_groups import connect_groups, ranks_of

    if options.outer is None:
        return connect_groups(options), None
    data, parts = ranks_of(options.mesh)
    if parts is not None:
        refuse(
            "mesh= with parts of a model and outer= exclude each other: hosts would exchange parts of a model",
            needed="one of them",
        )
    ranks, hosts = connect_hosts(data, options.outer, options.tuning.timeout)
    return ranks, OuterOptimizer(hosts, options.outer, options.tuning.threads)


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
