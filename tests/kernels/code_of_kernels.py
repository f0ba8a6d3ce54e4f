"""Show what the kernels of a build need: code_of_kernels.py [BUILD]. Nothing is run, and no GPU is needed.

For each kernel, and the newest architecture that it is compiled for: registers of a thread, bytes of its local memory (for what
does not fit into registers, and arrays with computed indices), and its instructions, with those of branches that are rare.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SYMBOL = re.compile(r"(\w+?)(?:<(?:ballast::kernels::(\w+), \(ballast::StateFormat\)(\d)|.*)>)?\(")
FORMATS = ("fp32", "split", "bf16", "compact", "4bit")


class Kernel(NamedTuple):
    name: str
    registers: int
    local_bytes: int
    instructions: int


def objects_in(build: Path) -> list[Path]:
    """Return the files of a build that have code for GPUs, of sources that are there."""
    sources = {source.name for folder in ("kernels", "examples") for source in (ROOT / folder).rglob("*.cu")}
    files = [file for file in build.rglob("*.cu.o") if file.name.removesuffix(".o") in sources and "emulated" not in str(file)]
    return sorted(files)


def says(file: Path, *options: str) -> str:
    """Return what NVIDIA's cuobjdump says of an object file."""
    found = find_spec("nvidia")
    folders = [Path(place, "cu13", "bin") for place in (found.submodule_search_locations if found else None) or ()]
    programs = [folder / "cuobjdump" for folder in folders if (folder / "cuobjdump").exists()]
    if not programs:
        raise FileNotFoundError("cuobjdump is missing: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = f"{programs[0].parent}:/usr/bin:/bin"  # cuobjdump starts nvdisasm
    command = [programs[0], *options, file]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": path}).stdout


def name_of(symbol: str) -> str:
    plain = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout
    found = SYMBOL.search(plain.rpartition("(anonymous namespace)::")[2])
    if not found:
        return plain.strip()
    return f"{found[2]}, {FORMATS[int(found[3])]}" if found[2] else found[1]


def kernels_of(file: Path) -> Iterator[Kernel]:
    newest = max(re.findall(r"\.(sm_\d+)\.", says(file, "--list-elf")), key=lambda name: int(name[3:]))
    usage, code = (says(file, option, "--gpu-architecture", newest) for option in ("--dump-resource-usage", "--dump-sass"))
    counts = {
        part.partition("\n")[0].strip(): len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?!NOP)\S", part, re.M))
        for part in code.split("Function : ")[1:]
    }
    for symbol, registers, stack, local in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", usage):
        yield Kernel(name_of(symbol), int(registers), int(stack) + int(local), counts[symbol])


def table(build: Path) -> str:
    lines = [f"{'':<40}{'registers':>10}{'local bytes':>12}{'instructions':>13}"]
    for file in objects_in(build):
        lines.append(file.name.removesuffix(".o"))
        for each in sorted(kernels_of(file)):
            lines.append(f"  {each.name:<38}{each.registers:>10}{each.local_bytes:>12}{each.instructions:>13}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "release"))
