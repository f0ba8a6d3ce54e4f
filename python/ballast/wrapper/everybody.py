"""What ranks tell each other of Python's values."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from ballast.connecting import Group


def from_all_ranks(group: Group, value: Any) -> list[Any]:
    """Every rank's, by rank. All ranks call it together."""
    mine = pickle.dumps(value)
    lengths = group.all_reduce([len(mine) if rank == group.rank else 0 for rank in range(group.size)])
    values = []
    for rank, length in enumerate(lengths):
        memory = bytearray(mine if rank == group.rank else length)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        group._core.broadcast(address=address, bytes=length, root=rank)
        values.append(pickle.loads(memory))
    return values
