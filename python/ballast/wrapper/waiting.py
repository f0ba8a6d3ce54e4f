"""Parameters whose numbers are made or read when training begins, piece by piece, where each piece is going to be."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from ballast._torch_compat import swap_tensors_in_place
from ballast.checks import refuse, refuse_order
from ballast.connecting import Group
from ballast.wrapper.casting import require_no_cast
from ballast.wrapper.memory import return_freed_memory, tensor_at
from ballast.wrapper.plain import named_buffers, named_parameters
from ballast.wrapper.recording import history_of, numbers_from_outside, numbers_of
from ballast.wrapper.stored import Stored
from ballast.wrapper.ungathered import Ungathered, nothing_like

if TYPE_CHECKING:
    from ballast.wrapper.session import Session


class Waiting:
    """Stands where a window will be, until training begins."""

    def __init__(self, session: weakref.ref[Session]):
        self._session = session

    def session(self) -> Session:
        session = self._session()
        if session is None or session.is_closed:
            refuse("a parameter was used that has no numbers yet, and its optimizer is gone or closed")
        return session

    @property
    def is_left(self) -> bool:
        """The session is gone or closed: another one may take its place."""
        session = self._session()
        return session is None or session.is_closed

    def gathering(self, parameters: Sequence[torch.nn.Parameter], use: str) -> NoReturn:
        name = self.session().names()[id(parameters[0])]
        require_no_cast(use, name, why="its values are made when training begins")
        refuse_order(
            "a parameter was used that has no numbers yet",
            where=f"parameter {name}",
            needed="a call of the model, or with ballast.gather(model): ...",
        )

    def begin(self) -> None:
        """Numbers are made, or read, and partitioned with all others. All ranks do this together."""
        self.session().partition()

    def write(self, values: Mapping[torch.nn.Parameter, Stored]) -> None:
        for parameter, stored in values.items():
            parameter.ballast_origin = stored


class Coming:
    """Instead of first numbers, where others are about to take their place."""


def let_come(parameter: torch.nn.Parameter, waiting: Waiting) -> None:
    """It is in no window any more, and its numbers are with somebody who brings them."""
    parameter.data = nothing_like(parameter, parameter.device)
    parameter.ballast_window = waiting
    parameter.ballast_origin = Coming()
    parameter.__class__ = Ungathered


def lose(parameter: torch.nn.Parameter, waiting: Waiting) -> None:
    """The same, and nobody has its numbers any more."""
    let_come(parameter, waiting)
    del parameter.ballast_origin


def lose_what_comes(model: torch.nn.Module, waiting: Waiting) -> None:
    """Nobody will bring it."""
    for parameter in model.parameters():
        if comes(parameter) and parameter.ballast_window is waiting:
            lose(parameter, waiting)


def comes(parameter: torch.nn.Parameter) -> bool:
    """Nothing else was said of it since."""
    return isinstance(getattr(parameter, "ballast_origin", None), Coming)


def expect(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Training can begin without numbers of these: a checkpoint brings them."""
    for parameter in parameters:
        if lacks_numbers(parameter):
            parameter.ballast_origin = Coming()


def expect_buffers(model: torch.nn.Module) -> None:
    """Those without numbers get memory, which a checkpoint fills: each rank has them whole."""
    made: dict[int, torch.Tensor] = {}  # by id of the one on the meta device, which several modules may share
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                memory = torch.empty_like(buffer, device=device_of(buffer))
                module._buffers[name] = made.setdefault(id(buffer), memory)


def require_expected(model: torch.nn.Module, coming: Iterable[torch.Tensor]) -> None:
    """Refuses a buffer that has no numbers, and gets none of a checkpoint's, which brings those of `coming`."""
    brought = {id(buffer) for buffer in coming}
    for name, buffer in named_buffers(model):
        if buffer.is_meta and id(buffer) not in brought:
            refuse(
                "a model has a buffer on the meta device, whose numbers are computed, and not saved",
                where=name,
                needed="the model constructed in ballast.deferred(), by which ballast.wrap(optimizer, model) makes them",
            )


def begin_waiting(
    model: torch.nn.Module | None, trained: Iterable[torch.nn.Parameter], group: Group, waiting: Waiting
) -> bool:
    """Whether there is a parameter without memory. All ranks do this together."""
    known = _all_of(model, trained)
    for parameter in known:
        if waits(parameter) and parameter.ballast_window.is_left:
            parameter.ballast_window = waiting
    deferred = {id(parameter): parameter for parameter in known if parameter.is_meta}
    if not deferred:
        return False
    if model is None:
        refuse("parameters on the meta device were wrapped without a model", needed="ballast.wrap(optimizer, model)")
    if group.size > 1:
        agree_on_origins(group, [*deferred.values(), *(each for each in model.buffers() if each.is_meta)])
    make_buffers(model)
    for parameter in deferred.values():
        let_wait(parameter, waiting)
    return True


def defer_again(model: torch.nn.Module | None, trained: Iterable[torch.nn.Parameter], waiting: Waiting) -> None:
    """Undo begin_waiting(): parameters are on the meta device again, and remember how their values are made."""
    for parameter in _all_of(model, trained):
        if getattr(parameter, "ballast_window", None) is not waiting:
            continue
        origin = getattr(parameter, "ballast_origin", None)
        if isinstance(origin, torch.Tensor):
            del parameter.ballast_origin
        else:  # files, or nothing
            origin = torch.empty_like(parameter, device="meta")
        del parameter.ballast_window
        parameter.__class__ = torch.nn.Parameter
        swap_tensors_in_place(parameter, torch.nn.Parameter(origin, parameter.requires_grad))


