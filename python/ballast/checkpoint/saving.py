"""Save a checkpoint: every rank writes its local shards, and then rank 0 writes the manifest, which makes the checkpoint valid.

With `wait=False` each rank writes a snapshot in a thread, while the training continues. The thread of rank 0 then makes the
checkpoint the current one, as soon as the folder has the files of all ranks. These threads use no collective operations: those
belong to the thread that trains. A rank that fails leaves no index, so the checkpoint stays incomplete until all ranks agree
that it has failed (see PendingSave)."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ballast import _core
from ballast.checkpoint.custom_state import custom_state
from ballast.checkpoint.folder import (
    Commit,
    folder_name,
    lock,
    require_same_model,
)
from ballast.checkpoint.manifest import group_of, slices
from ballast.checkpoint.outer import folder_to_save, others_remover, outer_tensors
from ballast.checkpoint.runs import notice_for_run
from ballast.checkpoint.tensors import (
    SAVING,
    SLICE,
    TorchTensor,
    Writers,
    buffers_by_name,
    checkpoints_in,
    entry_of,
    entry_of_member,
    folders_of_all,
    frozen_state,
    know_checkpoints,
    moment_name,
    parameter_names,
    parameters_by_name,
    require_all_partitioned,
    steps_of,
)
from ballast.checks import fail, refuse
from ballast.errors import Error
from ballast.planning.hardware import available_memory, this_machine
from ballast.ranks import Agreement, Group, begin_exit, by_first_rank, from_all_ranks
from ballast.sizes import human_size
from ballast.torch.parameters.managed_parameter import plain, slice_on_host
from ballast.torch.parts import Ranges, full_ranges, part_of
from ballast.torch.training.partition import Partition
from ballast.torch.training.training import Training

log = logging.getLogger("ballast")
INDEX_BYTES = 128  # what a chunk's entry takes in a rank's index
SHORTEST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two looks at the folder

# Rank 0 waits so long for the files of other ranks when it exits, or when the group is broken: they write about as long as it
# did, and a rank that was killed writes none.
LEAST_PATIENCE = 30.0  # seconds


class SnapshotFiles(NamedTuple):
    """What a rank writes, and where."""

    files: _core.RankFiles
    snapshot: _core.Snapshot
    extra: bytes
    is_raw: bool  # `extra`: not an object of torch.save()


class BackgroundSave:
    """The thread of a rank that writes its files. Rank 0 has a commit, and makes the checkpoint the current one. The thread
    holds nothing of the training. The interpreter waits for it at exit."""

    def __init__(self, files: SnapshotFiles, commit: Commit | None):
        self.bytes = files.snapshot.bytes
        self._files: SnapshotFiles | None = files
        self._commit = commit
        self._error: Exception | None = None
        self._has_written = threading.Event()
        self._decision: bool | None = None  # whether the files of all ranks are complete; None: the ranks have not agreed yet
        self._is_decided = threading.Event()
        self._has_lost_ranks = False
        self._is_exiting = False
        self._thread = threading.Thread(target=self._run, name="ballast-save")

    # --- For the thread that trains ---

    def start(self) -> None:
        """Start to write. A failure is one of the save, and raise_error() raises it."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread for it
            self._error = error
            self._release_snapshot()
            self._has_written.set()

    @property
    def has_ended(self) -> bool:
        return self._has_written.is_set() and not self._thread.is_alive()

    def wait_for_own_files(self) -> None:
        """Return when this rank has written its files, or has failed to."""
        self._has_written.wait()

    def decide(self, complete: bool) -> None:
        """Tell this rank whether the files of all ranks are complete. On rank 0, return when the checkpoint is the current one,
        or has been removed."""
        self._decision = complete
        self._is_decided.set()
        if self._thread.ident is None:
            self._conclude(began=time.monotonic())
        else:
            self._thread.join()

    def lose_ranks(self) -> None:
        """Tell rank 0 that the ranks cannot decide any more. What they write still counts, if it is there soon."""
        self._has_lost_ranks = True

    def raise_error(self) -> None:
        """Raise the error of the thread, if there is one that was not raised yet."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # the error would keep this frame alive, and this frame it

    # --- The thread ---

    def _run(self) -> None:
        began = time.monotonic()
        with self._keeping_error():
            self._write()
        self._release_snapshot()
        self._has_written.set()
        self._conclude(began)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Keep an error for raise_error(), without the frames that it has passed: they hold the snapshot."""
        try:
            yield
        except Exception as error:
            unknown = None if isinstance(error, (Error, OSError)) else error
            log.error("saving a checkpoint failed: %s", error, exc_info=unknown)
            if self._error is None:
                self._error = error.with_traceback(None)

    def _release_snapshot(self) -> None:
        assert self._files is not None
        self._files.snapshot.release()
        self._files = None

    def _write(self) -> None:
        assert self._files is not None
        files, snapshot, extra, is_raw = self._files
        for number in range(snapshot.chunks):
            files.append_chunk(snapshot, number)
            self._look_for_exit()
        files.finish(extra, raw=is_raw)

    def _conclude(self, began: float) -> None:
        """Make the checkpoint the current one when it is complete, or remove it when all ranks know that it failed."""
        if self._commit is None:
            return
        with self._keeping_error():
            try:
                if self._becomes_complete(self._commit, patience=max(LEAST_PATIENCE, time.monotonic() - began)):
                    self._commit.make_current()
                    self._commit.directory.remove_stale()
            except BaseException:
                self._decision = False
                raise
            finally:
                if self._decision is False:
                    self._commit.directory.discard(self._commit.folder)
                self._commit.directory.release()

    def _becomes_complete(self, commit: Commit, patience: float) -> bool:
        pause, deadline = SHORTEST_PAUSE, None
        while self._decision is None:
            if self._error is None and commit.is_complete():
                return True
            if self._look_for_exit() or self._has_lost_ranks:
                if deadline is None:
                    deadline = time.monotonic() + patience
                    log.info("waiting for the files of other ranks in %s, for at most %.0f s", commit.folder, patience)
                if self._error is not None or time.monotonic() > deadline:
                    log.warning("%s stays incomplete: not all ranks have written their files", commit.folder)
                    return False
            self._is_decided.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self._decision

    def _look_for_exit(self) -> bool:
        """Return whether the interpreter exits. It waits for this thread before it tells other ranks about an uncaught
        exception, so this thread tells them."""
        if not self._is_exiting and not threading.main_thread().is_alive():
            self._is_exiting = True
            begin_exit()
        return self._is_exiting


