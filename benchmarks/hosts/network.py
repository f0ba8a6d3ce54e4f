"""Hosts that are imitated on this machine: a network namespace for each, joined by a switch, with links of limited rate.

`run_isolated()` gives the suite namespaces of its own, which end with it; `run_ranks()` starts a program on all ranks of all
hosts.
"""

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

DEVICE = "eth0"  # the network device of each host
RELAY = Path(__file__).with_name("relay.py")
BURST_BYTES = 256 << 10  # a limit's bucket; above it lie the largest packets, of 64 KiB
QUEUE_SECONDS = 0.05  # the queue of a link; packets beyond it are dropped
PORT = 29500
TIME_LIMIT = 4 * 3600  # seconds; losses over a slow link take more than an hour
NEW_MOUNTS, NEW_PROCESSES, NEW_NETWORK = 0x00020000, 0x20000000, 0x40000000  # flags of unshare(2)
SIGNAL_AT_PARENTS_END = 1  # an option of prctl(2)
libc = ctypes.CDLL(None, use_errno=True)


class Link(NamedTuple):
    """A host's link to the switch. The delay is that of a packet from one host to another."""

    gigabits: float
    delay_ms: float = 0

    @property
    def bytes_per_second(self) -> float:
        return self.gigabits * 1e9 / 8

    @property
    def name(self) -> str:
        rate = f"{self.gigabits:g} Gbit/s" if self.gigabits >= 1 else f"{self.gigabits * 1000:g} Mbit/s"
        return rate + (f", {self.delay_ms:g} ms" if self.delay_ms else "")


class Site(NamedTuple):
    """The hosts of a job, each with the same number of ranks and the same link."""

    hosts: int
    ranks: int  # the ranks of a host
    link: Link

    @property
    def name(self) -> str:
        return f"{self.hosts} x {self.ranks}, {self.link.name}"


SITES = [
    *(Site(hosts, ranks, Link(gigabits)) for hosts, ranks in ((2, 1), (2, 2), (4, 1)) for gigabits in (0.1, 1, 10)),
    Site(2, 1, Link(1, delay_ms=5)),
]


# --- Namespaces ---


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
    run("mount -t tmpfs tmpfs /run/netns")  # ip(8) keeps the names of networks there
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


# --- The network ---


class Network:
    """Hosts h0, h1, ... with addresses 10.77.0.1, 10.77.0.2, ... It is made in the network namespace of this process."""

    def __init__(self, hosts: int, link: Link):
        self.hosts, self.link = hosts, link
        self._relay: subprocess.Popen | None = None

    def __enter__(self) -> "Network":
        run("ip link add switch type bridge")
        run("ip link set switch up")
        for host in range(self.hosts):
            self._add(host)
        if self.link.delay_ms:
            self._delay()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        for host in range(self.hosts):
            run(f"ip netns del h{host}")
            subprocess.run(f"ip link del port{host}".split(), stderr=subprocess.DEVNULL)  # gone with its host, perhaps later
            if self.link.delay_ms:
                run(f"ip link del wire{host}")
        run("ip link del switch")

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def _add(self, host: int) -> None:
        run(f"ip netns add h{host}")
        run(f"ip link add port{host} type veth peer name {DEVICE} netns h{host} address 02:00:00:00:00:{host:02x}")
        run(f"ip -n h{host} addr add {self.address(host)}/24 dev {DEVICE}")
        run(f"ip -n h{host} link set {DEVICE} up")
        run(f"ip -n h{host} link set lo up")
        run(f"ip link set port{host} up")
        if not self.link.delay_ms:
            run(f"ip link set port{host} master switch")
        limit = f"root tbf rate {self.link.gigabits * 1e9:.0f}bit burst {BURST_BYTES} latency {QUEUE_SECONDS * 1000:g}ms"
        run(f"ip netns exec h{host} tc qdisc add dev {DEVICE} {limit}")
        run(f"tc qdisc add dev port{host} {limit}")

    def _delay(self) -> None:
        """Put a relay in the place of the switch. Each port is bridged with a device whose packets the relay reads."""
        self._relay = subprocess.Popen(
            [sys.executable, RELAY, str(self.hosts), str(self.link.delay_ms)],
            stdout=subprocess.PIPE,
            preexec_fn=end_with_parent,
            text=True,
        )
        assert self._relay.stdout is not None
        if self._relay.stdout.readline() != "ready\n":
            raise SystemExit("hosts: the relay that delays packets did not start")
        for host in range(self.hosts):
            run(f"ip link add wire{host} type bridge")
            for device in (f"port{host}", f"tap{host}"):
                run(f"ip link set {device} master wire{host}")
            run(f"ip link set tap{host} up")
            run(f"ip link set wire{host} up")

    def start(self, host: int, program: list[str], environments: list[dict[str, str]], logs: list[Path]) -> subprocess.Popen:
        """Start the ranks of a host, in a process namespace of its own. It ends with the first that fails, or the last."""
        lines = []
        for environment, log in zip(environments, logs, strict=True):
            variables = shlex.join(["env", *(f"{name}={value}" for name, value in environment.items())])
            output = f"2>{shlex.quote(str(log))} >{shlex.quote(f'{log}.out')}"
            lines.append(f"{variables} {shlex.join(program)} {output}")
        isolated = "unshare --pid --fork --kill-child --mount-proc bash -c".split()
        return subprocess.Popen(["ip", "netns", "exec", f"h{host}", *isolated, at_once(lines)], preexec_fn=end_with_parent)


