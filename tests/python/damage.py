"""Damage and forge files at random, for tests of readers.

BALLAST_FUZZ_CASES sets the number of cases of each kind, and BALLAST_FUZZ_SEED the first seed, for a longer search."""

import copy
import json
import os

from ballast import _core

CASES = int(os.environ.get("BALLAST_FUZZ_CASES", "50"))
SEED = int(os.environ.get("BALLAST_FUZZ_SEED", "0"))

HOSTILE = [None, True, -1, 0, 1, 7, 1 << 31, 1 << 53, (1 << 63) - 1, 1 << 63, 1 << 64, 0.5, float("nan"), float("inf")]
HOSTILE += ["", "..", "../x", "/etc/passwd", "a\0b", "x" * 300, "torch.nn", [], {}, [[]], {"a": {}}, [0] * 70, [-1, 2]]


def seal_of(text):
    """Return the checksum of a text as checkpoints write it."""
    return f"{_core.checksum(text):016x}"


def sealed(content):
    """Return the text of a checkpoint's JSON file with this content, whose checksum is right."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return b'{"content": ' + text + b', "seal": "' + seal_of(text).encode() + b'"}\n'


def content_of(path):
    """Return the content of a checkpoint's JSON file."""
    return json.loads(path.read_text())["content"]


def damaged(rng, content):
    """Return the bytes with a few that are flipped, lost, added or repeated."""
    mutant = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 3])):
        at = rng.randrange(len(mutant) + 1)
        end = min(len(mutant), at + rng.choice([1, 4, 8, 64]))
        how = rng.randrange(6)
        if how == 0 and at < len(mutant):
            mutant[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del mutant[at:]
        elif how == 2:
            mutant[at:end] = bytes(rng.choice([0, 255]) for _ in range(end - at))
        elif how == 3:
            mutant[at:at] = rng.randbytes(rng.choice([1, 8]))
        elif how == 4:
            del mutant[at:end]
        else:
            mutant[at:at] = mutant[at:end]
    return bytes(mutant)


def with_another_value(rng, content):
    """Return JSON content with one value replaced, removed or moved."""
    content = copy.deepcopy(content)
    where, places = content, []
    while isinstance(where, (dict, list)) and where:
        key = rng.choice(list(where)) if isinstance(where, dict) else rng.randrange(len(where))
        places.append((where, key))
        where = where[key]
    where, key = rng.choice(places)
    how = rng.randrange(8)
    if how == 0:
        del where[key]
    elif how == 1 and isinstance(where, dict):
        where[rng.choice(["", "x", "params", "../x"])] = where[key]
    else:
        where[key] = rng.choice(HOSTILE)
    return content
