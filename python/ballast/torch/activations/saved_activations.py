"""Hooks of autograd that move the tensors that it saves for backward to another tier, in each call of a model, and the memory
of these activations there, from their save until their last use."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch

from ballast import _core
from ballast._torch_compat import (
    SavedTensorHooks,
    WeakStorage,
    base_of,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    storage_address,
    top_saved_tensor_hooks,
)
from ballast.tiers import ActivationOptions, require_away_from
from ballast.torch.calls.hooks import ModuleHook
from ballast.torch.gpu import current_stream, device_at, gpu_module, is_gpu
from ballast.torch.memory import map_tensors_separately
from ballast.torch.parameters.managed_parameter import is_on_meta
from ballast.torch.parameters.units import required

ALIGNMENT = 64  # the alignment of torch's memory: restored tensors begin as far from a multiple of this as the saved ones


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
class Copied:
    """Memory of the device that is copied, to or from it."""

    memory: torch.Tensor
    done: _core.Completion
    gpu: int | None
    is_used: bool = False

    def order(self) -> None:
        """Let later work in torch's stream wait for the copy, and later uses of the memory for that stream. No thread waits."""
        if self.gpu is not None:
            self.done.order(current_stream(self.gpu), self.gpu)
            self.memory.record_stream(gpu_module().current_stream(self.gpu))


class ActivationTier:
    """Keeps what save() takes until it is dropped.

    On a GPU, memory that is saved stays alive until its copy has ended, and activations that were saved before it are loaded
    ahead; each of the two takes up to `in_flight` bytes, or one activation. Where the link is slower, the GPU waits for it, and
    not the thread that launches its work. On a CPU the library copies at once, and reads ahead into buffers of that size."""

    def __init__(self, options: ActivationOptions, gpu: int | None):
        self._core = _core.ActivationStore(directory=options.directory, memory_bytes=options.in_flight, gpu=gpu)
        self._gpu = gpu
        self._in_flight = options.in_flight
        self._process = os.getpid()
        self._bytes: dict[int, int] = {}  # bytes by ticket, in the order of saving
        self._copying: deque[Copied] = deque()  # memory that is being saved
        self._loaded: dict[int, Copied] = {}  # copies by ticket, in the order of loading

    def counters(self) -> dict[str, float]:
        return self._core.counters()

    def save(self, memory: torch.Tensor, storage: object) -> Activation:
        """Save the bytes of a tensor in one dimension."""
        self._free_copied(self._in_flight - memory.nbytes)
        ticket, copied = self._core.save(memory.data_ptr(), memory.nbytes, current_stream(self._gpu))
        if self._gpu is not None:
            self._copying.append(Copied(memory, copied, self._gpu))
        self._bytes[ticket] = memory.nbytes
        return Activation(self, ticket, memory.nbytes, storage)

    def memory_of(self, activation: Activation) -> torch.Tensor:
        """Return a copy on the device, which other uses of the same activation share."""
        self._free_copied(self._in_flight)
        loaded = self._loaded.get(activation.ticket) or self._load(activation.ticket)
        loaded.is_used = True
        if self._gpu is not None:
            loaded.order()
            self._load_ahead(activation.ticket)
        return loaded.memory

    def drop(self, ticket: int) -> None:
        if os.getpid() != self._process:  # a fork shares the file, and has no threads
            return
        loaded = self._loaded.pop(ticket, None)
        if loaded is not None and not loaded.is_used:
            loaded.order()  # its memory is free for others, and no use has waited for the copy
        del self._bytes[ticket]
        self._core.drop(ticket)

    def _load(self, ticket: int) -> Copied:
        count = self._bytes[ticket]
        self._forget_used(self._in_flight - count)
        memory = torch.empty(count, dtype=torch.uint8, device=device_at(self._gpu))
        arrived = self._core.load(ticket, memory.data_ptr(), count, current_stream(self._gpu))
        loaded = self._loaded[ticket] = Copied(memory, arrived, self._gpu)
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

    def _free_copied(self, most: int) -> None:
        """Free memory whose copy has ended, and as much more as leaves at most this many bytes that are being copied."""
        count = sum(each.memory.nbytes for each in self._copying)
        while self._copying and (count > most or self._copying[0].done.is_done()):
            copied = self._copying.popleft()
            copied.order()
            count -= copied.memory.nbytes


