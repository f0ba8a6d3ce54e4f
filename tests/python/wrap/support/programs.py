"""Runs Python programs as forks of a process that has imported torch and Ballast: a new process needs 3 seconds for it.

A fork ends as a program does: through sys.excepthook and the interpreter's finalization, with its exit status. The ranks that
torchrun starts are forks of torchrun's process, in sessions of their own, without its open files and its signal handlers."""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from python.wrap.support.ranks import from_fork_server

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # the signals that torchrun handles


class Program:
    """A running program. The arguments are those of `python`: a script, or -m and a module, and what follows. As a context, it
    is killed at the end, if it still runs."""

    def __init__(self, arguments: Sequence[Any], environment: Mapping[str, str], folder: str | Path = "."):
        self._arguments = [str(each) for each in arguments]
        self._written = TemporaryDirectory(prefix="ballast-program-")
        self._process = from_fork_server().Process(
            target=_begin, args=(self._arguments, dict(environment), os.path.abspath(folder), self._written.name)
        )
        self._process.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._written.cleanup()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait_until_it_says(self, words: str, timeout: float = 60) -> None:
        end, file = time.monotonic() + timeout, Path(self._written.name, "out")
        while words not in (said := file.read_text() if file.exists() else ""):
            assert time.monotonic() < end and self._process.is_alive(), said
            time.sleep(0.02)

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Return how it ended, and what it printed."""
        self._process.join(timeout)
        said = [Path(self._written.name, name).read_text() for name in ("out", "err")]
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout, *said)
        return subprocess.CompletedProcess(self._arguments, self._process.exitcode, *said)


def run_program(
    arguments: Sequence[Any], environment: Mapping[str, str], folder: str | Path = ".", timeout: float = 200
) -> subprocess.CompletedProcess[str]:
    with Program(arguments, environment, folder) as program:
        return program.wait(timeout)


def _begin(arguments: list[str], environment: dict[str, str], folder: str, written: str) -> NoReturn:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    for target, name in ((1, "out"), (2, "err")):
        write_to(os.open(os.path.join(written, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    os.chdir(folder)
    gc.freeze()  # finalizations leave alone what was imported
    subprocess_handler.Popen = _started  # type: ignore[assignment]
    become(arguments, environment)


def _started(args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, start_new_session: bool) -> Any:
    """Take the place of subprocess.Popen where torchrun starts a rank."""
    assert start_new_session, "ranks of this torch share the session of torchrun"
    if args[0] != sys.executable:
        return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, start_new_session=True)

    def be_rank() -> NoReturn:
        os.setsid()
        for signal_number in HANDLED:
            signal.signal(signal_number, signal.SIG_DFL)
        for file, target in ((stdout, 1), (stderr, 2)):
            if file is not None:
                write_to(os.dup(file.fileno()), target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        become(args[1:], env)

    return Fork(be_rank)


class Fork:
    """A fork of this process that runs a function to its end, with what torchrun uses of subprocess.Popen."""

    def __init__(self, body: Callable[[], Any]):
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks in a process with threads since 3.12
            self.pid = os.fork()
        if self.pid == 0:
            try:
                body()
                os._exit(0)
            finally:
                os._exit(1)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return code


def write_to(opened: int, target: int) -> None:
    os.dup2(opened, target)
    os.close(opened)


def become(arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a program to its end in this process. It imports modules from where a new process with this environment would."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if environment.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # as with -u: a killed rank has printed its lines
    words = list(arguments[1:] if arguments[0] == "-u" else arguments)
    is_module = words[0] == "-m"
    sys.argv = words[is_module:]
    sys.path[:0] = ["" if is_module else os.path.dirname(words[0]), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    ctypes.pythonapi.Py_Exit(_exit_status(words, is_module))
    raise AssertionError("Py_Exit() returned")


def _exit_status(words: list[str], is_module: bool) -> int:
    try:
        if is_module:
            sys.modules.pop(words[1], None)  # else runpy warns that it was imported
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return int(end.code is not None) if not isinstance(end.code, int) else end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def loss_in_plain_torch(ranks_of_steps: list[int]) -> float:
    """Train the model of the guides' programs on the examples of all ranks; return rank 0's loss of the last step."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, ranks in enumerate(ranks_of_steps):
        losses = []
        for rank in range(ranks):
            examples = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
            losses.append(torch.nn.functional.mse_loss(model(examples), examples.sum(dim=1, keepdim=True)))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses[0].item()
