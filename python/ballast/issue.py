"""What a report of a bug needs to know about the software and the machine, as Markdown without secrets."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ballast import _core

PACKAGES = ("torch", "accelerate", "deepspeed", "lightning", "numpy", "peft", "pytorch-lightning", "ray", "transformers", "trl")
# The variables that decide how Ballast, torch.distributed and their libraries run. No others are shown.
PREFIXES = ("BALLAST_", "GLOO_", "MALLOC_", "NCCL_", "OMP_", "TORCH_", "TORCHELASTIC_", "UCX_")
NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "GLIBC_TUNABLES", "PYTORCH_ALLOC_CONF"),
    *("PYTORCH_CUDA_ALLOC_CONF", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_NNODES", "SLURM_CPUS_PER_TASK"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
}
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
# Addresses and names of machines, which a company may not want to publish.
PLACE = re.compile(r"ADDR|HOST|ENDPOINT|URL|PROXY|_LIST$", re.IGNORECASE)
PLACE_OR_LOGIN = re.compile(r"://|@|\d+(\.\d+){3}")
LOOPBACK = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}


def report(findings: Sequence[str], *, environment: Mapping[str, str] = os.environ) -> str:
    """Return the report. `findings` are the lines of `ballast doctor`.

    >>> print(report(["ok    cpu"], environment={"RANK": "0", "MASTER_ADDR": "node-17", "HF_TOKEN": "hf_1"}))
    ### Versions
    ...
    ### Machine
    <BLANKLINE>
    ```text
    ok    cpu
    ```
    <BLANKLINE>
    ### Environment
    <BLANKLINE>
    ```text
    MASTER_ADDR=(hidden)
    RANK=0
    ```
    """
    home = environment.get("HOME", "")
    shown = [f"{name}={_shown(name, environment[name])}" for name in sorted(environment) if _is_of_use(name)]
    parts = [
        "### Versions",
        _block(f"{name:<20}{each}" for name, each in _versions()),
        "### Machine",
        _block(_without_home(line, home) for line in findings),
        "### Environment",
        _block(_without_home(line, home) for line in shown or ["(none of the variables is set)"]),
    ]
    return "\n\n".join(parts)


def _versions() -> Iterator[tuple[str, str]]:
    found = _core.this_machine(root="/")
    backend = "without CUDA" if "build" in found["no_gpu_because"] else "with CUDA"
    yield "ballast", f"{_core.version}, built {backend}, {'without NCCL' if found['no_nccl_because'] else 'NCCL is there'}"
    yield "python", f"{platform.python_version()}, {platform.python_implementation()}"
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver())}"
    yield "distribution", _distribution()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "unknown"


def _is_of_use(name: str) -> bool:
    return name in NAMES or name.startswith(PREFIXES)


def _shown(name: str, value: str) -> str:
    """Return a value, unless its name or the value itself tells that it may not be published."""
    hides = SECRET.search(name) or PLACE.search(name) or PLACE_OR_LOGIN.search(value)
    return "(hidden)" if hides and value not in LOOPBACK else value


def _without_home(line: str, home: str) -> str:
    """Replace the home directory, whose name is that of the user."""
    return line.replace(home, "~") if len(Path(home).parts) > 1 else line


def _block(lines: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(["```text", *lines, "```"])
