"""Parameters and moments of another program's checkpoint become those of a training."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ballast import _core
from ballast.checks import refuse
from ballast.checkpoint.agreement import Agreement
from ballast.checkpoint.foreign import Source, source_of
from ballast.checkpoint.holdings import buffers_by_name, parameter_names, parameters_by_name
from ballast.wrapper.partition import Partition
from ballast.wrapper.session import Session
from ballast.wrapper.waiting import expect

log = logging.getLogger("ballast")


class Adopting:
    """All ranks do this together; each has one whole tensor at a time. The options of parameter groups stay the optimizer's."""

    def __init__(self, directory: Path, model: torch.nn.Module, session: Session):
        self._session = session
        self._together = Agreement(session.group, "loading a checkpoint")
        self._parameters = parameters_by_name(model, session)
        self._names = parameter_names(model, session)
        self._buffers = buffers_by_name(model)
        self._moments = {kind.name: name for kind, name in session.names_of_moments()}
        self._now: tuple[str, dict[str, torch.Tensor]] = ("", {})
        with self._together.attempt():
            session.require_here()
            if session.has_own_step:
                refuse(
                    f"another program's checkpoint was loaded into {type(session.optimizer).__name__}, whose state is its own",
                    needed="an optimizer that the library has a rule for, such as AdamW",
                )
            self._source: Source = source_of(directory)
            self._require_all()
            made = {name: self._source.steps(name) for name in self._trained()}
        self._together.settle()
        self._made = {id(self._parameters[name]): steps for name, steps in made.items()}

    def run(self) -> None:
        self._session.optimizer.zero_grad()
        steps = max(self._made.values(), default=0)
        expect(parameter for name, parameter in self._parameters.items() if self._source.has(name))
        partition = self._session.begin_from(self._made, steps, {})

        def change(part: _core.StatePart) -> None:
            with self._together.attempt():
                if self._together.error is None:
                    self._change(part, self._names[id(partition.member_of(part).parameter)])

        partition.change_parts(change, steps, self._together.settle)
        with self._together.attempt():
            self._fill_the_rest(partition)
        self._together.settle()
        self._session.is_half_loaded = False

    def _trained(self) -> list[str]:
        return [self._names[id(each)] for _, each in self._session.parameters() if each.requires_grad]

    def _require_all(self) -> None:
        for name in self._trained():
            if not self._source.has(name):
                refuse("a checkpoint lacks a parameter that is trained", where=name, needed="all of them, under these names")
            found, expected = self._source.elements(name), self._parameters[name].numel()
            if found != expected:
                refuse(f"a checkpoint holds a tensor of {found} elements", where=name, needed=f"{expected} elements")
            for moment in self._moments.values():
                if not self._source.has_moment(name, moment):
                    refuse(f"a checkpoint lacks the optimizer's {moment}", where=name, needed="that of the same optimizer")
        kept = [name for name in {**self._parameters, **self._buffers} if not self._source.has(name)]
        if kept and self._session.group.rank == 0:
            log.warning("the checkpoint does not hold, so these stay as they are: %s", ", ".join(sorted(kept)))

    def _change(self, part: _core.StatePart, name: str) -> None:
        """What the source has of the part, in fp32; a frozen parameter that it lacks stays as it is."""
        if not self._source.has(name):
            return
        tensors = self._tensors_of(name, part.frozen)
        end = part.first + part.count
        own = {kind: values[part.first : end].to(torch.float32).contiguous() for kind, values in tensors.items()}
        at = {kind: values.data_ptr() for kind, values in own.items()}
        part.copy_from(
            _core.StatePart(
                dtype=_core.DType.fp32,
                parameter=at["parameter"],
                momentum=at.get("momentum", 0),
                variance=at.get("variance", 0),
                count=part.count,
            )
        )

    def _tensors_of(self, name: str, frozen: bool) -> dict[str, torch.Tensor]:
        """Flat. Parts of a tensor come one after the other."""
        if self._now[0] != name:
            tensors = {"parameter": self._source.parameter(name).reshape(-1)}
            for kind, moment in () if frozen else self._moments.items():
                tensors[kind] = self._source.moment(name, moment).reshape(-1)
            self._now = (name, tensors)
        return self._now[1]

    def _fill_the_rest(self, partition: Partition) -> None:
        partitioned = {id(member.parameter) for member in partition.all_members}
        outside = {name: each for name, each in self._parameters.items() if id(each) not in partitioned}
        for name, tensor in {**outside, **self._buffers}.items():
            if self._source.has(name):
                tensor.data.copy_(self._source.parameter(name).view(tensor.shape))