def _all_of(model: torch.nn.Module | None, trained: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    of_model = [] if model is None else [*model.parameters()]
    return list({id(parameter): parameter for parameter in (*of_model, *trained)}.values())


def waits(parameter: torch.Tensor) -> bool:
    return isinstance(getattr(parameter, "ballast_window", None), Waiting)


def lacks_numbers(parameter: torch.Tensor) -> bool:
    return waits(parameter) and not hasattr(parameter, "ballast_origin")


def refuse_to_begin(name: str) -> NoReturn:
    refuse_order(
        "training was to begin with a parameter or a buffer on the meta device, which has no numbers",
        where=name,
        needed="ballast.load(model, files), ballast.load_checkpoint(), or the model constructed in ballast.deferred()",
    )


def let_wait(parameter: torch.nn.Parameter, waiting: Waiting) -> None:
    """It leaves the meta device, with its shape and without memory. It stays the same object."""
    origin = parameter.data
    stand_in = torch.nn.Parameter(nothing_like(parameter, device_of(parameter)), parameter.requires_grad)
    swap_tensors_in_place(parameter, stand_in)  # not swap_tensors: torch's RNNs have weak references to parameters
    parameter.ballast_window = waiting
    if history_of(origin) is not None and not hasattr(parameter, "ballast_origin"):
        parameter.ballast_origin = origin
    parameter.__class__ = Ungathered


def end_waiting(parameter: torch.nn.Parameter) -> None:
    """Its numbers are where they belong."""
    if waits(parameter):
        parameter.__class__ = torch.nn.Parameter
        del parameter.ballast_window
        parameter.__dict__.pop("ballast_origin", None)


def make_the_rest(model: torch.nn.Module, partitioned: Iterable[torch.nn.Parameter]) -> None:
    """In torch's memory: parameters that are not trained, where those are kept whole. Buffers have to be there."""
    others = {id(parameter) for parameter in partitioned}
    for name, buffer in named_buffers(model):
        if buffer.is_meta:
            refuse_to_begin(name)
    for name, parameter in named_parameters(model):
        if id(parameter) in others or not waits(parameter):
            continue
        if lacks_numbers(parameter):
            refuse_to_begin(name)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        FirstNumbers().read(parameter, 0, whole.numel(), whole.data_ptr())
        end_waiting(parameter)
        parameter.data = whole.to(parameter.device)


def device_of(deferred: torch.Tensor) -> torch.device:
    """Where its numbers are going to be: if nobody has said it, on the GPU that there is."""
    history = history_of(deferred)
    if history is not None:
        return history.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def agree_on_origins(group: Group, tensors: Iterable[torch.Tensor]) -> None:
    """All ranks make rank 0's numbers, together."""
    outside = numbers_from_outside(list(tensors))
    flat = [each.detach().cpu().contiguous().flatten().view(torch.uint8) for each in outside]
    everything = torch.cat([torch.empty(0, dtype=torch.uint8), *flat])
    bytes_of_ranks = group.all_reduce([len(everything) * (rank == group.rank) for rank in range(group.size)])
    if len(set(bytes_of_ranks)) > 1:
        refuse(
            "ranks have constructed a model in different ways",
            where=f"rank {group.rank}",
            needed="the same numbers in the same order, such as torch.manual_seed() with one seed on all ranks",
        )
    group._core.broadcast(address=everything.data_ptr(), bytes=everything.nbytes, root=0)
    for mine, agreed in zip(outside, everything.split([len(each) for each in flat])):
        mine.copy_(agreed.clone().view(mine.dtype).view(mine.shape))


def make_buffers(model: torch.nn.Module) -> None:
    """They are not partitioned: each rank has them whole."""
    made: dict[int, torch.Tensor] = {}  # by id of the deferred one, which several modules may share
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and history_of(buffer) is not None:
                module._buffers[name] = made.setdefault(id(buffer), numbers_of(buffer))


class FirstNumbers:
    """Of parameters, piece by piece. Those that have to be made are made one at a time, and last until the next one."""

    def __init__(self) -> None:
        self._parameter: torch.Tensor | None = None
        self._numbers = torch.empty(0)

    def read(self, parameter: torch.nn.Parameter, first: int, count: int, into: int) -> None:
        """Elements, to this address in host memory."""
        origin: Stored | Coming | torch.Tensor = getattr(parameter, "ballast_origin", parameter)  # if a tensor: a deferred one
        if isinstance(origin, Stored):
            origin.read(first, count, into)
            return
        if isinstance(origin, Coming):
            tensor_at(into, count, parameter.dtype).zero_()
            return
        if self._parameter is not parameter:
            self._numbers = torch.empty(0)  # the last one goes before the next one comes
            return_freed_memory()
            self._numbers = (numbers_of(origin) if history_of(origin) else origin.detach()).reshape(-1)
            self._parameter = parameter
        tensor_at(into, count, parameter.dtype).copy_(self._numbers[first : first + count])