def at_once(commands: list[str]) -> str:
    """Return a script that runs commands at the same time, and fails with the first of them that does."""
    return "\n".join(["trap 'exit 1' USR1", *(f"({command} || kill -USR1 $$) &" for command in commands), "wait", "exit 0"])


def sent_bytes() -> int:
    """Return the bytes that the limit of this host's link has let through, with the headers of each packet."""
    command = f"tc -s -j qdisc show dev {DEVICE}".split()
    (limit,) = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return limit["bytes"]


def megabytes(count: float) -> float:
    return count / 1e6


def require_root() -> None:
    if os.geteuid() != 0:
        raise SystemExit("hosts: cannot imitate hosts: network namespaces and limits of links need root")


# --- Ranks ---


def run_ranks(site: Site, network: Network, program: list[str], folder: Path) -> list[dict]:
    """Return the lines in rank order. If a rank fails, end all of them, and this program with the ends of their logs."""
    started = [
        network.start(
            host,
            [sys.executable, *program],
            [environment_of(site, host, local) for local in range(site.ranks)],
            [log_of(folder, host, local) for local in range(site.ranks)],
        )
        for host in range(site.hosts)
    ]
    try:
        failed = [host for host, process in enumerate(started) if process.wait(TIME_LIMIT) != 0]
    finally:
        for process in started:
            process.kill()
    ranks = [(host, local) for host in range(site.hosts) for local in range(site.ranks)]
    if failed:
        logs = "\n".join(log_of(folder, *rank).read_text()[-3000:] for rank in ranks)
        raise SystemExit(f"hosts: {' '.join(program)} failed on hosts {failed}:\n{logs}")
    return [json.loads(Path(f"{log_of(folder, *rank)}.out").read_text()) for rank in ranks]


def log_of(folder: Path, host: int, local: int) -> Path:
    return folder / f"host{host}-rank{local}.log"


def environment_of(site: Site, host: int, local: int) -> dict[str, str]:
    """Return a rank's variables, as torchrun would set them."""
    ranks = {"RANK": host * site.ranks + local, "LOCAL_RANK": local}
    sizes = {"WORLD_SIZE": site.hosts * site.ranks, "LOCAL_WORLD_SIZE": site.ranks, "OMP_NUM_THREADS": 1}
    place = {"MASTER_ADDR": Network.address(0), "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": DEVICE}
    return {name: str(value) for name, value in {**ranks, **sizes, **place}.items()}
