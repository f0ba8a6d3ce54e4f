"""The store that processes find each other through."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """A key-value store in which processes leave messages for each other. A torch.distributed.Store is one."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes | str: ...
    def wait(self, keys: list[str], /) -> object: ...
