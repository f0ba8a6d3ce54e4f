"""A process with namespaces of its own, which end with it: nothing is left behind, however it ends."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

NEW_MOUNTS, NEW_PROCESSES, NEW_NETWORK = 0x00020000, 0x20000000, 0x40000000  # of unshare(2)
SIGNAL_AT_PARENTS_END = 1  # of prctl(2)
libc = ctypes.CDLL(None, use_errno=True)


def check(code: int) -> None:
    if code != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def end_with_parent() -> None:
    check(libc.prctl(SIGNAL_AT_PARENTS_END, signal.SIGKILL, 0, 0, 0))


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def run_isolated(body: Callable[[], None]) -> int:
    """Call `body` as the first process of new namespaces of mounts, processes and networks; return its exit code.

    The kernel kills the processes of a namespace with its first process, and frees networks and mounts with the last process
    that uses them.
    """
    check(libc.unshare(NEW_MOUNTS | NEW_PROCESSES | NEW_NETWORK))
    first = os.fork()
    if first > 0:
        return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    end_with_parent()
    run("mount --make-rprivate /")
    run("mount -t proc proc /proc")
    os.makedirs("/run/netns", exist_ok=True)
    run("mount -t tmpfs tmpfs /run/netns")  # where ip(8) keeps the names of networks
    try:
        body()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        leave(0 if end.code is None else end.code if isinstance(end.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        leave(1)
    leave(0)


def leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
