"""Hand the weights of a model to an inference engine in buckets of one size: over a group of torch.distributed, or in memory
that processes of a machine share. Names are those of the model's files on the Hub, and adapters are merged."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ballast.checkpoint.full_model import begin_owners, gather_to_read, group_of, grouped_by_unit, visit_units
from ballast.checkpoint.hub_names import HubNames, MergedAdapters
from ballast.checks import fail, refuse
from ballast.ranks import Agreement
from ballast.sizes import human_size
from ballast.torch.gpu import GPU
from ballast.torch.parameters.managed_parameter import plain

WHAT = "handing over weights"
SHARED = "/dev/shm"  # files here are in memory
ALIGNMENT = 16  # bytes: views of any format begin at multiples of it
ACCEPTED = b"accepted\n"
Entry = tuple[
    str, str, list[int], int, int, int
]  # name, format, shape; first byte in the tensor, bytes, first byte in the bucket


class GroupChannel:
    """Broadcasts buckets from the first rank of a group of torch.distributed."""

    def __init__(self, group: Any, size: int):
        self._group, self._source = group, torch.distributed.get_global_rank(group, 0)
        if torch.distributed.get_rank() != self._source:
            refuse(
                "cannot hand over weights: this rank, which has them, is not the first one of the group",
                where=f"rank {torch.distributed.get_rank()}",
                needed=f"a group whose first rank is the first one that trains the model, and not rank {self._source}",
            )
        self.memory = _memory_for(group, size)  # of one bucket
        torch.distributed.broadcast_object_list([size], src=self._source, group=group)

    def send(self, entries: list[Entry]) -> None:
        """Send the bucket that is in the memory, and return when that may be written to. Without entries, it is the end."""
        torch.distributed.broadcast_object_list([entries], src=self._source, group=self._group)
        if entries:
            torch.distributed.broadcast(self.memory, src=self._source, group=self._group)

    def close(self) -> None:
        """Do nothing: the caller has made the group."""


def _memory_for(group: Any, size: int) -> torch.Tensor:
    """Return memory on the device of the group's backend."""
    return torch.empty(size, dtype=torch.uint8, device=GPU if "nccl" in torch.distributed.get_backend(group) else "cpu")


class SharedChannel:
    """Buckets in shared memory for another process of this machine. A socket at the given path carries names and shapes."""

    def __init__(self, path: str, size: int, timeout: float):
        self._path, self._connection = path, _connected(path, timeout)
        self._lines = self._connection.makefile("rwb")
        number, name = tempfile.mkstemp(prefix="ballast-", dir=SHARED)
        try:
            _allocate(number, size)
            self.memory = torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
            self._tell([name, size])
        except BaseException:
            self.close()  # which tells the other process
            raise
        finally:
            os.close(number)
            os.unlink(name)  # both processes have mapped it

    def send(self, entries: list[Entry]) -> None:
        self._tell(entries)

    def _tell(self, what: object) -> None:
        try:
            self._lines.write(json.dumps(what).encode() + b"\n")
            self._lines.flush()
            is_accepted = self._lines.readline() == ACCEPTED
        except OSError:
            is_accepted = False
        if not is_accepted:
            fail("peer_failed", "cannot hand over weights: the process that receives them has ended", where=self._path)

    def close(self) -> None:
        with suppress(OSError):
            self._lines.close()
        self._connection.close()


