"""Offload the activations of each call of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ballast._torch_compat import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from ballast.checks import refuse
from ballast.wrapper.activation_options import ActivationOptions, require_away_from
from ballast.wrapper.deferred_init import is_on_meta
from ballast.wrapper.gpu import is_gpu
from ballast.wrapper.hooks import ModuleHook
from ballast.wrapper.saved_activations import SavedActivations


class ModelActivations:
    """Hooks on the calls of a model, until remove().

    In a call inside of other hooks, such as those of activation checkpointing, these decide what is saved. The hooks of stage 3
    come on top of those that are active here, and pass on what is no parameter."""

    def __init__(self, model: torch.nn.Module, options: ActivationOptions):
        self._saved = SavedActivations(options)
        self._calls: list[bool] = []  # of those that have not ended: whether hooks were pushed for it
        self._hooks = [
            model.register_forward_pre_hook(ModuleHook(self._begin_call)),
            model.register_forward_hook(ModuleHook(self._end_call), always_call=True),
        ]
        self._before: dict[str, float] = {}  # the counters at the end of the last step
        self._figures: dict[str, float] = {}

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
        self._figures = {
            f"activation_bytes/{name.removesuffix('_bytes')}": value - (0.0 if name in _NOW else self._before.get(name, 0.0))
            for name, value in now.items()
            if name.endswith("_bytes")
        }
        self._figures["activation_seconds"] = now.get("waited_seconds", 0.0) - self._before.get("waited_seconds", 0.0)
        self._before = now

    def figures(self) -> dict[str, float]:
        """Return figures of the last step."""
        return self._figures

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def offload_activations_of(
    model: torch.nn.Module | None, parameters: Sequence[torch.Tensor], options: ActivationOptions | None
) -> ModelActivations | None:
    """Offload the activations of the model that has these parameters, if there are options for it."""
    if options is None:
        return None
    if model is None:
        refuse("cannot offload activations without a model", needed="ballast.wrap(optimizer, model, activations=...)")
    devices = {each.device for each in parameters if not is_on_meta(each)}
    require_away_from(options, on_gpu=not devices or any(is_gpu(device) for device in devices))
    return ModelActivations(model, options)


_NOW = ("kept_bytes", "host_bytes", "drive_bytes")  # the other counters add up
