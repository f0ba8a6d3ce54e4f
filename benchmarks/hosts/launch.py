"""Runs a program on all ranks of imitated hosts, and returns the line of JSON that each of them prints."""

import json
import sys
from pathlib import Path

from network import DEVICE, Network
from sites import Site

PORT = 29500
TIME_LIMIT = 4 * 3600  # seconds; losses over a slow link take more than an hour


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
    numbers = {
        "RANK": host * site.ranks + local,
        "LOCAL_RANK": local,
        "WORLD_SIZE": site.hosts * site.ranks,
        "LOCAL_WORLD_SIZE": site.ranks,
        "MASTER_PORT": PORT,
        "OMP_NUM_THREADS": 1,
    }
    names = {"MASTER_ADDR": Network.address(0), "GLOO_SOCKET_IFNAME": DEVICE}
    return {**names, **{name: str(number) for name, number in numbers.items()}}
