"""The class of a wrapped optimizer: a subclass of the user's own class and of WrappedOptimizer."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from ballast._torch_compat import count_step, leave_uncounted, without_torch_function
from ballast.checks import refuse, refuse_unsupported
from ballast.torch.calls.hooks import Call
from ballast.torch.gradients.taken_gradients import TakenGradient
from ballast.torch.training.metrics import read_throughput
from ballast.torch.training.model_and_optimizer import require_own
from ballast.torch.training.training import Training
from ballast.torch.updates.sharded_state import PART, require_local_shard, warn_of_local_shard


class WrappedOptimizer(Optimizer):
    """The methods that `ballast.wrap()` adds to an optimizer. All else comes from its own class."""

    _ballast: Training
    _has_warned_of_shard = False  # state_dict() has warned
    state: dict[torch.Tensor, dict[str, Any]]
    _step_supports_amp_scaling = True  # a GradScaler lets step() unscale, and decide whether to skip

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step on all ranks with the gradients since the last step."""
        self._ballast.require_open("call step()")
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
        """Clear all gradients, and discard those since the last step."""
        self._ballast.discard(forget_zeros=set_to_none)
        with without_torch_function():  # it would be called for each of thousands of sharded parameters
            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None and set_to_none:
                        parameter.grad = None
                    elif isinstance(gradient, TakenGradient):
                        gradient.zero_()
        zero_grad = super().zero_grad
        uses_no_values = getattr(zero_grad, "__func__", None) is Optimizer.zero_grad
        with without_torch_function() if uses_no_values else nullcontext():
            zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients, and clip it to `max_norm` in the next step. All ranks call it together."""
        self._ballast.require_open("call clip_grad_norm_()")
        if math.isnan(max_norm):
            refuse(f"cannot clip gradients to a norm of {max_norm}", needed="a norm that is not negative")
        if not norm_type >= 0.0 or (norm_type != 2.0 and self._ballast.ranks.model_group is not None):
            needed = "2.0 with parts of the model in mesh=, else a number that is not negative"
            refuse(f"cannot compute a norm of order {norm_type} of all gradients", needed=needed)
        with Call(self._ballast.calls, "clip_grad_norm_()"):
            norm = 0.0 if self._ballast.has_trained_nothing else self._ballast.partition().gradient_norm(float(norm_type))
        coefficient = min(1.0, max_norm / (norm + 1e-6))
        if coefficient < 1.0 and math.isfinite(coefficient):
            self._ballast.partition().gradients.clip_all(coefficient)
        return torch.tensor(norm, dtype=torch.float32, device="cpu")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Sum gradients of backward passes inside this `with` block on this rank, in their own format. They are reduced
        with those of the first pass after the block, or with the step. This needs memory for all gradients,
        unsharded."""
        training = self._ballast
        before, training.accumulates_locally = training.accumulates_locally, True
        try:
            yield
        finally:
            training.accumulates_locally = before

    def on_any_rank(self, happened: bool) -> bool:
        """Return whether something happened on any rank. All ranks call it together, between steps."""
        return any(self._ballast.require_open("call on_any_rank()").group.all_reduce([int(happened)]))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as to any optimizer, also between steps."""
        self._ballast.require_open("call add_param_group()")
        super().add_param_group(param_group)
        try:
            mine = self.param_groups[-1]["params"]
            require_own("cannot add a parameter group", self._ballast.given, self._ballast, mine)
        except BaseException:
            self.param_groups.pop()
            raise
        self._ballast.watch()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard in the usual form of a state_dict(). No other rank takes part. Warn once if the shard is not
        all of the state.

        It is live, as torch's: each entry is read when it is used, and then has the values of that time. `copy.deepcopy()` and
        `torch.save()` make a snapshot. A parameter that no step has updated has no entry.
        """
        training = self._ballast.require_open("call state_dict()")
        state: dict[str, Any] = super().state_dict()
        group = training.group
        state["state"] = training.state.without_unbegun(state["state"], training.current)
        if group.size > 1 and training.stage != 0:
            state[PART] = {"rank": group.rank, "ranks": group.size}
            if state["state"] and not self._has_warned_of_shard:
                self._has_warned_of_shard = True
                warn_of_local_shard(group)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict() of this optimizer, or of one that is not wrapped. All ranks call it together."""
        state: dict[int, dict[str, Any]] = {}  # state by id of the parameter

        def keep(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            self._require_possible(loaded)
            numbers = [number for group in loaded["param_groups"] for number in group["params"]]
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            ids = dict(zip(numbers, map(id, parameters)))
            state.update({ids[number]: values for number, values in loaded["state"].items() if number in ids})
            self._ballast.require_state_loadable(state)
            return {**loaded, "state": {}}  # torch would round it to the format of the parameters

        self._ballast.require_open("call load_state_dict()")
        require_local_shard(state_dict, self._ballast.group)
        hook = self.register_load_state_dict_pre_hook(keep)  # it runs after all others
        shown = self.state
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self.state = shown
        self._ballast.load(state)

    def _require_possible(self, loaded: dict[str, Any]) -> None:
        """Refuse options with which this optimizer cannot make a step, before torch sets them."""
        groups = loaded["param_groups"]
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._ballast.options_to_set(options)
        known = {number for group in groups for number in group["params"]}
        if unknown := [number for number in loaded["state"] if number not in known]:
            refuse(
                "cannot load a state_dict(): it has state of a parameter that is in none of its groups",
                where=f'state_dict["state"][{unknown[0]!r}]',
                needed="state of the parameters in param_groups",
            )
        names = {name for _, name in self._ballast.names_of_moments()}
        for number, values in loaded["state"].items():
            if values and (missing := sorted(names - {*values})):
                refuse(
                    f"cannot load a state_dict(): it has no {missing[0]} of a parameter",
                    where=f'state_dict["state"][{number!r}]',
                    needed=", ".join(sorted(names)),
                    available=", ".join(map(str, values)),
                    remedy="Leave out all of the parameter's state, and it begins anew.",
                )

    def exchange(self) -> None:
        """Exchange all parameters with the other hosts now, as at the end of a training. All ranks of all hosts call it
        together, between steps. It needs `outer=` in wrap().

        It is an additional step of the outer optimizer, with its learning rate and momentum. Fragments that were exchanged
        after the last step stay as they are."""
        self._ballast.require_open("call exchange()").exchange()

    @property
    def steps(self) -> int:
        """The number of updates so far, including those before a restart."""
        return self._ballast.steps

    def metrics(self) -> dict[str, float]:
        """Return figures of the last step in a flat dictionary, for a progress bar or a logger. A rank may call it alone."""
        return self._ballast.metrics()

    def set_tokens_per_step(self, count: int, *, flops_per_token: float | None = None, peak_flops: float | None = None) -> None:
        """Tell how many tokens this rank trains on in a step, which adds `tokens_per_second`, `model_flops_per_second` and
        `mfu` to metrics(). It holds until the next call. A rank may call it alone.

        `flops_per_token` replaces six flops for each element of a trained matrix and four for a frozen one: give it for a
        mixture of experts, or to count attention between tokens. `peak_flops` replaces the dense bf16 rate by the data
        sheet of the GPU; on a CPU, and on a GPU that Ballast does not know, there is no `mfu` without it.
        """
        self._ballast.throughput = read_throughput(count, flops_per_token, peak_flops)

    def memory(self) -> str:
        """Return a table of the bytes that this rank keeps, by owner and tier."""
        return self._ballast.require_open("call memory()").ledger()

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of this rank's operations, for ui.perfetto.dev. It needs `ballast.Tuning(timeline=True)`."""
        Path(path).write_text(self._ballast.require_open("call write_timeline()").partition_now().chrome_trace())

    def offload(self, *, parameters: bool = True) -> None:
        """Free the device's memory for others until reload(). All ranks call it together, between steps.

        With `parameters=False`, below stage 3, parameters stay on the device, and are used under torch.no_grad(). All
        else goes to the host; it stays where it is if the device is the host.

        >>> import ballast
        >>> optimizer = ballast.wrap(torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))]))
        >>> optimizer.offload()
        >>> optimizer.reload()
        """
        self._ballast.require_open("call offload()").offload(parameters)

    def reload(self) -> None:
        """Bring everything back to the device, with the same bits. All ranks call it together."""
        self._ballast.require_open("call reload()").reload()

    def close(self, *, gather: bool = True) -> None:
        """Release all memory and files. All ranks call it together.

        The parameters keep their values, in torch's memory: each rank then has all of them. Where they do not fit there, the
        call is refused (B2004), and nothing is changed. With `gather=False` nothing is gathered or copied, and the model loses
        its values: call `ballast.save()` before, unless drives keep a run. Another model that is constructed in the same way
        gets them from `ballast.load_checkpoint()`, or from the run.

        The optimizer has no state any more, so its methods refuse to run, and a new optimizer can be wrapped for the same
        parameters. If an optimizer is deleted instead, parameters that are partitioned over ranks lose their values.
        """
        self._ballast.close(together=True, gather=gather)
        self.state.clear()

    def __del__(self, _is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close the training, unless the interpreter is shutting down: then the hook at exit has closed it before."""
        if "_ballast" in self.__dict__ and not _is_exiting():
            self._ballast.close(together=False)
            self.state.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse_copy("copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy("pickle")


def _refuse_copy(what: str) -> NoReturn:
    refuse_unsupported(
        f"cannot {what} a wrapped optimizer: Ballast keeps its state",
        needed="its state_dict()",
        remedy="Copy the model, make an optimizer for the copy, wrap that, and load the state_dict() into it.",
    )


def class_for(kind: type[Optimizer]) -> type[WrappedOptimizer]:
    """Return a subclass of the user's own class, with its name."""
    made: Any = type(kind.__name__, (WrappedOptimizer, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    made.step = Optimizer.profile_hook_step(WrappedOptimizer.step)  # runs the hooks before and after a step
    made.step.hooked = True
    leave_uncounted(made.step)
    wrapped: type[WrappedOptimizer] = made
    return wrapped


def wrapped_in(optimizer: object) -> WrappedOptimizer | None:
    """Return the wrapped optimizer: this one, or the one inside an optimizer of Accelerate or Lightning."""
    found = (each for each in (optimizer, getattr(optimizer, "optimizer", None)) if isinstance(each, WrappedOptimizer))
    return next(found, None)


def require_wrapped(optimizer: object, what: str) -> WrappedOptimizer:
    """Return the wrapped optimizer. `what` says what it is needed for."""
    if (found := wrapped_in(optimizer)) is None:
        kind = type(optimizer).__name__
        refuse(f"cannot {what}: this {kind} is not wrapped", needed="an optimizer of ballast.wrap()")
    return found
