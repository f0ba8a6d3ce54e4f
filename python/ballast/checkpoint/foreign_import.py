"""Load the parameters and moments of a checkpoint that another program wrote."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ballast import _core
from ballast.agreement import Agreement
from ballast.checkpoint.foreign import Source, source_of
from ballast.checkpoint.inventory import buffers_by_name, parameter_names, parameters_by_name
from ballast.checks import refuse
from ballast.wrapper.checkpoint_access import CheckpointAccess
from ballast.wrapper.deferred_params import expect, expect_buffers, require_expected
from ballast.wrapper.partition import Partition
from ballast.wrapper.units import BYTES, Member

log = logging.getLogger("ballast")


class ForeignImport:
    """One import into one model and optimizer. All ranks do this together, and each reads one full tensor at a time.
    The options of the parameter groups do not change."""

    def __init__(self, directory: Path, model: torch.nn.Module, access: CheckpointAccess):
        self._access = access
        self._model = model
        self._agreement = Agreement(access.group, "loading a checkpoint")
        self._parameters = parameters_by_name(model, [access])
        self._names = parameter_names(model, [access])
        self._buffers = buffers_by_name(model)
        self._moments = {kind.name: name for kind, name in access.names_of_moments()}
        self._current: tuple[str, dict[str, torch.Tensor]] = ("", {})
        with self._agreement.attempt():
            access.require_not_gathered("cannot load a checkpoint")
            if access.has_own_step:
                refuse(
                    f"cannot load another program's checkpoint into {type(access.optimizer).__name__}: its step is its own",
                    needed="an optimizer that the library has a rule for, such as AdamW",
                )
            trained = self._trained()
            self._source: Source = source_of(directory, trained, {**self._parameters, **self._buffers})
            self._require_tensors(trained)
            require_expected(model, (each for name, each in self._buffers.items() if self._has(name)))
            self._fresh = self._without_state(trained)
            self._require_moments([name for name in trained if name not in self._fresh])
            made = {name: self._steps(name) for name in trained}
        self._agreement.settle()
        self._steps_made = {id(self._parameters[name]): steps for name, steps in made.items()}

    def run(self) -> None:
        self._access.optimizer.zero_grad()
        steps = max(self._steps_made.values(), default=0)
        expect(parameter for name, parameter in self._parameters.items() if self._has(name))
        expect_buffers(self._model)
        self._buffers = buffers_by_name(self._model)
        partition = self._access.begin_from(self._steps_made, steps, {})

        def change(part: _core.StatePart) -> None:
            with self._agreement.attempt():
                if self._agreement.error is None:
                    self._change(part, partition.member_of(part))

        partition.change_shards(change, steps, self._agreement.settle)
        with self._agreement.attempt():
            self._fill_the_rest(partition)
        self._agreement.settle()
        self._access.finish_loading()

    def _trained(self) -> list[str]:
        return [self._names[id(each)] for _, each in self._access.parameters() if each.requires_grad]

    def _has(self, name: str) -> bool:
        return self._source.shape(name) is not None

    # --- Before anything changes ---

    def _require_tensors(self, trained: list[str]) -> None:
        for name in trained:
            if not self._has(name):
                refuse("the checkpoint lacks a parameter that is trained", where=name, needed="all of them, under these names")
        kept = []
        for name, tensor in {**self._parameters, **self._buffers}.items():
            if self._has(name):
                self._require_shape(name, tensor)
            else:
                kept.append(name)
        self._warn("these tensors stay as they are, because the checkpoint does not hold them: %s", kept)

    def _without_state(self, trained: list[str]) -> set[str]:
        """Return the parameters without optimizer state: torch has none for a parameter that never got a gradient. If
        all of them lack it, the state itself is missing."""
        without = [name for name in trained if not self._source.has_state(name)] if self._moments else []
        if len(without) == len(trained):
            return set()
        self._warn("the optimizer state of these parameters begins at zero, because the checkpoint has none: %s", without)
        return set(without)

    def _require_moments(self, names: list[str]) -> None:
        for name in names:
            for moment in self._moments.values():
                if self._source.shape(name, moment) is None:
                    refuse(f"the checkpoint lacks the optimizer's {moment}", where=name, needed="one of the same optimizer")
                self._require_shape(name, self._parameters[name], moment)

    def _require_shape(self, name: str, tensor: torch.Tensor, moment: str = "") -> None:
        found, expected = self._source.shape(name, moment), tuple(tensor.shape)
        if found != expected and not (self._source.may_be_flat and found == (tensor.numel(),)):
            what = f"the checkpoint holds {moment or 'a tensor'} of shape {found}"
            refuse(what, where=name, needed=f"{expected}, the shape in the model")

    def _steps(self, name: str) -> int:
        """Return the number of steps that have trained the parameter. Without it, bias correction would take the second
        moments for those of the first step."""
        if name in self._fresh:
            return 0
        found = self._source.steps(name)
        if found is None and "variance" in self._moments:
            refuse(
                "the checkpoint holds moments, but not the number of steps that made them",
                where=name,
                needed="both: the next step corrects the moments by that number",
                remedy="DeepSpeed's ds_to_universal writes it to zero/optimizer_state.pt, torch next to the moments.",
            )
        return found or 0

    def _warn(self, words: str, names: list[str]) -> None:
        if names and self._access.group.rank == 0:
            log.warning(words, ", ".join(sorted(names)))

    # --- The change ---

    def _change(self, part: _core.StatePart, member: Member) -> None:
        """Copy this shard from the source, in fp32. A frozen parameter that the source lacks stays as it is."""
        name, end = self._names[id(member.parameter)], part.first + part.count
        if not self._has(name):
            return
        tensors = self._tensors_of(name, part.frozen)
        if member.is_opaque:
            self._copy_bytes(part, tensors["parameter"], member)
            return
        shard = {kind: values[part.first : end].to(torch.float32).contiguous() for kind, values in tensors.items()}
        at = {kind: values.data_ptr() for kind, values in shard.items()}
        part.copy_from(
            _core.StatePart(
                dtype=_core.DType.fp32,
                parameter=at["parameter"],
                momentum=at.get("momentum", 0),
                variance=at.get("variance", 0),
                count=part.count,
            )
        )

    def _copy_bytes(self, part: _core.StatePart, values: torch.Tensor, member: Member) -> None:
        if values.dtype != member.parameter.dtype:
            what = f"cannot load a packed parameter of {member.parameter.dtype} from a checkpoint that has {values.dtype}"
            refuse(what, where=member.name)
        shard = values.contiguous().view(BYTES)[part.first : part.first + part.count].contiguous()
        part.copy_from(
            _core.StatePart(dtype=_core.DType.u8, parameter=shard.data_ptr(), momentum=0, variance=0, count=part.count)
        )

    def _tensors_of(self, name: str, frozen: bool) -> dict[str, torch.Tensor]:
        """Return the flat tensors of a parameter. The shards of a parameter come one after the other, so the
        tensors of the last parameter are kept."""
        if self._current[0] != name:
            tensors = {"parameter": self._source.parameter(name).reshape(-1)}
            for kind, moment in () if frozen else self._moments.items():
                nothing = torch.zeros((), dtype=torch.float32, device="cpu").expand_as(tensors["parameter"])
                tensors[kind] = nothing if name in self._fresh else self._source.moment(name, moment).reshape(-1)
            self._current = (name, tensors)
        return self._current[1]

    def _fill_the_rest(self, partition: Partition) -> None:
        partitioned = {id(member.parameter) for member in partition.all_members}
        outside = {name: each for name, each in self._parameters.items() if id(each) not in partitioned}
        for name, tensor in {**outside, **self._buffers}.items():
            if self._has(name):
                tensor.data.copy_(self._source.parameter(name).view(tensor.shape))
