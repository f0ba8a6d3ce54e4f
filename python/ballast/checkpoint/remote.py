"""Put a checkpoint to an object store, or to any other address of fsspec, and get it from there. As on a drive, the manifest
comes last and names the files, so a reader finds the checkpoint before or the new one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn, TypeVar

from ballast import _core
from ballast.checkpoint.folder import lock
from ballast.checkpoint.kinds import MANIFEST
from ballast.checkpoint.manifest import FOLDER, Checkpoint, LocalCheckpoint, Place, problems_in, rank_file
from ballast.checkpoint.tensors import LOADING
from ballast.checks import fail, refuse
from ballast.ranks import Agreement, by_first_rank
from ballast.torch.training.training import Training

log = logging.getLogger("ballast")
ATTEMPTS = 5
FIRST_PAUSE = 0.1  # seconds before the second attempt; each pause is twice as long as the one before
KINDS = ("data", "extra", "json")  # a rank's files
BLOCK = 4096
GAP = 1 << 16  # ranges that are at most so many bytes apart are read as one
MOST_OF_A_CALL = 16 << 20  # bytes
CALLS_AT_ONCE = 8
Result = TypeVar("Result")


@dataclass(frozen=True)
class Moved:
    """A checkpoint that was put or got."""

    where: str
    step: int
    files: int
    bytes: int


class Remote:
    """A folder of fsspec. Each call is tried several times, because stores refuse some."""

    def __init__(self, address: str):
        import fsspec  # torch brings it

        self.address = address.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            refuse(f"cannot use the address {address}: {error}", needed="one that fsspec knows, such as s3://bucket/folder")
        self._root: str = root.rstrip("/")
        if hasattr(self._files, "auto_mkdir"):  # folders of a drive; stores have none
            self._files.auto_mkdir = True

    def put(self, path: Path, name: str) -> int:
        """Write a file, and return its bytes."""
        self._put(name, lambda: self._files.put_file(str(path), self._at(name)))
        needed, found = path.stat().st_size, self.size(name)
        if found != needed:
            fail(
                "file_call",
                "cannot put a file: a part of it is missing",
                where=f"{self.address}/{name}",
                needed=f"{needed} bytes",
            )
        return needed

    def size(self, name: str) -> int:
        return int(self._try(f"look at {name} of", lambda: self._files.info(self._at(name)))["size"])

    def put_text(self, name: str, text: bytes) -> None:
        self._put(name, lambda: self._files.pipe_file(self._at(name), text))

    def get(self, name: str, path: Path) -> None:
        self._try(f"get {name} from", lambda: self._files.get_file(self._at(name), str(path)))

    def get_range(self, name: str, begin: int, end: int, path: Path) -> None:
        """Get some bytes of a file to their place in a file here."""
        content = self._try(f"get {name} from", lambda: self._files.cat_file(self._at(name), start=begin, end=end))
        if len(content) != end - begin:
            where = f"{self.address}/{name}"
            fail("bad_record", "cannot get a checkpoint: a file is cut off", where=where, needed=f"{end} bytes")
        with open(path, "r+b") as file:
            file.seek(begin)
            file.write(content)

    def read(self, name: str) -> bytes:
        return bytes(self._try(f"get {name} from", lambda: self._files.cat_file(self._at(name))))

    def text(self, name: str) -> bytes | None:
        """Return a file; None if it is not there."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def folders(self) -> list[str]:
        try:
            found = self._try("list", lambda: self._files.ls(self._root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in found if each["type"] == "directory")

    def remove(self, name: str) -> None:
        try:
            self._files.rm(self._at(name), recursive=True)
        except Exception as error:  # what stays takes room, and nothing else
            log.warning("cannot remove %s/%s, which no checkpoint needs: %s", self.address, name, error)

    @contextmanager
    def naming_missing(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            fail("file_call", f"cannot get a checkpoint: {error} is missing", where=self.address)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, name: str, call: Callable[[], None]) -> None:
        try:
            self._try(f"put {name} to", call)
        except FileNotFoundError as error:  # a bucket is missing
            self._fail(f"put {name} to", error)

    def _try(self, what: str, call: Callable[[], Result]) -> Result:
        self._files.invalidate_cache()
        for attempt in range(ATTEMPTS):
            try:
                return call()
            except FileNotFoundError:
                raise
            except PermissionError as error:
                self._fail(what, error)
            except Exception as error:  # stores have errors of their own
                if attempt == ATTEMPTS - 1:
                    self._fail(what, error, f", after {ATTEMPTS} attempts")
                log.info("%s %s failed, and is tried again: %s", what, self.address, error)
            time.sleep(FIRST_PAUSE * 2**attempt)
        raise AssertionError(what)

    def _fail(self, what: str, error: Exception, after: str = "") -> NoReturn:
        problem = f"cannot {what} the address{after}: {error}"
        fail("file_call", problem, where=self.address, remedy="Check the address, its credentials and the network.")


def push(directory: Path, address: str) -> Moved:
    """Put the current checkpoint of a directory to an address, where it replaces another one of ours."""
    remote, place = Remote(address), LocalCheckpoint(directory)

    def put(text: bytes) -> Moved:
        checkpoint = place.parse(text)
        sizes = [remote.put(directory / name, name) for name in _files_of(checkpoint)]
        remote.put_text(MANIFEST, text)
        for name in remote.folders():
            if FOLDER.fullmatch(name) and name != checkpoint.folder:
                remote.remove(name)
        return Moved(remote.address, checkpoint.step, len(sizes) + 1, sum(sizes) + len(text))

    return place.current(put)


def pull(address: str, directory: Path) -> Moved:
    """Get a checkpoint into a directory, where it becomes the current one when all of its bytes have their checksums: that of
    the address, or the newest of those in folders right below."""
    remote = newest(Remote(address))

    def get(text: bytes) -> Moved:
        with remote.naming_missing():
            return _pull(remote, text, _core.parse_manifest(text, remote.address), directory)

    return RemoteCheckpoint(remote).current(get)


def _pull(remote: Remote, text: bytes, checkpoint: _core.SavedCheckpoint, directory: Path) -> Moved:
    place = lock(directory)
    try:
        place.create(checkpoint.folder)
        for name in _files_of(checkpoint):
            remote.get(name, directory / name)
        if problem := next(problems_in(LocalCheckpoint(directory).parse(text)), ""):
            fail("bad_record", f"cannot get a checkpoint: {problem}", where=remote.address)
        sizes = [(directory / name).stat().st_size for name in _files_of(checkpoint)]
        place.make_current(checkpoint.folder, text)
        place.remove_stale()
    except BaseException:
        place.discard(checkpoint.folder)
        raise
    finally:
        place.release()
    return Moved(str(directory), checkpoint.step, len(sizes) + 1, sum(sizes) + len(text))


class RemoteCheckpoint(Place):
    """The checkpoint at an address. This process gets the parts that it reads, into files that go with this object."""

    path: str

    def __init__(self, remote: Remote):
        self._remote, self.path = remote, remote.address
        self._copy = TemporaryDirectory(prefix="ballast-")
        self._got: set[tuple[int, int]] = set()  # the file and the offset of pieces
        self._made: set[int] = set()  # files

    def read_text(self) -> bytes:
        text = self._remote.text(MANIFEST)
        return _refuse_without(self._remote) if text is None else text

    def read_indexes(self, text: bytes, rank: int, ranks: int) -> list[bytes]:
        saved = _core.parse_manifest(text, self.path)
        with self._remote.naming_missing():
            numbers = range(rank, saved.ranks, ranks)
            return [self._remote.read(f"{saved.folder}/{rank_file(number, 'json')}") for number in numbers]

    def parse(self, text: bytes, indexes: Sequence[bytes], rank: int) -> Checkpoint:
        folder = Path(self._copy.name)
        self._got.clear()
        self._made.clear()
        checkpoint = LocalCheckpoint(folder).parse(text, indexes)
        (folder / checkpoint.folder).mkdir(exist_ok=True)
        extra = f"{checkpoint.folder}/{rank_file(rank % checkpoint.ranks, 'extra')}"
        with self._remote.naming_missing():
            self._remote.get(extra, folder / extra)
        ends = [0] * checkpoint.ranks
        for tensor in checkpoint.tensors.values():
            for piece in tensor.pieces:
                ends[piece.file] = max(ends[piece.file], piece.offset + piece.bytes)
        checkpoint.make_files = partial(self._make_files, checkpoint.files, ends)
        checkpoint.fetch = partial(self._fetch, checkpoint.folder, checkpoint.files, checkpoint.make_files)
        return checkpoint

    def _make_files(self, files: Sequence[str], ends: Sequence[int], numbers: Iterable[int]) -> None:
        """Make a file of the right size for each of these at the address. Raise B3202 if one of those is cut off."""
        for number in set(numbers) - self._made:
            path, end = Path(files[number]), ends[number]
            name = f"{path.parent.name}/{path.name}"
            with self._remote.naming_missing():
                found = self._remote.size(name)
            if found < end:
                where = f"{self.path}/{name}"
                fail(
                    "bad_record", "cannot get a checkpoint: a file is cut off", where=where, needed=f"{end} bytes, not {found}"
                )
            with open(path, "wb") as file:
                file.truncate(-(-end // BLOCK) * BLOCK)  # a reader takes whole blocks
            self._made.add(number)

    def _fetch(
        self, folder: str, files: Sequence[str], make_files: Callable[[Iterable[int]], None], wanted: Sequence[_core.Piece]
    ) -> None:
        make_files(piece.file for piece in wanted)
        missing = {(each.file, each.offset): each.bytes for each in wanted if (each.file, each.offset) not in self._got}
        ranges: list[list[int]] = []  # file, begin and end
        for (file, offset), length in sorted(missing.items()):
            last = ranges[-1] if ranges else [-1, 0, 0]
            if last[0] == file and offset - last[2] <= GAP and offset + length - last[1] <= MOST_OF_A_CALL:
                last[2] = offset + length
            else:
                ranges.append([file, offset, offset + length])

        def get(file: int, begin: int, end: int) -> None:
            path = Path(files[file])
            self._remote.get_range(f"{folder}/{path.name}", begin, end, path)

        with self._remote.naming_missing(), ThreadPoolExecutor(CALLS_AT_ONCE) as calls:
            for done in [calls.submit(get, *each) for each in ranges]:
                done.result()
        self._got.update(missing)


def remote_checkpoint(address: str, access: Training) -> RemoteCheckpoint:
    """Return the checkpoint that rank 0 finds at an address. All ranks call it together."""
    if access.outer is not None:
        refuse("cannot load from an address with outer=", needed="a directory, with the folders of hosts; see `ballast pull`")
    found = by_first_rank(access.group, LOADING, lambda: newest(Remote(address)).address)
    with Agreement(access.group, LOADING).settled():
        place = RemoteCheckpoint(Remote(found))
    return place


def is_address(path: str) -> bool:
    """Return whether this is an address of fsspec.

    >>> is_address("s3://bucket/folder"), is_address("/scratch/run")
    (True, False)
    """
    return "://" in path


def newest(remote: Remote) -> Remote:
    """Return the address itself, if it has a checkpoint, or the folder below with the newest one."""
    if remote.text(MANIFEST) is not None:
        return remote
    steps: dict[str, int] = {}
    for name in remote.folders():
        if not FOLDER.fullmatch(name) and (text := remote.text(f"{name}/{MANIFEST}")) is not None:
            where = f"{remote.address}/{name}"
            steps[name] = _core.parse_manifest(text, where).step
    if not steps:
        _refuse_without(remote)
    return Remote(f"{remote.address}/{max(steps, key=lambda name: steps[name])}")


def _refuse_without(remote: Remote) -> NoReturn:
    refuse(f"cannot get a checkpoint: there is none at {remote.address}", needed="an address of `ballast push`")


def _files_of(checkpoint: Checkpoint | _core.SavedCheckpoint) -> list[str]:
    return [f"{checkpoint.folder}/{rank_file(rank, kind)}" for rank in range(checkpoint.ranks) for kind in KINDS]
