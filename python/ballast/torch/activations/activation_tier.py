"""The memory of activations of one device, in another tier from its save until its last use."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass

import torch

from ballast import _core
from ballast.tiers import ActivationOptions
from ballast.torch.gpu import current_stream, device_at


class Activation:
    """Memory that was saved. Its space is free when nothing refers to this object."""

    __slots__ = ("__weakref__", "bytes", "storage", "ticket", "tier")

    def __init__(self, tier: ActivationTier, ticket: int, count: int, storage: object):
        self.tier = tier
        self.ticket = ticket
        self.bytes = count
        self.storage = storage  # a weak reference to the original, which keeps others from having its address

    def __del__(self) -> None:
        self.tier.drop(self.ticket)


@dataclass
class Loaded:
    """A copy on the device."""

    memory: torch.Tensor
    arrived: _core.Completion
    is_used: bool = False


class ActivationTier:
    """Keeps what save() takes until it is dropped.

    On a GPU, memory that is saved stays alive until its copy has ended, and what was saved before is loaded ahead: each up to
    `in_flight` bytes, or one activation. On a CPU the library copies at once, and reads ahead into buffers of that size."""

    def __init__(self, options: ActivationOptions, gpu: int | None):
        self._core = _core.ActivationStore(directory=options.directory, memory_bytes=options.in_flight, gpu=gpu)
        self._gpu = gpu
        self._in_flight = options.in_flight
        self._process = os.getpid()
        self._bytes: dict[int, int] = {}  # bytes by ticket, in the order of saving
        self._copying: deque[tuple[_core.Completion, torch.Tensor]] = deque()  # memory that is being saved
        self._loaded: dict[int, Loaded] = {}  # copies by ticket, in the order of loading

    def counters(self) -> list[tuple[str, float]]:
        return [(name, float(str(value))) for name, value in self._core.counters().items()]

    def save(self, memory: torch.Tensor, storage: object) -> Activation:
        """Save the bytes of a tensor in one dimension."""
        self._wait_for_copies(self._in_flight - memory.nbytes)
        ticket, copied = self._core.save(memory.data_ptr(), memory.nbytes, current_stream(self._gpu))
        if self._gpu is not None:
            self._copying.append((copied, memory))
        self._bytes[ticket] = memory.nbytes
        return Activation(self, ticket, memory.nbytes, storage)

    def memory_of(self, activation: Activation) -> torch.Tensor:
        """Return a copy on the device, which other uses of the same activation share."""
        self._wait_for_copies(self._in_flight)
        loaded = self._loaded.get(activation.ticket) or self._load(activation.ticket)
        loaded.is_used = True
        if self._gpu is not None:
            loaded.arrived.order(current_stream(self._gpu), self._gpu)
            self._load_ahead(activation.ticket)
        return loaded.memory

    def drop(self, ticket: int) -> None:
        if os.getpid() != self._process:  # a fork shares the file, and has no threads
            return
        loaded = self._loaded.pop(ticket, None)
        if loaded is not None and not loaded.is_used:
            loaded.arrived.wait()  # nothing in torch's stream waits for it
        del self._bytes[ticket]
        self._core.drop(ticket)

    def _load(self, ticket: int) -> Loaded:
        count = self._bytes[ticket]
        self._forget_used(self._in_flight - count)
        memory = torch.empty(count, dtype=torch.uint8, device=device_at(self._gpu))
        arrived = self._core.load(ticket, memory.data_ptr(), count, current_stream(self._gpu))
        loaded = self._loaded[ticket] = Loaded(memory, arrived)
        return loaded

    def _load_ahead(self, ticket: int) -> None:
        """Prefetch the activations saved before this one that are in host memory: the backward pass needs them next."""
        ahead = sum(loaded.memory.nbytes for loaded in list(self._loaded.values()) if not loaded.is_used)
        for before in list(reversed(self._bytes)):
            if before >= ticket or before in self._loaded:
                continue
            ahead += self._bytes[before]
            if ahead > max(self._in_flight, self._bytes[before]) or not self._core.is_in_memory(before):
                return
            self._load(before)

    def _forget_used(self, most: int) -> None:
        """Free copies that were used, the oldest first, until all copies have this many bytes at most. A retained graph, or
        another operator that saved the same memory, loads them again."""
        loaded = list(self._loaded.items())
        count = sum(each.memory.nbytes for _, each in loaded)
        for ticket, each in loaded:
            if count <= most:
                return
            if each.is_used:
                del self._loaded[ticket]
                count -= each.memory.nbytes

    def _wait_for_copies(self, most: int) -> None:
        """Free memory whose copy has ended, and wait until at most this many bytes are being copied."""
        count = sum(memory.nbytes for _, memory in self._copying)
        while self._copying and (count > most or self._copying[0][0].is_done()):
            copied, memory = self._copying.popleft()
            copied.wait()
            count -= memory.nbytes
