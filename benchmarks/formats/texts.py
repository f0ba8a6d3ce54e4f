"""The texts, which are the same on each machine with the pinned torch and the same Python."""

import hashlib
import pydoc_data.topics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

HELD_OUT = 10  # each tenth file or topic is for validation


class Text(NamedTuple):
    trained: torch.Tensor
    held_out: torch.Tensor
    digest: str  # of all of it


def python_sources() -> Text:
    """Return the Python files of the torch package, without the one that names the build."""
    folder = Path(torch.__file__).parent
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.py"))
    return split([(folder / file).read_bytes() for file in files if file != "version.py"])


def help_topics() -> Text:
    """Return the English of Python's help()."""
    topics = pydoc_data.topics.topics
    return split([topics[name].encode() for name in sorted(topics)])


def split(parts: Sequence[bytes]) -> Text:
    trained = b"".join(part for number, part in enumerate(parts) if number % HELD_OUT)
    held_out = b"".join(parts[::HELD_OUT])
    return Text(tensor_of(trained), tensor_of(held_out), hashlib.sha256(trained + held_out).hexdigest()[:12])


def tensor_of(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


TEXTS: dict[str, Callable[[], Text]] = {
    "torch's Python sources": python_sources,
    "Python's help topics": help_topics,
}
