"""The class of a wrapped optimizer: the user's own, and this."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ballast import _core
from ballast._torch_compat import count_step, leave_uncounted
from ballast.checks import fail
from ballast.wrapper.session import Session
from ballast.wrapper.state import PART, require_own_part, warn_of_own_part


class WrappedOptimizer(Optimizer):
    """What `ballast.wrap()` adds to an optimizer. Everything else is as its own class has it."""

    _ballast: Session
    _has_warned_of_part = False  # by state_dict()
    state: dict[torch.Tensor, dict[str, Any]]
    _step_supports_amp_scaling = True  # a GradScaler leaves unscaling, and the decision to skip, to step()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all ranks with the gradients since the last one."""
        self._ballast.plans.require_open("call step()")
        count_step(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._ballast.step(
            loss_scale=1.0 if scale is None else float(scale),
            found_inf=found_inf is not None and bool(found_inf),
        )
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients. Those that were computed since the last step then count for nothing."""
        self._ballast.discard()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and (set_to_none or type(parameter.grad) is not torch.Tensor):
                    parameter.grad = None
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """The norm of all gradients, which the next step clips to `max_norm`. All ranks call it together."""
        self._ballast.plans.require_open("call clip_grad_norm_()")
        norm = self._ballast.partition().gradient_norm()
        coefficient = min(1.0, max_norm / (norm + 1e-6))
        if coefficient < 1.0 and math.isfinite(coefficient):
            self._ballast.partition().scale_all(coefficient)
        return torch.tensor(norm)

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of backward passes inside of this `with` block are summed on this rank, in their own format, and reduced
        together with those of the first pass after it, or with the step. Costs memory for all gradients, whole."""
        return self._ballast.holding()

    def on_any_rank(self, happened: bool) -> bool:
        """Whether it has on any rank. All ranks call it together, between steps."""
        self._ballast.plans.require_open("call on_any_rank()")
        return any(self._ballast.group.all_reduce([int(happened)]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The same as for any optimizer, also between steps."""
        self._ballast.plans.require_open("call add_param_group()")
        super().add_param_group(param_group)
        self._ballast.plans.watch()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard in the form of any optimizer's state_dict(). No other rank takes part, and nothing is read:
        what is in it is read when it is used. Warn once where that is not all of the state."""
        self._ballast.plans.require_open("call state_dict()")
        state: dict[str, Any] = super().state_dict()
        group = self._ballast.group
        if group.size > 1 and self._ballast.options.stage != 0:
            state[PART] = {"rank": group.rank, "ranks": group.size}
            if state["state"] and not self._has_warned_of_part:
                self._has_warned_of_part = True
                warn_of_own_part(group)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state_dict() of this optimizer or of the plain one, on all ranks together."""
        kept: dict[Any, Any] = {}

        def keep(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            kept.update(loaded["state"])
            return {**loaded, "state": {}}  # torch would round it to the format of the parameters

        self._ballast.plans.require_open("call load_state_dict()")
        require_own_part(state_dict, self._ballast.group)
        hook = self.register_load_state_dict_pre_hook(keep)  # the last of all
        state = self.state
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self.state = state
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        ours = [parameter for group in self.param_groups for parameter in group["params"]]
        self._ballast.plans.load({id(ours[saved.index(number)]): values for number, values in kept.items()})

    @property
    def steps(self) -> int:
        """Updates made so far, those before a restart included."""
        return self._ballast.plans.steps

    def metrics(self) -> dict[str, float]:
        """Of the last step: a flat dictionary of numbers, for a progress bar or a logger."""
        return self._ballast.metrics()

    def memory(self) -> str:
        """A table: how many bytes this rank keeps for what, in which tier."""
        self._ballast.plans.require_open("call memory()")
        return self._ballast.ledger()

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """What ran when on this rank, for ui.perfetto.dev. Kept where `timeline=True` was given to wrap()."""
        self._ballast.plans.require_open("call write_timeline()")
        Path(path).write_text(self._ballast.plans.now().chrome_trace())

    def offload(self, *, parameters: bool = True) -> None:
        """Between steps, on all ranks together: the memory that is kept on the device (all of it, or what is no parameter) is
        free for others, until reload(). Parameters that stay, which they can below stage 3, are used under torch.no_grad().
        What has to be kept goes to the host; where the device is the host, it stays.

        >>> import ballast
        >>> optimizer = ballast.wrap(torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))]))
        >>> optimizer.offload()
        >>> optimizer.reload()
        """
        self._ballast.plans.require_open("call offload()")
        self._ballast.plans.offload(parameters)

    def reload(self) -> None:
        """Everything is on the device again, bit by bit. All ranks do this together."""
        self._ballast.plans.require_open("call reload()")
        self._ballast.plans.reload()

    def close(self) -> None:
        """Give all memory and files back, on all ranks together. The parameters stay as they are, whole. The optimizer has no
        state any more: what needs it is refused from now on, and a new one can be wrapped for the same parameters. One that is
        deleted instead leaves parameters that are partitioned over ranks without their numbers."""
        self._ballast.close(together=True)
        self.state.clear()

    def __del__(self, _is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Nothing is called once modules are being taken apart: the session has been closed before that, by its hook."""
        if "_ballast" in self.__dict__ and not _is_exiting():
            self._ballast.close(together=False)
            self.state.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy("copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy("pickle")


def _refuse_copy(what: str) -> NoReturn:
    fail(
        "unsupported",
        _core.Problem(
            what=f"cannot {what} a wrapped optimizer: Ballast keeps its state",
            needed="its state_dict()",
            remedy="Copy the model, make an optimizer for the copy, wrap that, and load the state_dict() into it.",
        ),
    )


def class_for(kind: type[Optimizer]) -> type[WrappedOptimizer]:
    """A subclass of the user's own class, with its name."""
    made: Any = type(kind.__name__, (WrappedOptimizer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    made.step = Optimizer.profile_hook_step(WrappedOptimizer.step)  # with the hooks before and after a step
    made.step.hooked = True
    leave_uncounted(made.step)
    wrapped: type[WrappedOptimizer] = made
    return wrapped
