"""Offload the tensors that autograd saves for backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast.sizes import Size
from ballast.tiers import IN_FLIGHT

if TYPE_CHECKING:
    from ballast.torch.activations.saved_activations import SavedActivations


class OffloadedActivations:
    """What `offload_activations()` returns: a block that can be entered again, in each step."""

    def __init__(self, saved: SavedActivations):
        self._saved = saved

    def __enter__(self) -> OffloadedActivations:
        from ballast._torch_compat import push_saved_tensor_hooks

        push_saved_tensor_hooks(*self._saved.hooks)
        return self

    def __exit__(self, *_: object) -> None:
        from ballast._torch_compat import pop_saved_tensor_hooks

        pop_saved_tensor_hooks()

    def counters(self) -> dict[str, float]:
        """Return the bytes that were saved, loaded, written and read so far, those that are kept now, the memory of buffers on
        the host, the size of the file on the drive, and the seconds that callers waited."""
        return self._saved.counters()


def offload_activations(to: str, *, min_bytes: Size = "256KiB", in_flight: Size = IN_FLIGHT) -> OffloadedActivations:
    """Keep the tensors that autograd saves inside the `with` block on the host or on a drive until backward.

    >>> import torch
    >>> layer = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh())
    >>> activations = offload_activations("nvme:.")
    >>> with activations:
    ...     loss = layer(torch.ones(512, 256)).sum()
    >>> activations.counters()["kept_bytes"]
    1048576.0
    >>> loss.backward()
    >>> activations.counters()["kept_bytes"]
    0.0

    Make one for a training, and enter it around each forward pass and its loss: its memory and its file are used again.
    Gradients have the same bits as without it. Parameters and their views stay. `ballast.wrap(activations=)` does the same
    for each call of a model.

    to          "host", or "nvme:DIRECTORY" for a file without a name, which ends with the process. A CPU's activations go to
                drives only
    min_bytes   smaller tensors stay
    in_flight   size of the host buffers for writes and prefetches, and on a GPU of the tensors being copied; at least 2MiB

    Raises B2202 in forward or backward if the drive is full, and B3202 in backward if it returns other bytes.
    """
    from ballast.torch.activations.saved_activations import SavedActivations
    from ballast.torch.gpu import current_device, is_gpu
    from ballast.wrapper.activation_options import read_activation_options, require_away_from

    options = read_activation_options(to, min_bytes=min_bytes, in_flight=in_flight)
    require_away_from(options, on_gpu=is_gpu(current_device()))
    return OffloadedActivations(SavedActivations(options))