# --- The hooks ---


class Kept(NamedTuple):
    tensor: torch.Tensor
    version: int


class Offloaded(NamedTuple):
    activation: Activation
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, from the beginning of that memory
    like: torch.Tensor  # has no elements, and the version of the original tensor
    version: int


class SavedActivations:
    """Hooks on what autograd saves, and a block that sets them, which can be entered again in each step.

    Parameters, their views, and what is smaller than `min_bytes` stay. Views share the memory of their storage."""

    def __init__(self, options: ActivationOptions):
        self._options = options
        self._tiers: dict[torch.device, ActivationTier | None] = {}
        self._saved: WeakValueDictionary[tuple[int, ...], Activation] = WeakValueDictionary()
        self._empty: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self.hooks: SavedTensorHooks = (self._pack, self._unpack)

    def __enter__(self) -> SavedActivations:
        push_saved_tensor_hooks(*self.hooks)
        return self

    def __exit__(self, *_: object) -> None:
        pop_saved_tensor_hooks()

    def counters(self) -> dict[str, float]:
        """Return the bytes that were saved, loaded, written and read so far, those that are kept now, the memory of buffers on
        the host, the size of the file on the drive, and the seconds that callers waited; of all devices."""
        total: dict[str, float] = {}
        for tier in self._tiers.values():
            for name, value in () if tier is None else tier.counters().items():
                total[name] = total.get(name, 0.0) + value
        return total

    def set_allocator(self) -> None:
        """Let the C library return the memory of offloaded tensors. A new partition sets it otherwise."""
        if any(tier is not None and not is_gpu(device) for device, tier in self._tiers.items()):
            map_tensors_separately(self._options.min_bytes)

    def _pack(self, tensor: torch.Tensor) -> Kept | Offloaded:
        if tensor.is_leaf and tensor.requires_grad:
            return Kept(tensor, tensor._version)
        # Autograd would keep a saved output alive by a circle of references.
        kept = tensor.detach()
        if not _can_leave(tensor):
            return Kept(kept, tensor._version)
        begin, end = _span_of(tensor)
        tier = self._tier_of(tensor.device) if end - begin >= self._options.min_bytes else None
        if tier is None:
            return Kept(kept, tensor._version)
        activation = self._activation(tensor, begin, end, tier)
        offset = tensor.storage_offset() - begin // tensor.itemsize
        size, stride = tuple(tensor.shape), tensor.stride()
        if (key := (tensor.dtype, tensor.device)) not in self._empty:
            self._empty[key] = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        kept.data = self._empty[key]  # it shares the counter of versions, and frees the memory
        return Offloaded(activation, tensor.dtype, size, stride, offset, kept, tensor._version)

    def _unpack(self, saved: Kept | Offloaded) -> torch.Tensor:
        if type(saved) is Kept:
            if saved.tensor._version != saved.version:
                _refuse_changed(saved.tensor, saved.tensor.shape, saved.version)
            return saved.tensor
        assert type(saved) is Offloaded
        if saved.like._version != saved.version:
            _refuse_changed(saved.like, saved.size, saved.version)
        memory = saved.activation.tier.memory_of(saved.activation)
        tensor = torch.empty(0, dtype=saved.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _activation(self, tensor: torch.Tensor, begin: int, end: int, tier: ActivationTier) -> Activation:
        """Return these bytes of the tensor's storage, which are saved once as long as torch counts no write."""
        storage = tensor.untyped_storage()
        key = (storage_address(storage), storage.data_ptr(), tensor._version, begin, end)
        activation = self._saved.get(key)
        if activation is None:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, begin, (end - begin,), (1,))
            activation = self._saved[key] = tier.save(memory, WeakStorage(storage))
        return activation

    def _tier_of(self, device: torch.device) -> ActivationTier | None:
        """Return the tier for activations of this device; None if they stay."""
        if device not in self._tiers:
            on_gpu = is_gpu(device)
            is_away = on_gpu or self._options.tier != "host"
            if not is_away and not gpu_module().is_available():
                require_away_from(self._options, on_gpu=False)
            on_device = is_away and (on_gpu or device.type == "cpu")
            self._tiers[device] = ActivationTier(self._options, device.index if on_gpu else None) if on_device else None
            self.set_allocator()
        return self._tiers[device]