def _allocate(number: int, size: int) -> None:
    """Make a file in shared memory this large. A sparse file would end the process where memory lacks as it is written."""
    try:
        os.posix_fallocate(number, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.ftruncate(number, 0)  # frees what was allocated, so that the space below is right
        found = os.statvfs(SHARED)
        fail(
            "host_memory",
            "cannot hand over weights: a bucket does not fit into shared memory",
            where=SHARED,
            needed=human_size(size),
            available=human_size(found.f_bavail * found.f_frsize),
            remedy="Choose a smaller bucket=, or give the container more shared memory: docker --shm-size.",
        )


def _connected(path: str, timeout: float) -> socket.socket:
    deadline, connection = time.monotonic() + timeout, socket.socket(socket.AF_UNIX)
    while True:
        try:
            connection.connect(path)
            return connection
        except OSError as error:
            if time.monotonic() > deadline or error.errno is None:  # no socket can be at such a path
                connection.close()
                refuse(
                    "cannot hand over weights: no process receives them",
                    where=path,
                    needed=f"ballast.receive_weights({path!r}) in another process of this machine, within {timeout:g} s",
                    available=str(error),
                )
            time.sleep(0.01)


class Buckets:
    """Fills buckets with tensors, one after the other. A tensor may be in several."""

    def __init__(self, channel: GroupChannel | SharedChannel):
        self._channel, self._used = channel, 0
        self._entries: list[Entry] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        values, size = tensor.detach().contiguous().view(-1).view(torch.uint8), self._channel.memory.numel()
        word, shape, done = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), 0
        while done < len(values) or not len(values):
            if self._used >= size:
                self.flush()
            count = min(size - self._used, len(values) - done)
            self._channel.memory[self._used : self._used + count].copy_(values[done : done + count])
            self._entries.append((name, word, shape, done, count, self._used))
            done, self._used = done + count, -(-(self._used + count) // ALIGNMENT) * ALIGNMENT
            if not len(values):
                return

    def flush(self) -> None:
        if self._entries:
            self._channel.send(self._entries)
        self._entries, self._used = [], 0

    def finish(self) -> None:
        self.flush()
        self._channel.send([])


def hand_over(model: torch.nn.Module, to: Any, size: int, timeout: float) -> None:
    """Send all weights to a group, or to the process at a path. All ranks call this together, and the first one sends."""
    merged = MergedAdapters(model)
    begin_owners(model.parameters())
    group = group_of(model.parameters())
    if group is None:
        return
    agreement = Agreement(group, WHAT)
    channel: GroupChannel | SharedChannel | None = None
    try:
        with agreement.settled():
            if group.rank == 0:
                channel = (
                    SharedChannel(os.fspath(to), size, timeout)
                    if isinstance(to, (str, os.PathLike))
                    else GroupChannel(to, size)
                )
                buckets = Buckets(channel)
        names = HubNames(merged.model, merged.tensors)

        def add(own: str, tensor: torch.Tensor) -> None:
            for name, values in names.take(own, merged.value(own, tensor)):
                buckets.add(name, values)

        visit_units(merged.tensors, add, WHAT, on_all=False, also=merged.adapters, group=group)
        with agreement.settled():
            if group.rank == 0:
                buckets.finish()
    finally:
        if channel is not None:
            channel.close()


def full_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full parameters with merged adapters, under the names of the Hub. Each is valid until the next one. All ranks
    iterate together."""
    merged = MergedAdapters(model)
    tensors = {name: each for name, each in merged.tensors.items() if isinstance(each, torch.nn.Parameter)}
    begin_owners(model.parameters())
    names = HubNames(merged.model, tensors)
    for unit in grouped_by_unit(tensors):
        adapters = [each for tensor in unit.values() for each in merged.adapters.get(id(tensor), ())]
        with gather_to_read([*unit.values(), *adapters]):
            for own, tensor in unit.items():
                yield from names.take(own, merged.value(own, plain(tensor)))


# --- In the process of the engine ---


def receive(source: Any, timeout: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights as they arrive."""
    is_path = isinstance(source, (str, os.PathLike))
    buckets = _shared_buckets(os.fspath(source), timeout) if is_path else _broadcast_buckets(source)
    parts: dict[str, torch.Tensor] = {}
    for memory, entries in buckets:
        for name, word, shape, begin, count, at in entries:
            dtype, elements = getattr(torch, word), torch.Size(shape).numel()
            size = elements * dtype.itemsize
            values = memory[at : at + count]
            if count < size:
                parts.setdefault(name, torch.empty(size, dtype=torch.uint8, device=memory.device))[begin : begin + count] = (
                    values
                )
                values = parts[name]
            if begin + count == size:
                parts.pop(name, None)
                yield name, values.view(dtype).view(shape)


def _broadcast_buckets(group: Any) -> Iterator[tuple[torch.Tensor, list[Entry]]]:
    source = torch.distributed.get_global_rank(group, 0)

    def read() -> Any:
        found: list[Any] = [None]
        torch.distributed.broadcast_object_list(found, src=source, group=group)
        return found[0]

    memory = _memory_for(group, read())
    while entries := read():
        torch.distributed.broadcast(memory, src=source, group=group)
        yield memory, entries


def _shared_buckets(path: str, timeout: float) -> Iterator[tuple[torch.Tensor, list[Entry]]]:
    with socket.socket(socket.AF_UNIX) as listener:
        made = _listen(listener, path)
        listener.settimeout(timeout)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            taken = "" if _is_socket(path, made) else "another receiver, or another program, has taken the path"
            what = f"cannot receive weights: no process has handed any over within {timeout:g} s"
            fail("peer_failed", what, where=path, available=taken)
        finally:
            if _is_socket(path, made):
                os.unlink(path)
    connection.settimeout(None)
    try:
        with connection, connection.makefile("rwb") as lines:
            name, size = _read_line(lines)
            memory = _mapped(name, size)
            entries: Any = None
            while entries != []:
                lines.write(ACCEPTED)
                lines.flush()
                entries = _read_line(lines)
                yield memory, entries
            lines.write(ACCEPTED)
    except OSError:
        fail("peer_failed", "cannot receive weights: the process that hands them over has ended", where=path)


def _listen(listener: socket.socket, path: str) -> int:
    """Make a socket at the path, and return its number in the file system. One that an earlier process left is replaced."""
    if os.path.lexists(path) and not _is_socket(path):
        refuse("cannot receive weights: another file is at the path", where=path, needed="a path without a file")
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        listener.listen(1)
        return os.lstat(path).st_ino
    except OSError as error:
        refuse(
            "cannot receive weights: no socket can be made at the path",
            where=path,
            needed="a path of at most 107 bytes, in a folder that exists and that this process may write to",
            available=str(error),
        )


def _is_socket(path: str, number: int | None = None) -> bool:
    """Return whether a socket is at the path, with this number in the file system if one is given."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and number in (None, found.st_ino)


def _mapped(name: str, size: int) -> torch.Tensor:
    if not os.path.exists(name):
        refuse(
            "cannot receive weights: this process does not see the shared memory of the one that hands them over",
            where=name,
            needed=f"both processes with the same {SHARED}: containers share it with docker --ipc",
        )
    return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)


def _read_line(lines: Any) -> Any:
    line = lines.readline()
    if not line.endswith(b"\n"):
        raise ConnectionResetError
    return json.loads(line)
