"""Hosts that are imitated on this machine: a network namespace for each, joined by a switch, with links of limited rate."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from isolation import end_with_parent, run

DEVICE = "eth0"  # of each host
RELAY = Path(__file__).with_name("relay.py")
BURST_BYTES = 256 << 10  # a limit's bucket; above it lie the largest packets, of 64 KiB
QUEUE_SECONDS = 0.05  # of a link; packets beyond it are dropped


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


def require_root() -> None:
    if os.geteuid() != 0:
        raise SystemExit("hosts: cannot imitate hosts: network namespaces and limits of links need root")