def _can_leave(tensor: torch.Tensor) -> bool:
    """Return whether this is a plain tensor with memory, and no parameter or view of one."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.numel() == 0:
        return False
    base = base_of(tensor)
    return not (isinstance(base, torch.nn.Parameter) or base.is_leaf and base.requires_grad)


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the bytes of the storage from the tensor's first to its last element; those of the whole storage if these are not
    twice as many, so that views of one storage share them."""
    size, whole = tensor.itemsize, tensor.untyped_storage().nbytes()
    first = tensor.storage_offset()
    last = first + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    begin, end = first * size // ALIGNMENT * ALIGNMENT, (last + 1) * size
    return (0, whole) if 2 * (end - begin) >= whole else (begin, end)


def _refuse_changed(tensor: torch.Tensor, size: Any, version: int) -> NoReturn:
    """Raise the error that torch raises without hooks."""
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(size)}] is at version {tensor._version}; expected version {version} instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )


class ModelActivations:
    """Hooks on the calls of a model, until remove().

    In a call inside of other hooks, such as those of activation checkpointing, these decide what is saved. The hooks of stage 3
    come on top of those that are active here, and pass on what is no parameter."""

    def __init__(self, model: torch.nn.Module, options: ActivationOptions):
        self._saved = SavedActivations(options)
        self._calls: list[bool] = []  # whether hooks were pushed, for each call that has not ended
        self._hooks = [
            model.register_forward_pre_hook(ModuleHook(self._begin_call)),
            model.register_forward_hook(ModuleHook(self._end_call), always_call=True),
        ]
        self._before: dict[str, float] = {}  # the counters at the end of the last step
        self.figures: dict[str, float] = {}  # those of the last step

    def _begin_call(self, _: torch.nn.Module) -> None:
        pushes = torch.is_grad_enabled() and top_saved_tensor_hooks() is None
        if pushes:
            push_saved_tensor_hooks(*self._saved.hooks)
        self._calls.append(pushes)

    def _end_call(self, _: torch.nn.Module | None = None) -> None:
        """Remove one level of hooks. Stage 3 removes its level directly before or after this one."""
        if self._calls and self._calls.pop():
            pop_saved_tensor_hooks()

    def after_step(self) -> None:
        """Take the figures of the step, and end calls that were interrupted: torch runs no hooks for them."""
        while self._calls:
            self._end_call()
        self._saved.set_allocator()
        now = self._saved.counters()
        self.figures = {
            f"activation_bytes/{name.removesuffix('_bytes')}": value - (0.0 if name in _NOW else self._before.get(name, 0.0))
            for name, value in now.items()
            if name.endswith("_bytes")
        }
        self.figures["activation_seconds"] = now.get("waited_seconds", 0.0) - self._before.get("waited_seconds", 0.0)
        self._before = now

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def offload_activations_of(
    model: torch.nn.Module | None, parameters: Sequence[torch.Tensor], options: ActivationOptions
) -> ModelActivations:
    model = required(model, "offload activations without a model", "activations=...")
    devices = {each.device for each in parameters if not is_on_meta(each)}
    require_away_from(options, on_gpu=not devices or any(is_gpu(device) for device in devices))
    return ModelActivations(model, options)


_NOW = ("kept_bytes", "host_bytes", "drive_bytes")  # the other counters add up
