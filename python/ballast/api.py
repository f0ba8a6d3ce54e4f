"""The functions of a training: wrap its optimizer, save, load, export, gather, construct without memory, move activations."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypedDict, cast, overload

from ballast.checks import refuse
from ballast.schema import changed, options_of, takes
from ballast.sizes import Size, parse_size
from ballast.tiers import IN_FLIGHT
from ballast.wrap_options import Run, Tuning, WrapOptions, checked, for_custom_step, for_stored_step, options_for_several

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from ballast.checkpoint.saving import PendingSave
    from ballast.outer.optimizer import OuterOptimizer
    from ballast.torch.optimizer import WrappedOptimizer
    from ballast.torch.process_groups import ProcessGroups
    from ballast.torch.training.training import Training
    from ballast.torch.typing import Wrap

    Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    from ballast.torch.activations.saved_activations import SavedActivations

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
        return _wrap(optimizer, model, options_for_several(options))
    return _wrap([optimizer], model, options)[0]


def _wrap(
    optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None, options: WrapOptions
) -> list[WrappedOptimizer]:
    """Wrap all of them, or leave all as they were."""
    from ballast._torch_compat import is_dtensor
    from ballast.checkpoint.runs import begin_runs
    from ballast.torch.optimizer import class_for
    from ballast.torch.parts import use_local_tensors
    from ballast.torch.training.joint_runs import name_of_member
    from ballast.torch.training.preconditions import require_initialized, tell_of_own_values

    if not optimizers:
        refuse("cannot wrap an empty list: there is no optimizer in it", needed="the optimizers of a model")
    _require_plain(optimizers, model)
    require_initialized(model, optimizers)
    parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    parameters += [] if model is None else model.parameters()
    undoing = use_local_tensors(model, optimizers) if any(map(is_dtensor, parameters)) else ExitStack()
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
        undoing.close()
        raise
    tell_of_own_values(trainings[0].group.rank, trainings[0].ranks_of_all_hosts, model)
    for optimizer, training in zip(optimizers, trainings):
        optimizer.__dict__.pop("step", None)  # set by a scheduler that counts steps of the plain optimizer
        optimizer.__class__ = class_for(type(optimizer))
        cast("WrappedOptimizer", optimizer)._ballast = training
    return cast("list[WrappedOptimizer]", [*optimizers])


def _training_of(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module | None, options: WrapOptions, call: object
) -> Training:
    from ballast.checkpoint.runs import newest_checkpoint
    from ballast.torch.parts import ATTRIBUTE
    from ballast.torch.process_groups import with_copies_of
    from ballast.torch.training.model_and_optimizer import ModelAndOptimizer
    from ballast.torch.training.training import Training
    from ballast.torch.updates.rules import rules_of, updates_of

    updates = updates_of(optimizer, declared=options.tuning.elementwise, stored=options.needs_stored_state)
    if updates.has_custom_step:
        options = for_stored_step(options) if options.needs_stored_state else for_custom_step(options)
    rules_of(enumerate(optimizer.param_groups), updates.rule)
    parts = [] if model is None else [each for each in model.parameters() if hasattr(each, ATTRIBUTE)]
    ranks, outer = _connect(options, parts)
    with ExitStack() as undoing:
        undoing.callback(ranks.leave)
        if outer is not None:
            undoing.callback(outer.close)
        if ranks.expert_group is not None and updates.has_custom_step:
            what = f"cannot train experts with {type(optimizer).__name__}: its own step may need all of a tensor"
            refuse(what, needed="an optimizer that the library knows, such as torch.optim.AdamW")
        options = with_copies_of(ranks.data_group, options)
        if checkpoint := options.run.checkpoint:
            checkpoint = newest_checkpoint(ranks.data_group, checkpoint, model)
            options = changed(options, run=changed(options.run, checkpoint=checkpoint))
        training = Training(ModelAndOptimizer(optimizer, model, options, call), ranks, updates, options, outer)
        undoing.pop_all()  # the training leaves the ranks from now on
        undoing.callback(training.take_back)
        training.begin()
        if checkpoint:  # it has the state with which a run begins
            optimizer.state.clear()
        else:
            training.load({id(parameter): values for parameter, values in optimizer.state.items()})
        undoing.pop_all()
    return training


def _connect(options: WrapOptions, parameters: Sequence[torch.nn.Parameter]) -> tuple[ProcessGroups, OuterOptimizer | None]:
    from ballast.outer.hosts import connect_hosts
    from ballast.outer.optimizer import OuterOptimizer
    from ballast.torch.process_groups import connect_groups, ranks_of

    if options.outer is None:
        return connect_groups(options, parameters), None
    data, parts = ranks_of(options.mesh)
    if parts is not None or parameters:
        refuse(
            "mesh= with parts of a model and outer= exclude each other: hosts would exchange parts of a model",
            needed="one of them",
        )
    ranks, hosts = connect_hosts(data, options.outer, options.tuning.timeout)
    return ranks, OuterOptimizer(hosts, options.outer, options.tuning.threads)


def _require_plain(optimizers: Sequence[object], model: object) -> None:
    import torch

    from ballast._torch_compat import replaced_step
    from ballast.torch.optimizer import WrappedOptimizer

    for optimizer in optimizers:
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
    if not (model is None or isinstance(model, torch.nn.Module)):
        refuse(
            f"cannot wrap an optimizer of a {type(model).__name__}: it is no model",
            needed="a torch.nn.Module",
            remedy="Several modules are one model in torch.nn.ModuleList([one, other]), if they are trained together.",
        )


@overload
def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    extra: Any = None,
    wait: Literal[True] = True,
) -> None: ...


@overload
def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    extra: Any = None,
    wait: Literal[False],
) -> PendingSave: ...


@overload
def save(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers, *, extra: Any = None, wait: bool
) -> PendingSave | None: ...


def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: Optimizers,
    *,
    extra: Any = None,
    wait: bool = True,
) -> PendingSave | None:
    """Save the model and the optimizer's state to a directory. All ranks call this together; each writes its local
    shards.

    >>> import tempfile, torch, ballast
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save(directory, model, optimizer, extra={"epoch": 3})
    ...     load_checkpoint(directory, model, optimizer)
    {'epoch': 3}

    With `wrap(outer=...)` each host saves its own state to a folder of the directory, such as `host-0`. Folders of hosts
    that do not take part, such as a lost one, are removed.

    `optimizer` is a list if the model has several: one checkpoint holds all of them.

    All hosts see the directory, except with `outer=`: B1001 on all ranks otherwise, and the previous checkpoint stays.

    A directory holds the checkpoint of one model, or of one part of a model if ranks train different parts
    (`mesh`) that are no DTensors. An existing checkpoint stays the current one until the new one is complete, whatever
    happens, and is removed then.

    Each rank saves its own `extra`: anything that `torch.load(weights_only=True)` can read, such as a scheduler's
    state_dict(), the position in the data, or the state of random generators. Buffers are those of rank 0. A training in C++
    loads the checkpoint too, and gets an `extra` of bytes as its note.

    With `wait=False`, each rank copies what it saves to the host's memory, and the call returns a PendingSave. The training
    continues while a thread writes the copy. The checkpoint becomes the current one when all ranks have written their files.
    The next save(), load_checkpoint() and close() wait for it first, and raise its error unless `wait()` of the PendingSave
    has raised it. The end of the program waits for it too. The copy includes what is kept on drives: B2001 says on all ranks
    that a host has too little memory for it.

    Raises B2204 on all ranks while another job saves to the directory, or if another job has saved there since this
    training last saved or loaded. The training can continue, and save to another directory or later.
    """
    from ballast.checkpoint.saving import save_in_background, save_now
    from ballast.checkpoint.tensors import accesses_of

    accesses = accesses_of(optimizer, model)
    for access in accesses:
        access.finish_pending()
    if not wait:
        return save_in_background(Path(directory), model, accesses, extra)
    save_now(Path(directory), model, accesses, extra)
    return None


def load_checkpoint(directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: Optimizers) -> Any:
    """Restore the model and the optimizer from a checkpoint, and return the `extra` of this rank.

    All ranks call this together. The number of ranks, the stage, the tiers and the state format may differ from those
    that saved. Gradients since the last step are dropped. Several optimizers are a list, in the order of the saved one.
    All ranks read the files, so every host sees the directory, or has a copy of it at the same path.

    >>> import tempfile, torch, ballast
    >>> def make():
    ...     model = torch.nn.Linear(4, 1)
    ...     return model, ballast.wrap(torch.optim.AdamW(model.parameters(), lr=0.1))
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     model, optimizer = make()
    ...     save(directory, model, optimizer)
    ...     again, its_optimizer = make()
    ...     load_checkpoint(directory, again, its_optimizer)
    >>> bool((again.weight == model.weight).all())
    True

    With `wrap(outer=...)` all hosts load the last step that one of them has saved. A host that has not saved it, or that
    is new, loads the folder of another one, and gets the `extra` of that host.

    With another number of ranks, `extra` is that of rank `rank % saved_ranks`. Its tensors are on the host.

    For a run's directory, or `directory/NAME` of several, this loads the newest step that all of its ranks have. From an
    address of `ballast push`, in text such as "s3://bucket/run-7", each rank gets what it needs into a temporary folder.

    Checkpoints of other programs are read too: directories of `torch.distributed.checkpoint` (FSDP2, Accelerate, Lightning),
    of DeepSpeed (ZeRO stages 1 to 3, and universal), and files of `torch.save()`, or folders with them, that hold a model and
    its optimizer. Parameters, and moments and steps of trained ones, are loaded; from files of torch the options of parameter
    groups too, with a warning that names each that changes, and the result is their entry `extra`.
    """
    from ballast.checkpoint.foreign import ForeignPlace
    from ballast.checkpoint.kinds import kind_of
    from ballast.checkpoint.loading import load_current
    from ballast.checkpoint.manifest import LocalCheckpoint
    from ballast.checkpoint.outer import folder_to_load
    from ballast.checkpoint.remote import is_address, remote_checkpoint
    from ballast.checkpoint.runs import tell_run
    from ballast.checkpoint.tensors import LOADING, accesses_of
    from ballast.ranks import by_first_rank

    accesses = accesses_of(optimizer, model)
    for access in accesses:
        access.finish_pending()
    if isinstance(directory, str) and is_address(directory):
        return load_current(remote_checkpoint(directory, accesses[0]), model, accesses)
    path = folder_to_load(Path(directory), accesses[0])
    if by_first_rank(accesses[0].group, LOADING, lambda: kind_of(path)) in ("", "ballast"):
        extra = load_current(LocalCheckpoint(path), model, accesses)
        for access in accesses:
            tell_run(access, path)
        return extra
    if len(accesses) > 1:
        refuse(
            "cannot load another program's checkpoint into several optimizers: it names the state of one",
            where=str(path),
            needed="ballast.load(model, directory), which loads the model alone; or one optimizer",
        )
    return load_current(ForeignPlace(path, model, accesses[0]), model, accesses)


def load(model: torch.nn.Module, files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
    """Read parameters and buffers from a checkpoint of any kind, without an optimizer.

    `files` is a directory of `ballast.save()`, or an address of `ballast push`; a directory of `torch.distributed.checkpoint`
    (of a model alone, too) or of DeepSpeed; a file of `torch.save()`, or a folder or an index of such files; or safetensors: a
    file, a pattern, a directory, an index, or several of them.

    All ranks call this together, before or after `ballast.wrap()`. Before it, rank 0 alone may load a model that each rank has
    in full: `ballast.wrap()` copies its values to the others. Of values that it does not keep, a rank never holds more than a
    piece, and in the checkpoint of a training no more than one tensor with its state. Names and shapes must be those
    of the model, and so must the formats in files with weights alone: all are checked before anything changes. Values saved by
    a training are rounded to the format of the model; a model in fp32 gets the masters. Universal checkpoints lack frozen
    parameters and buffers, which stay as they are.

    Parameters that were constructed in `ballast.deferred()`, or on torch's meta device, are read when training begins, so
    the files must stay until then. A checkpoint of Ballast gives such a model its other parameters and its buffers then, too.

    >>> import torch
    >>> load(torch.nn.Linear(2, 1), "nowhere/*.safetensors")
    Traceback (most recent call last):
    ballast.errors.UsageError: B1001 no file matches nowhere/*.safetensors
    ...
    """
    from ballast.checkpoint.weights import restore

    restore(model, files)


def export(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: Size | None = None,
    merge_adapters: bool = False,
) -> None:
    """Write parameters and buffers to a safetensors file, or to several with an index, as Hugging Face does.

    >>> import tempfile, torch, ballast
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(torch.nn.Linear(4, 1), f"{folder}/model.safetensors")
    ...     os.listdir(folder)
    ['model.safetensors']

    All ranks call this together, and return when the files are complete. The first rank that trains the model writes
    them. Ranks that train different parts of a model (`mesh`) each need a file name of their own, unless the parts are
    DTensors, which are written in full. Rank 0 writes a model that is not wrapped, and no rank waits for it. Sharded
    parameters are gathered unit by unit, so no rank holds more than one unit.

    Existing files are replaced when the new ones are complete, including those of an earlier export under this name
    with another number of files. Parameters that several modules share are written once, under their first name, as
    `transformers` expects. `max_shard_size` is the size of the largest file, such as "5GB". With `merge_adapters`, a model of
    PEFT is written as its base model, whose weights have the adapters' changes: no rank holds more than one unit of it.
    """
    from ballast.checkpoint.full_model import export_model

    most_bytes = None if max_shard_size is None else parse_size(max_shard_size)
    export_model(model, Path(path), most_bytes, merges=merge_adapters)


def sync_weights(
    model: torch.nn.Module,
    to: Callable[[str, torch.Tensor], object] | str | os.PathLike[str] | torch.distributed.ProcessGroup,
    *,
    only_first_rank: bool = False,
    bucket: Size = "256MiB",
    timeout: float = 60.0,
) -> None:
    """Hand the full weights of a model over, one unit at a time: to a function, or in buckets to another process.

    >>> import torch
    >>> sync_weights(torch.nn.Linear(4, 2), lambda name, tensor: print(name, tuple(tensor.shape)))
    weight (2, 4)
    bias (2,)

    All ranks call this together, between steps. An error on one rank is raised on all.

    to                 a function, which is called with the name and the values of each parameter and buffer. Names are those of
                       `model.state_dict()`, with the first name of a tensor that several modules share. A tensor is valid until
                       the function returns: it may be copied or sent, and must not be written to. Or the path of a socket, for
                       a process of this machine; or a group of torch.distributed, whose first rank is the first one that trains
                       the model. The other process, or the other ranks, call `receive_weights()` with the same
    only_first_rank    the function is called on the first rank that trains the model, and not on all
    bucket             the size of what is sent at once. The sender holds it and one unit, and the receiver it and one tensor
    timeout            seconds in which the other process is there

    To a path or a group, names are those of the files on the Hub, and adapters of PEFT are merged.
    """
    if callable(to):
        from ballast.checkpoint.full_model import visit_units
        from ballast.checkpoint.tensors import tensors_of

        visit_units(tensors_of(model), to, "handing over weights", on_all=not only_first_rank)
        return
    from ballast.checkpoint.weight_sync import hand_over

    if (size := parse_size(bucket)) < 1:
        refuse("cannot hand over weights in buckets", needed="a bucket of at least one byte", available=str(bucket))
    hand_over(model, to, size, timeout)


def receive_weights(
    source: str | os.PathLike[str] | torch.distributed.ProcessGroup, *, timeout: float = 600.0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the values of the weights that `sync_weights()` hands over, in the process of an inference engine.

    >>> import tempfile, threading, torch
    >>> path = f"{tempfile.mkdtemp()}/socket"
    >>> training = threading.Thread(target=sync_weights, args=(torch.nn.Linear(4, 2), path))
    >>> training.start()
    >>> [name for name, _ in receive_weights(path)]
    ['weight', 'bias']
    >>> training.join()

    source     the path of a socket, which is made; or a group of torch.distributed
    timeout    seconds in which a process connects to the socket

    Values are valid until the next ones are taken: copy them. Raises B3301 if the process that hands them over ends.
    """
    from ballast.checkpoint.weight_sync import receive

    return receive(source, timeout)


class LossOptions(TypedDict, total=False):
    """What chunked_loss() also takes."""

    ignore_index: int
    label_smoothing: float
    z_loss: float


def chunked_loss(
    hidden: torch.Tensor,
    head: torch.nn.Module,
    labels: torch.Tensor,
    *,
    chunk: int = 1024,
    num_items_in_batch: int | torch.Tensor | None = None,
    **options: Unpack[LossOptions],
) -> torch.Tensor:
    """Return the cross entropy of `head(hidden)`, whose logits are made for `chunk` tokens at a time.

    With a vocabulary of 152k, the logits of 32k tokens and their gradients take 40 GB in fp32; those of 1,024 tokens 1.2 GB.
    `hidden` is what the model gives to its head, and `labels` has the next token of each: shift them as the model's own loss
    does. Forward and backward of a chunk are made together, so backward computes nothing again, and in stage 3 all chunks
    use the head that one call gathers. Gradients of the head are summed in fp32.

    >>> import torch
    >>> head, hidden, labels = torch.nn.Linear(8, 50), torch.randn(2, 6, 8), torch.randint(50, (2, 6))
    >>> whole = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    >>> torch.allclose(chunked_loss(hidden, head, labels, chunk=5), whole)
    True

    The result is the mean over tokens whose label is not `ignore_index` (-100), or the sum divided by `num_items_in_batch`, as
    Trainers with gradient accumulation have it. `label_smoothing` is that of torch, and `z_loss` a factor of the squared
    logarithm of the sum of each token's exponentials. The head may be any module that makes logits, with adapters too; its
    forward hooks get the loss in place of the logits.
    """
    from ballast.torch.chunks import Loss, chunked_loss

    if hidden.shape[:-1] != labels.shape:
        refuse(
            "cannot compute the loss: hidden states and labels are of different tokens",
            needed=f"labels of shape {tuple(hidden.shape[:-1])}",
            available=f"labels of shape {tuple(labels.shape)}",
        )
    if chunk < 1:
        refuse("cannot compute the loss", needed="a chunk of at least one token", available=str(chunk))
    loss = Loss(chunk, **options)
    total = chunked_loss(head, hidden, labels, loss)
    return total / ((labels != loss.ignore_index).sum() if num_items_in_batch is None else num_items_in_batch)


def tiled(module: torch.nn.Module, tiles: int) -> torch.nn.Module:
    """Let a module that treats each token alone, such as an MLP, compute them in this many tiles, and return it. It takes one
    tensor, and returns one.

    Backward computes each tile again, so that the activations of one tile are there at a time, and sums the gradients of
    parameters in fp32. The module is changed in place; its names, parameters and files stay.

    >>> import torch
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    >>> tokens = torch.randn(2, 50, 8)
    >>> whole = mlp(tokens)
    >>> torch.allclose(tiled(mlp, 4)(tokens), whole, atol=1e-6)
    True
    """
    from ballast.torch.chunks import Tiled

    if tiles < 1:
        refuse("cannot compute a module in tiles", needed="at least one tile", available=str(tiles))
    own = module.forward.forward if isinstance(module.forward, Tiled) else module.forward
    module.forward = Tiled(own, module, tiles)
    return module


@contextmanager
def gather(what: torch.nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hold full parameters inside the `with` block, which all ranks enter together.

    All writes to the parameters are kept: in place, through `.data`, or by assigning another tensor to `.data`. Every
    rank writes the same values. Assigning a new Parameter to a module is refused. In stage 3 the parameters are copies
    until the block ends, so steps and `ballast.save()` come outside of it.

    >>> import torch
    >>> layer = torch.nn.Linear(2, 1)
    >>> with gather(layer):
    ...     layer.weight.shape
    torch.Size([1, 2])
    """
    import torch

    from ballast.torch.calls.hooks import receiver_of
    from ballast.torch.parameters.managed_parameter import by_owner, grouped, owner_of

    given = what.parameters() if isinstance(what, torch.nn.Module) else what
    wanted = [given] if isinstance(given, torch.nn.Parameter) or not isinstance(given, Iterable) else [*given]
    if strange := [each for each in wanted if not isinstance(each, torch.Tensor)]:
        refuse(f"cannot gather {strange[0]!r}", needed="a module, a parameter, or several parameters")
    for owner, _ in by_owner(wanted):
        owner.begin()  # it partitions other parameters, too
    with ExitStack() as stack:
        for owner, parameters in by_owner(wanted):
            stack.enter_context(owner.gathered(parameters))
        for training, parameters in grouped(wanted, lambda each: receiver_of(each) if owner_of(each) is None else None):
            stack.enter_context(training.gathered(parameters))
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Make large tensors inside the `with` block without memory: their initialization is recorded, and
    `ballast.wrap(optimizer, model)` makes the parameters piece by piece, with the same bits as without this block.
    `ballast.load()` reads them from files instead.

    The recording follows these tensors until training begins: cast the model, move it, or initialize it again, in the block or
    after it. They report the device that their values will be on.

    >>> import torch
    >>> with deferred():
    ...     layer = torch.nn.Linear(1000, 1000)
    >>> layer.to(torch.bfloat16).weight
    Parameter of (1000, 1000), torch.bfloat16, made when training begins
    """
    from ballast.torch.parameters.deferred_init import follow_all, recording

    try:
        with recording():
            yield
    finally:
        follow_all()


def offload_activations(to: str, *, min_bytes: Size = "256KiB", in_flight: Size = IN_FLIGHT) -> SavedActivations:
    """Keep the tensors that autograd saves inside the `with` block on the host or on a drive until backward.

    >>> import torch
    >>> layer = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh())
    >>> activations = offload_activations("nvme:.")
    >>> with activations:
    ...     loss = layer(torch.ones(512, 256)).sum()
    >>> activations.counters()["kept_bytes"]
    1048576.0
    >>> loss.backward()
    >>> activations.counters()["kept_bytes"]
    0.0

    Make one for a training, and enter it around each forward pass and its loss: its memory and its file are used again.
    Gradients have the same bits as without it. Parameters and their views stay. `ballast.wrap(activations=)` does the same
    for each call of a model.

    to          "host", or "nvme:DIRECTORY" for a file without a name, which ends with the process. A CPU's activations go to
                drives only
    min_bytes   smaller tensors stay
    in_flight   size of the host buffers for writes and prefetches, and on a GPU of the tensors being copied; at least 2MiB

    Raises B2202 in forward or backward if the drive is full, and B3202 in backward if it returns other bytes.
    """
    from ballast.tiers import read_activation_options, require_away_from
    from ballast.torch.activations.saved_activations import SavedActivations
    from ballast.torch.gpu import current_device, is_gpu

    options = read_activation_options(to, min_bytes=min_bytes, in_flight=in_flight)
    require_away_from(options, on_gpu=is_gpu(current_device()))
    return SavedActivations(options)
