"""Flips a bit in a record that no rank needs: offload/FORMAT.md describes the files."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import NamedTuple

BLOCK = 4096


class Commit(NamedTuple):
    incarnation: int
    number: int
    generation: int


def commits(file: Path) -> list[Commit]:
    """Return the file's two commits, the newer one first."""
    found = []
    with file.open("rb") as opened:
        for block in (1, 17):
            opened.seek(block * BLOCK)
            head = opened.read(80)
            if head[8:12] == b"BLST":
                [generation] = struct.unpack_from("<Q", head, 32)
                found.append(Commit(*struct.unpack_from("<QQ", head, 64), generation))
    return sorted(found, reverse=True)


def flip_idle_bit(records: Path, draw: random.Random) -> str:
    """Flip a bit of a record of the generation before the newest one, if all ranks have committed that one."""
    files = sorted(records.glob("soak-rank-*/*.records"))
    newest = {commits(file)[0][:2] for file in files}
    if len(newest) != 1 or any(file.name != files[0].name for file in files):
        return "nothing: the older records are needed"
    file = draw.choice(files)
    parity = (commits(file)[0].generation + 1) % 2
    with file.open("r+b") as opened:
        opened.seek(BLOCK)
        identity = opened.seek(0) or opened.read(64)
        tiles, payload = struct.unpack_from("<QQ", identity, 48)
        record = BLOCK + -(-payload // BLOCK) * BLOCK
        at = 33 * BLOCK + (2 * draw.randrange(tiles) + parity) * record + BLOCK + draw.randrange(payload)
        opened.seek(at)
        [byte] = opened.read(1) or b"\0"
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << draw.randrange(8)]))
    return f"byte {at} of {file.parent.name}"