class PendingSave:
    """A checkpoint that is being written while the training continues: `ballast.save(..., wait=False)` returns it.

    It becomes the current checkpoint as soon as all ranks have written their files, without another call."""

    def __init__(self, path: Path, group: Group, save: BackgroundSave, last_steps: Sequence[Callable[[], None]]):
        self._path = path
        self._group: Group | None = group  # None: all ranks know how the save has ended
        self._save = save
        self._last_steps = last_steps  # what this rank does when it is the current checkpoint
        self._failure: BaseException | None = None
        save.start()

    @property
    def path(self) -> Path:
        """The directory of the checkpoint, as it was given to `save()`."""
        return self._path

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of host memory for the copy of this rank's shards. It is kept for the next copy, but the kernel may take it
        as soon as this one is written."""
        return self._save.bytes

    @property
    def done(self) -> bool:
        """Whether this rank has written its files or has failed to; on rank 0, whether the checkpoint is the current one or has
        failed. Other ranks may still write."""
        return self._save.has_ended

    @property
    def is_settled(self) -> bool:
        """Whether wait() has returned or raised: all ranks know whether this is the current checkpoint."""
        return self._group is None

    def wait(self) -> None:
        """Return when this is the current checkpoint. All ranks call this together, between steps.

        Raise what went wrong, as `save(wait=True)` does: the error of this rank, or B3301 with the ranks that failed. The
        training is not affected, and the checkpoint before stays the current one.
        """
        if self._group is not None:
            self._save.wait_for_own_files()
            group, self._group = self._group, None
            try:
                self._settle(Agreement(group, SAVING))
            except BaseException as error:
                self._failure = copy.copy(error)  # the copy has no frames
                raise
        elif self._failure is not None:
            raise copy.copy(self._failure)

    def _settle(self, agreement: Agreement) -> None:
        with agreement.attempt():
            self._save.raise_error()
        try:
            agreement.settle()
        except Error:
            if agreement.has_failed:
                self._save.decide(complete=False)
            else:  # a rank is lost, and its files may be complete
                self._save.lose_ranks()
            raise
        with agreement.settled():
            self._save.decide(complete=True)
            self._save.raise_error()
        for do in self._last_steps:
            do()


def save_now(directory: Path, model: torch.nn.Module, accesses: Sequence[Training], extra: Any) -> None:
    """Save, and return when the checkpoint is the current one. All ranks call this together."""
    last_steps = last_steps_of(directory, accesses)
    Saving(folder_to_save(directory, accesses[0]), model, accesses, extra).run()
    for do in last_steps:
        do()


def save_in_background(directory: Path, model: torch.nn.Module, accesses: Sequence[Training], extra: Any) -> PendingSave:
    """Copy what is saved, and start to write it. All ranks call this together."""
    path = directory.absolute()  # the program may go to another folder meanwhile
    copied = Saving(folder_to_save(path, accesses[0]), model, accesses, extra).copy()
    pending = PendingSave(path, accesses[0].ranks.saving_group, copied, last_steps_of(path, accesses))
    for access in accesses:
        access.pending = pending
    return pending


def last_steps_of(directory: Path, accesses: Sequence[Training]) -> list[Callable[[], None]]:
    """Return what each rank does when the directory has the checkpoint of this step. It holds nothing of the training."""
    return [*(notice_for_run(access, directory) for access in accesses), others_remover(directory, accesses[0])]


Sink = _core.RankFiles | _core.Snapshot  # takes the chunks of a rank, one after the other
Visit = Callable[[_core.StatePart, str, tuple[int, int]], None]


class Saving:
    """Saves one rank's part of one checkpoint. All ranks do this together."""

    def __init__(self, directory: Path, model: torch.nn.Module, accesses: Sequence[Training], extra: Any):
        self._directory = directory
        self._accesses = accesses
        self._group = accesses[0].ranks.saving_group
        self._parts = [SavingPart(access) for access in accesses]
        self._names = parameter_names(model, accesses)
        self._agreement = Agreement(self._group, SAVING)
        with self._agreement.settled():
            for part in self._parts:
                part.check(self._names)
            self._extra, self._is_raw = packed(extra), isinstance(extra, bytes)
        partitions = [part.partition for part in self._parts]
        self._torch_tensors = list(torch_tensors(model, accesses, partitions))
        for access, partition in zip(accesses, partitions):
            self._torch_tensors += outer_tensors(access, partition, self._names)
        self._entries: dict[str, _core.SavedTensor] = {}
        for part in self._parts:
            part.look()
            self._entries.update(part.entries)
        self._entries.update((held.name, entry_of(held)) for held in self._torch_tensors)
        self._locked: _core.CheckpointDirectory | None = None  # rank 0 locks the directory for all ranks; others have None

    def run(self) -> None:
        """Save, and return when the checkpoint is the current one."""
        with self._new_folder(waits=True) as folder:
            files = self._open_files(self._directory / folder)
            self._give_to(files)
            with self._agreement.settled():
                if self._agreement.error is None:
                    files.finish(self._extra, raw=self._is_raw)
            with self._agreement.settled():
                if (commit := self._commit(folder)) is not None:
                    commit.make_current()
            if self._locked is not None:
                self._locked.remove_stale()
        if self._locked is not None:
            self._locked.release()

    def copy(self) -> BackgroundSave:
        """Copy what this rank saves to the host's memory. Return what writes it, and makes the checkpoint the current one."""
        with self._new_folder(waits=False) as folder:
            files = self._open_files(self._directory / folder)
            what = SnapshotFiles(files, self._snapshot(), self._extra, self._is_raw)
            return BackgroundSave(what, self._commit(folder))

    @contextmanager
    def _new_folder(self, waits: bool) -> Iterator[str]:
        """Make a folder for this saving, and remove it if the block fails."""
        folder = self._name_folder(waits)
        try:
            self._begin(folder)
            yield folder
        except BaseException:
            if self._locked is not None:
                try:
                    self._locked.discard(folder)
                finally:
                    self._locked.release()
            raise

    def _name_folder(self, waits: bool) -> str:
        """Return the same name on all ranks, and another one in every saving."""
        mine = int.from_bytes(os.urandom(4), "little") if self._group.rank == 0 else 0
        token, waiting = self._group.all_reduce([mine, int(waits)])
        if 0 < waiting < self._group.size:
            refuse("cannot save a checkpoint: some ranks wait for it, and others do not", needed="the same wait= on all ranks")
        return folder_name(max(access.steps for access in self._accesses), token)

    def _begin(self, folder: str) -> None:
        by_first_rank(self._group, SAVING, lambda: self._enter(folder))
        with self._agreement.settled():
            if self._locked is not None:
                self._locked.create(folder)
        sizes = self._sizes()  # with records that are cloned: a drive without their space would refuse the next steps
        [needed] = self._group.all_reduce([sum(sizes) + INDEX_BYTES * len(sizes) + len(self._extra)])
        with self._agreement.settled():
            require_shared(self._directory / folder)
            _core.require_space(str(self._directory), needed)

    def _enter(self, folder: str) -> None:
        """Lock the directory, and refuse to replace the checkpoint of another training."""
        self._locked = lock(self._directory)
        require_same_model(self._directory, set(self._names.values()))
        known = checkpoints_in(self._accesses, self._directory)
        there = self._locked.require_same_history(known, folders_of_all(self._accesses))
        # If this saving fails, either checkpoint may be the current one. The next saving may replace both.
        know_checkpoints(self._accesses, self._directory, known | {folder, there})

    def _commit(self, folder: str) -> Commit | None:
        """Return what makes the folder the current checkpoint; nothing on other ranks than 0. It has a copy of all that it
        needs."""
        if self._locked is None:
            return None
        optimizers = [part.saved() for part in self._parts]
        saved = _core.SavedCheckpoint(folder=folder, ranks=self._group.size, optimizers=optimizers, tensors=self._entries)
        return Commit(self._directory, self._locked, saved)

    # --- The part of this rank ---

    def _local_slices(self) -> Iterator[tuple[TorchTensor, int, int, int]]:
        """Yield the slices of torch's tensors that this rank writes: the first element, their number, and the first one's place
        in the full tensor."""
        elements, group = 0, self._accesses[0].group  # small tensors go to one rank together, so that few files have them
        for held in self._torch_tensors:
            for first, count in slices(held.tensor.numel(), SLICE):
                is_turn = self._group.rank == 0
                if held.writers is Writers.in_turns:
                    is_turn = elements // SLICE % group.size == group.rank
                    elements += count
                if held.is_mine and (held.writers is Writers.each or is_turn):
                    for there, some, at in full_ranges(held.part, held.begin + first, count):
                        yield held, first + at, some, there

    def _sizes(self) -> list[int]:
        """Return the bytes of each chunk that this rank writes, in their order."""
        sizes = [size for part in self._parts for size in part.sizes()]
        return sizes + [held.tensor.element_size() * count for held, _, count, _ in self._local_slices()]

    def _give_to(self, sink: Sink) -> None:
        """Read what this rank saves. All ranks call this together; a rank with an error, which the next agreement finds, reads
        on with the others."""

        def append(part: _core.StatePart, name: str, elements: tuple[int, int]) -> None:
            with self._agreement.attempt():
                if self._agreement.error is None:
                    sink.append(part, name, elements)

        for saving in self._parts:
            saving.visit(append)
        with self._agreement.attempt():
            if self._agreement.error is None:
                read, tensor = None, torch.empty(0, device="cpu")
                for held, first, count, there in self._local_slices():
                    if held is not read:
                        read, tensor = held, held.read()
                    values = slice_on_host(tensor, first, count)
                    sink.append_memory(values.data_ptr(), values.nbytes, held.name, (there, count))

    def _open_files(self, folder: Path) -> _core.RankFiles:
        """Make this rank's files, with the records of runs, as far as the file system clones them."""
        with self._agreement.settled():
            files = _core.RankFiles(str(folder), self._group.rank)
        for part in self._parts:
            if part.partition.keeps_run:
                part.clone(files, self._agreement)
        return files

    def _snapshot(self) -> _core.Snapshot:
        """Copy what this rank saves, into the memory of the last copy if that is still there."""
        sizes, keeper = self._sizes(), self._accesses[0]
        last, keeper.snapshot = keeper.snapshot, None
        if last is not None:  # it is freed unless the machine has memory for another snapshot on each rank, besides those
            has_room = available_memory(this_machine()) > self._group.size * last.bytes
            last = last if last.is_free_for(sizes) and has_room else None
        require_memory(self._group, sum(sizes))
        with self._agreement.settled():
            snapshot = last or _core.Snapshot(sizes, threads=keeper.options.tuning.threads)
        self._give_to(snapshot)
        self._agreement.settle()
        keeper.snapshot = snapshot
        return snapshot


