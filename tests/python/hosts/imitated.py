"""Run a case on hosts that are imitated on this machine: imitated.py CASE HOSTS RANKS_OF_EACH FAULT FOLDER. Needs root.

Prints a line of JSON: what each rank printed, or null where it did not end by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "hosts"))

from network import (  # noqa: E402
    NEW_NETWORK,
    Link,
    Network,
    Site,
    check,
    end_with_parent,
    environment_of,
    libc,
    log_of,
    run,
    run_isolated,
)
from python.wrap.support.programs import Fork, become, write_to  # noqa: E402

FAULT_AFTER_STEP = 3
TIME_LIMIT = 120  # seconds
RANK = Path(__file__).with_name("rank.py")
BY_NAME, FIRST = "by name", "first"  # the case in which ranks have the name of the first host


def start(site: Site, host: int, arguments: list[str], folder: Path) -> Fork:
    """Start the ranks of a host as forks of this process, which has imported torch, where Network.start() starts programs."""
    return Fork(lambda: be_host(site, host, arguments, folder))


def be_host(site: Site, host: int, arguments: list[str], folder: Path) -> None:
    """Run the ranks in the host's network, and in a process namespace of their own. It ends with the first that fails, or the
    last."""
    network = os.open(f"/run/netns/h{host}", os.O_RDONLY)

    def run_ranks() -> None:
        check(libc.setns(network, NEW_NETWORK))
        if arguments[1] == BY_NAME:
            name_first_host(host, folder)
        named = {"MASTER_ADDR": FIRST} if arguments[1] == BY_NAME else {}
        for local in range(site.ranks):
            Fork(lambda: be_rank(arguments, {**environment_of(site, host, local), **named}, log_of(folder, host, local)))
        for _ in range(site.ranks):
            if os.wait()[1] != 0:
                sys.exit(1)

    end_with_parent()
    os._exit(run_isolated(run_ranks))


def name_first_host(host: int, folder: Path) -> None:
    """Let two names lead to host 0: on that host one of them to loopback, as on Debian and Ubuntu, and the other one also to
    its address. Its default route leads to another network than the one that joins the hosts."""
    lines = ["127.0.0.1 localhost", f"{Network.address(0)} both"]
    lines += [f"127.0.1.1 {FIRST} both"] if host == 0 else [f"{Network.address(0)} {FIRST}"]
    names = folder / f"hosts-{host}"
    names.write_text("\n".join(lines) + "\n")
    run(f"mount --bind {names} /etc/hosts")
    if host == 0:
        run("ip link add management type bridge")
        run("ip addr add 10.99.0.1/24 dev management")
        run("ip link set management up")
        run("ip route add default dev management")


def be_rank(arguments: list[str], variables: dict[str, str], log: Path) -> None:
    for path, target in ((f"{log}.out", 1), (str(log), 2)):
        write_to(os.open(path, os.O_WRONLY | os.O_CREAT), target)
    become(arguments, {**os.environ, **variables})


def make_fault(kind: str, started: list[Fork], folder: Path) -> None:
    """Wait until training is under way, and do something to host 1."""
    limit = time.monotonic() + TIME_LIMIT
    while not (folder / f"rank0-step{FAULT_AFTER_STEP}").exists():
        if time.monotonic() > limit or started[0].poll() is not None:
            raise SystemExit(f"training did not begin: {log_of(folder, 0, 0).read_text()[-2000:]}")
        time.sleep(0.01)
    if kind == "killed":
        started[1].kill()
    else:
        run("ip link set port1 down")
    if kind == "cut for 2 s":
        time.sleep(2)
        run("ip link set port1 up")


def run_case(case: str, site: Site, fault: str, folder: Path) -> None:
    with Network(site.hosts, site.link):
        started = [start(site, host, [str(RANK), case, str(folder)], folder) for host in range(site.hosts)]
        if fault != "none":
            make_fault(fault, started, folder)
        for process in started:
            process.wait(TIME_LIMIT)
    printed = {}
    for host in range(site.hosts):
        for local in range(site.ranks):
            log = log_of(folder, host, local)
            lines = Path(f"{log}.out").read_text().splitlines()
            printed[host * site.ranks + local] = json.loads(lines[-1]) if lines else None
            print(log.read_text(), file=sys.stderr)
    print(json.dumps(list(printed.values())))


def main() -> int:
    case, hosts, ranks, fault, folder = sys.argv[1:]
    return run_isolated(lambda: run_case(case, Site(int(hosts), int(ranks), Link(1)), fault, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
