"""Load the parameters and moments of a checkpoint that another program wrote, with the reader for its files."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ballast import _core
from ballast.checkpoint.deepspeed import STAGE_0, Universal, Zero, folder_of, is_sharded
from ballast.checkpoint.distributed import content_of
from ballast.checkpoint.kinds import kind_of
from ballast.checkpoint.recorded import Recorded
from ballast.checkpoint.sources import Keyed, Source, content_of_files, only_model_in, plain_torch_alone, steps_made
from ballast.checkpoint.tensors import LOADING, buffers_by_name, parameter_names, parameters_by_name, state_part, warn_of_left
from ballast.checkpoint.torch_file import StandIn
from ballast.checks import refuse
from ballast.ranks import Agreement
from ballast.torch.memory import BYTES
from ballast.torch.parameters.deferred_parameters import expect, expect_buffers, require_expected
from ballast.torch.parameters.stored_tensors import StoredTensor, stored_part
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.parts import full_shape
from ballast.torch.training.partition import Partition
from ballast.torch.training.training import Training
from ballast.torch.updates.rules import is_same, set_options

log = logging.getLogger("ballast")
ZERO = torch.zeros(1, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Names:
    """What a reader may know of the model and its optimizer, which a checkpoint may have under any keys."""

    trained: Sequence[str]  # the names that the checkpoint must have
    shapes: Mapping[str, tuple[int, ...]]  # all tensors of the model
    groups: Sequence[Sequence[str]] | None = None  # the names in each group of the live optimizer


def source_of(path: Path, names: Names | None = None) -> Source:
    """Return the reader of a checkpoint of another program. Without `names`, it must hold one model."""
    kind, shapes = kind_of(path), None if names is None else names.shapes
    if kind == "deepspeed":
        folder = folder_of(path)
        if kind_of(folder) == "universal":
            return Universal(folder, shapes)
        if is_sharded(folder):
            return Zero(folder, shapes or {})
        return _torch_source(folder / STAGE_0, names)  # the file of torch.save() with the model
    if kind == "universal":
        return Universal(path, shapes)
    if kind == "distributed":
        content = content_of(path)
        return only_model_in(content) if names is None else Keyed(content, names.trained, names.shapes)
    if kind == "torch":
        return _torch_source(path, names)
    if kind == "safetensors":
        refuse(
            "cannot load a training from safetensors files: they hold no optimizer state",
            where=str(path),
            needed="a checkpoint with the optimizer's state, such as the folder with an optimizer.pt too",
            remedy="ballast.load(model, files) reads parameters.",
        )
    if kind == "run":
        return Recorded(path)
    raise AssertionError(kind)


def _torch_source(path: Path, names: Names | None) -> Keyed:
    if names is None:
        return plain_torch_alone(path)
    return Keyed(content_of_files(path), names.trained, names.shapes, names.groups)


class ForeignImport:
    """One import into one model and optimizer. All ranks do this together. Each reads its shards, or one full tensor at a time
    where the format has only those."""

    def __init__(self, directory: Path, model: torch.nn.Module, access: Training):
        self._access = access
        self._model = model
        self._agreement = Agreement(access.group, LOADING)
        self._parameters = parameters_by_name(model, [access])
        self._names = parameter_names(model, [access])
        self._buffers = buffers_by_name(model)
        self._moments = {kind.name: name for kind, name in access.names_of_moments()}
        self._current: tuple[str, dict[str, StoredTensor]] = ("", {})
        with self._agreement.settled():
            access.require_loadable()
            if access.has_custom_step:
                refuse(
                    f"cannot load another program's checkpoint into {type(access.optimizer).__name__}: its step is its own",
                    needed="an optimizer that the library has a rule for, such as AdamW",
                )
            trained = [self._names[id(each)] for _, each in access.parameters() if each.requires_grad]
            shapes = {name: tuple(full_shape(each)) for name, each in {**self._parameters, **self._buffers}.items()}
            groups = [[self._names[id(each)] for each in group["params"]] for group in access.optimizer.param_groups]
            self._source: Source = source_of(directory, Names(trained, shapes, groups))
            self._require_tensors(trained)
            require_expected(model, (each for name, each in self._buffers.items() if self._has(name)))
            self._fresh = self._without_state(trained)
            self._require_moments([name for name in trained if name not in self._fresh])
            made = {name: self._steps(name) for name in trained}
            self._options = access.options_to_set(self._saved_options())
            self._extra = self._source.extra()
        self._steps_made = {id(self._parameters[name]): steps for name, steps in made.items()}

    def run(self) -> Any:
        self._access.optimizer.zero_grad()
        self._warn_of_options()
        set_options(self._access.optimizer.param_groups, self._options)
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
        with self._agreement.settled():
            self._fill_the_rest(partition)
        self._access.finish_loading()
        return self._extra

    def _saved_options(self) -> list[dict[str, Any]]:
        """Return the options that the checkpoint has for each group of the optimizer, where its parameters agree on them."""
        saved = []
        for number, group in enumerate(self._access.optimizer.param_groups):
            found = [options for each in group["params"] if (options := self._source.options(self._names[id(each)]))]
            differ = {key for options in found for key in options if not is_same(options[key], found[0].get(key))}
            self._warn(f"param_groups[{number}] keeps options that its parameters disagree on in the checkpoint: %s", [*differ])
            options = found[0] if found else {}
            saved.append({k: v for k, v in options.items() if k not in differ and not isinstance(v, StandIn)})
        return saved

    def _warn_of_options(self) -> None:
        """Warn of options that are not those of the script any more."""
        changed = [
            f"{key}={new[key]} instead of {group[key]} in param_groups[{number}]"
            for number, (group, new) in enumerate(zip(self._access.optimizer.param_groups, self._options))
            for key in new
            if key in group and not is_same(group[key], new[key])
        ]
        self._warn("the optimizer continues with options of the checkpoint: %s", changed)

    def _has(self, name: str) -> bool:
        return self._source.tensor(name) is not None

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
        warn_of_left(kept, self._access)

    def _without_state(self, trained: list[str]) -> set[str]:
        """Return the parameters without optimizer state: torch has none for a parameter that never got a gradient. If
        all of them lack it, the state itself is missing."""
        without = [name for name in trained if not self._source.state(name)] if self._moments else []
        if len(without) == len(trained):
            return set()
        self._warn("the optimizer state of these parameters begins at zero, because the checkpoint has none: %s", without)
        return set(without)

    def _require_moments(self, names: list[str]) -> None:
        for name in names:
            for moment in self._moments.values():
                if self._source.tensor(name, moment) is None:
                    refuse(f"the checkpoint lacks the optimizer's {moment}", where=name, needed="one of the same optimizer")
                self._require_shape(name, self._parameters[name], moment)

    def _require_shape(self, name: str, tensor: torch.Tensor, moment: str = "") -> None:
        stored, expected = self._source.tensor(name, moment), tuple(full_shape(tensor))
        found = None if stored is None else stored.shape
        if found != expected and not (self._source.may_be_flat and found == (math.prod(expected),)):
            what = f"the checkpoint holds {moment or 'a tensor'} of shape {found}"
            refuse(what, where=name, needed=f"{expected}, the shape in the model")

    def _steps(self, name: str) -> int:
        return 0 if name in self._fresh else steps_made(self._source, name, needed="variance" in self._moments)

    def _warn(self, words: str, names: list[str]) -> None:
        if names and self._access.group.rank == 0:
            log.warning(words, ", ".join(sorted(names)))

    # --- The change ---

    def _change(self, part: _core.StatePart, member: UnitParameter) -> None:
        """Copy this shard from the source, in fp32. A frozen parameter that the source lacks stays as it is."""
        tensors = self._tensors_of(self._names[id(member.parameter)])
        if not tensors:
            return
        if member.is_opaque:
            self._copy_bytes(part, tensors["parameter"].read_all(), member)
            return
        shard = {}
        for kind in ("parameter", *(() if part.frozen else self._moments)):
            values = tensors[kind].read_part(part.first, part.count) if kind in tensors else ZERO.repeat(part.count)
            shard[kind] = values.to(torch.float32)
        part.copy_from(state_part(shard))

    def _copy_bytes(self, part: _core.StatePart, values: torch.Tensor, member: UnitParameter) -> None:
        if values.dtype != member.parameter.dtype:
            what = f"cannot load a packed parameter of {member.parameter.dtype} from a checkpoint that has {values.dtype}"
            refuse(what, where=member.name, needed="a model that is quantized as the saved one")
        shard = values.contiguous().view(BYTES)[part.first : part.first + part.count].contiguous()
        part.copy_from(_core.StatePart(dtype=_core.DType.u8, parameter=shard.data_ptr(), count=part.count))

    def _tensors_of(self, name: str) -> dict[str, StoredTensor]:
        """Return a parameter and the moments that the source has of it. The shards of a parameter come one after the other, so
        those of the last one are kept."""
        if self._current[0] != name:
            moments = {} if name in self._fresh else self._moments
            found = {kind: self._source.tensor(name, moment) for kind, moment in {"parameter": "", **moments}.items()}
            own = self._parameters[name]
            self._current = (name, {kind: stored_part(stored, own) for kind, stored in found.items() if stored is not None})
        return self._current[1]

    def _fill_the_rest(self, partition: Partition) -> None:
        partitioned = {id(member.parameter) for member in partition.all_members}
        outside = {name: each for name, each in self._parameters.items() if id(each) not in partitioned}
        for name, tensor in {**outside, **self._buffers}.items():
            stored = self._source.tensor(name)
            if stored is not None:
                tensor.data.copy_(stored_part(stored, tensor).read_all().view(tensor.shape))