def require_shared(folder: Path) -> None:
    if not folder.is_dir():
        refuse(
            "cannot save a checkpoint: not all ranks see the directory",
            where=str(folder),
            needed="a directory that all machines share",
        )


def packed(extra: Any) -> bytes:
    """Serialize `extra`, and refuse values that cannot be read again without running code that the file names. Bytes stay as
    they are: a training in C++ reads them as its note."""
    if isinstance(extra, bytes):
        return extra
    buffer, what = io.BytesIO(), "torch.save() cannot write it"
    try:
        torch.save(extra, buffer)
        what = "torch.load(weights_only=True) cannot read it"
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        refuse(
            f"cannot save extra: {what}",
            where=(str(error).splitlines() or [type(error).__name__])[0],
            needed="tensors, numbers, text, None, and lists, tuples and dictionaries of them",
            remedy="Save a state_dict() instead of an object.",
        )
    return buffer.getvalue()


def _key(part: _core.StatePart) -> tuple[int, int, int]:
    return part.unit, part.tensor, part.first


class SavingPart:
    """The shards of one optimizer. All ranks call all methods together, except check()."""

    def __init__(self, access: Training):
        self.access = access
        self.partition = access.partition_now()
        self.partition.require_not_updated("cannot save the model")
        self._names: Mapping[int, str] = {}
        self._groups: list[_core.SavedGroup] = []
        self.entries: dict[str, _core.SavedTensor] = {}
        self._local: dict[tuple[int, int, int], _core.StatePart] = {}

    def check(self, names: Mapping[int, str]) -> None:
        """Refuse what cannot be saved on this rank. `names` are those of all parameters."""
        self.access.require_not_gathered("cannot save a checkpoint")
        self.partition.memory.require_not_cast()
        require_all_partitioned(self.access, names)
        self._names = names
        self._groups = groups_of(self.access.optimizer, names)

    def look(self) -> None:
        members = self.partition.all_members
        self.entries = {self._name_of(each.parameter): entry_of_member(each, self.partition, self.access) for each in members}
        shards = enumerate(self.partition.core.local_shards())
        self._local = {_key(part): part for number, part in shards if self._writes(number, part)}

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def _writes(self, number: int, part: _core.StatePart) -> bool:
        """Return whether this rank writes this shard. In stage 0 all ranks keep all shards, so they take turns."""
        group = self.access.group
        is_turn = self.access.options.stage != 0 or number % group.size == group.rank
        return is_turn and self.access.ranks.saves(self.partition.member_of(part).parameter)

    def _ranges(self, part: _core.StatePart) -> Ranges:
        member = self.partition.member_of(part)
        return full_ranges(part_of(member.parameter), *member.parameter_range(part.first, part.count))

    def sizes(self) -> list[int]:
        sizes = []
        for part in self._local.values():
            entry = self.entries[self._name_of(self.partition.member_of(part).parameter)]
            sizes += [entry.chunk_bytes(count) for _, count, _ in self._ranges(part)]
        return sizes

    def visit(self, visit: Visit) -> None:
        """Read the shards that this rank writes, each with its name and the range of its elements."""

        def look(part: _core.StatePart) -> None:
            member = self.partition.member_of(part)
            for first, count, at in self._ranges(part) if _key(part) in self._local else ():
                elements = part if count == part.count else part.elements(at * member.width, count * member.width)
                visit(elements, self._name_of(member.parameter), (first, count))

        self.partition.visit_shards(look, lambda parts, record: any(_key(part) in self._local for part, _ in parts))

    def clone(self, files: _core.RankFiles, agreement: Agreement) -> None:
        """Clone the records of a run that hold only shards which this rank writes. The other shards are left to visit()."""

        def clone(parts: Sequence[tuple[_core.StatePart, int]], record: _core.OpenRecord | None) -> bool:
            with agreement.attempt():
                if record is not None and all(_key(part) in self._local for part, _ in parts) and files.clone(record):
                    for part, in_record in parts:
                        name = self._name_of(self.partition.member_of(part).parameter)
                        for first, count, at in self._ranges(self._local.pop(_key(part))):
                            files.append_cloned(name, (first, count), in_record + at)
            return False

        self.partition.visit_shards(lambda part: None, clone)

    def saved(self) -> _core.SavedOptimizer:
        access = self.access
        return _core.SavedOptimizer(
            step=access.steps,
            skipped=access.skipped,
            optimizer=type(access.optimizer).__name__,
            moments={moment.name: name for moment, name in access.names_of_moments()},
            groups=self._groups,
            own_step=access.has_custom_step,
            outer_identity="" if access.outer is None else access.outer.identity,
        )


def groups_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[_core.SavedGroup]:
    """Return the parameter groups, with names instead of parameters."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        numbers = {key: value.item() for key, value in group.items() if isinstance(value, torch.Tensor) and value.numel() == 1}
        options = {key: numbers.get(key, value) for key, value in group.items() if key != "params"}
        for key, value in options.items():
            where = f'param_groups[{number}]["{key}"]'
            needed = "numbers, text, None, lists of them, and dictionaries of them with text as keys"
            try:
                read = json.loads(json.dumps(value))
            except (TypeError, ValueError) as error:
                refuse(f"cannot save a parameter group: {error}", where=where, needed=needed)
            if not _is_read_as(value, read):
                refuse(f"cannot save a parameter group: {value!r} would be read as {read!r}", where=where, needed=needed)
        groups.append(group_of([names[id(parameter)] for parameter in group["params"]], options))
    return groups


def _is_read_as(value: Any, read: Any) -> bool:
    """Return whether loading gives the value back: it makes a tuple of a list where the option is one."""
    is_nan = value != value
    return bool(is_nan or (list(value) if isinstance(value, tuple) else value) == read)


def torch_tensors(
    model: torch.nn.Module, accesses: Sequence[Training], partitions: Sequence[Partition]
) -> Iterator[TorchTensor]:
    """Yield the tensors that torch holds, in the same order on all ranks."""
    names = parameter_names(model, accesses)
    partitioned = {id(member.parameter) for partition in partitions for member in partition.all_members}
    for name, parameter in parameters_by_name(model, accesses).items():
        if id(parameter) not in partitioned:
            steps = max(steps_of(each, parameter) for each in accesses)
            yield TorchTensor(name, "frozen", plain(parameter), steps=steps).of(accesses[0], parameter)
    for access, partition in zip(accesses, partitions):
        if access.has_custom_step:
            yield from custom_state(access, partition, names)
        else:
            yield from frozen_moments(access, names)
    for name, buffer in buffers_by_name(model).items():
        yield TorchTensor(name, "buffer", buffer.detach(), Writers.first)


def frozen_moments(access: Training, names: dict[int, str]) -> Iterator[TorchTensor]:
    for parameter, values in frozen_state(access):
        for moment, value in values.items():
            if moment != "step":
                yield TorchTensor(moment_name(names[id(parameter)], moment), "moment", value).of(access, parameter)


def require_memory(group: Group, needed: int) -> None:
    """Raise B2001 on all ranks if a machine has too little memory for the snapshots of its ranks. `needed` is in bytes, of this
    rank. All ranks call this together."""
    everywhere = from_all_ranks(group, (socket.gethostname(), needed, available_memory(this_machine())))
    for machine in dict.fromkeys(name for name, _, _ in everywhere):
        ranks = [rank for rank, (name, _, _) in enumerate(everywhere) if name == machine]
        total = sum(everywhere[rank][1] for rank in ranks)
        available = min(everywhere[rank][2] for rank in ranks)
        if total > available:
            fail(
                "host_memory",
                "cannot save with wait=False: the host has too little memory for a copy of the state",
                where=f"{machine}, rank {', '.join(map(str, ranks))}",
                needed=human_size(total),
                available=human_size(available),
                remedy="Save with wait=True, which needs no copy. An existing checkpoint stays as it is.",
            )
