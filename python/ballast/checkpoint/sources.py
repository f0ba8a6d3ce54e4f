"""What checkpoints of other programs have in common: tensors of a model, and what an optimizer keeps of each, by name or
under any keys. Read those of torch.save() that hold state_dicts under any keys, and those that transformers and
Accelerate write."""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

from ballast.checkpoint.kinds import torch_files_in
from ballast.checkpoint.torch_file import contents_of, number_in, read_tensors
from ballast.checks import is_number, refuse
from ballast.json_reader import Json, fail_malformed, read_json
from ballast.torch.parameters.stored_tensors import StoredTensor, tensors_in
from ballast.torch.parameters.units import COMPILED, PARALLEL, names_in_model
from ballast.torch.updates.updates import UNCOUNTED

log = logging.getLogger("ballast")

STEP = "step"  # a key in the state of a parameter, next to its moments
NUMBERED = re.compile(r"((?:.*\.)?)state\.(\d+)\.\w+")
OF_OPTIMIZERS = {"state", "param_groups"}  # keys of an optimizer's state_dict()
ONE_OF_EACH = "one model and one optimizer, as in dcp.save({'model': ..., 'optim': ...})"
# The keys of a model, where a file has other dictionaries with tensors too, such as the state of Lightning's callbacks.
OF_MODELS = ("state_dict", "model", "module", "model_state_dict")
OF_MASTERS = ("optimizer.fp32_groups.", "optimizer.fp32_groups_flat.")


class Source(ABC):
    """Finds the tensors of a checkpoint. Their values are read later, piece by piece."""

    may_be_flat = False  # a tensor may be stored flat, whatever its shape
    trained_only = False  # frozen parameters and buffers are not in it
    has_masters = True  # its weights may be cast to a model's formats, because they are the masters of a training

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the model's tensors."""

    @abstractmethod
    def tensor(self, name: str, moment: str = "") -> StoredTensor | None:
        """Return a tensor of the model, or a moment of one; None if the checkpoint lacks it."""

    @abstractmethod
    def state(self, name: str) -> Collection[str]:
        """Return what the optimizer keeps of a parameter: the moments and STEP, as far as they are there."""

    @abstractmethod
    def steps(self, name: str) -> int | None:
        """Return the number of steps that made the moments of a parameter."""

    def options(self, name: str) -> Mapping[str, Any]:
        """Return the options of the parameter group that has a parameter; nothing if the checkpoint does not say them."""
        return {}

    def extra(self) -> Any:
        """Return the entry `extra` of the checkpoint, or None."""
        return None


def steps_made(source: Source, name: str, needed: bool) -> int:
    """Return the number of steps that made the moments of a parameter; 1 for momentum that torch does not count. It is needed
    with second moments: without it, bias correction would take them for those of the first step."""
    found = source.steps(name)
    if found is None and needed:
        refuse(
            "the checkpoint holds moments, but not the number of steps that made them",
            where=name,
            needed="both: the next step corrects the moments by that number",
            remedy="DeepSpeed's ds_to_universal writes it to zero/optimizer_state.pt, torch next to the moments.",
        )
    if found is None and UNCOUNTED in source.state(name):
        return 1
    return found or 0


@dataclass
class Content:
    """The tensors of a checkpoint, by the keys on the path to each, joined with dots."""

    where: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the keys themselves, as far as they are known
    numbers: dict[str, Any] = field(default_factory=dict)  # counts of steps that are no tensors
    groups: dict[str, Any] = field(default_factory=dict)  # param_groups, by the prefix of their optimizer
    named_groups: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # reads those with parameters by name
    extra: Callable[[], Any] = lambda: None  # reads the entry `extra`
    has_masters: bool = True

    def add(self, found: Any, around: tuple[str, ...], file: Path) -> None:
        """Add what nested dictionaries and lists of a file hold: tensors, counts of steps and parameter groups."""
        key = ".".join(around)
        if isinstance(found, StoredTensor):
            if key in self.tensors:
                refuse(
                    f'cannot read "{key}": it is in more than one file, or twice in one',
                    where=f"{self.tensors[key].where} and {file}",
                    needed="the files of one checkpoint",
                )
            self.tensors[key], self.paths[key] = found, around
        elif is_number(found):
            if around[-1:] == (STEP,):
                self.numbers[key] = found
        elif isinstance(found, dict):
            if "state" in found and "param_groups" in found:
                self.groups[f"{key}." if key else ""] = found["param_groups"]
            for word, each in found.items():
                if word != "param_groups":
                    self.add(each, (*around, str(word)), file)
        elif isinstance(found, list):
            for number, each in enumerate(found):
                self.add(each, (*around, str(number)), file)


class Keyed(Source):
    """A Source that chooses the model and the optimizer's state by their names. The checkpoint must have the names `trained`;
    `known` are all names of the model. `order` has the names in each group of the live optimizer: it says which parameter each
    number is in the state of optimizer.state_dict(), as in torch."""

    def __init__(
        self,
        content: Content,
        trained: Sequence[str],
        known: Collection[str],
        order: Sequence[Sequence[str]] | None = None,
        model: str | None = None,
    ):
        self._content, self._trained, self._known, self._order = content, trained, known, order
        self.has_masters = content.has_masters
        self._states: dict[str, set[str]] = {}  # what there is of each parameter's state, by prefix
        for key in (*content.tensors, *content.numbers):
            holder, _, what = key.rpartition(".")
            self._states.setdefault(holder, set()).add(what)
        models = [model] if model is not None else _model_prefixes(prefixes(content.tensors, trained), trained, known)
        self._model = self._only("parameters", models) or ""

    @cached_property
    def _optimizer(self) -> str | None:
        """The prefix of the optimizer's state. A caller that only reads parameters does not need it."""
        return self._only(
            "optimizer's state", _most_frequent(prefixes(self._states, [f"state.{name}" for name in self._trained]))
        )

    @cached_property
    def _numbers(self) -> Mapping[str, str]:
        """The prefix of the state of each parameter whose state has a number instead of a name."""
        prefix = self._prefix_of_numbers
        return {} if prefix is None else {name: f"{prefix}state.{number}" for name, number in self._numbered(prefix)}

    @cached_property
    def _prefix_of_numbers(self) -> str | None:
        if self._optimizer is not None:
            return None
        found = {match[1] for key in (*self._content.tensors, *self._content.numbers) if (match := NUMBERED.fullmatch(key))}
        return self._only("optimizer's state", sorted(found))

    @cached_property
    def _options(self) -> dict[str, dict[str, Any]]:
        """The options of each parameter's group."""
        named, numbered = self._content.named_groups, self._content.groups
        prefix = self._prefix_of_numbers if self._optimizer is None else self._optimizer
        if prefix is None and len({**named, **numbered}) == 1:  # there is no state, as of SGD without momentum
            [prefix] = {**named, **numbered}
        if prefix is None:
            return {}
        groups: Any = named[prefix]() if prefix in named else numbered.get(prefix)
        if prefix in numbered and _are_groups(groups):
            by_number = {number: group for group in groups for number in group["params"]}
            return {name: by_number[number] for name, number in self._numbered(prefix)}
        if not _are_groups(groups, str):
            return {}
        return {name: group for group in groups for name in names_in_model(group["params"], self._known).values()}

    def names(self) -> list[str]:
        """Return the tensors of the model by name: those that are known, and others that are next to them."""
        words = {name.partition(".")[0] for name in self._known}
        below = [key.removeprefix(self._model) for key in self._content.tensors if key.startswith(self._model)]
        return [name for name in below if name in self._known or name.partition(".")[0] in words]

    def tensor(self, name: str, moment: str = "") -> StoredTensor | None:
        key = f"{self._holder(name)}.{moment}" if moment else self._model + name
        return self._content.tensors.get(key)

    def state(self, name: str) -> Collection[str]:
        return self._states.get(self._holder(name), ())

    def steps(self, name: str) -> int | None:
        key = f"{self._holder(name)}.{STEP}"
        found = self._content.tensors.get(key, self._content.numbers.get(key))
        if found is None and self.state(name):
            found = self.options(name).get(STEP) or None  # older versions of FusedAdam count in the groups
        return None if found is None else number_in(found, self._content.where)

    def options(self, name: str) -> Mapping[str, Any]:
        found = self._options.get(name, {})
        return {key: value for key, value in found.items() if key not in ("params", "param_names")}

    def extra(self) -> Any:
        return self._content.extra()

    def _holder(self, name: str) -> str:
        return self._numbers.get(name, f"{self._optimizer or ''}state.{name}")

    def _only(self, what: str, found: list[str]) -> str | None:
        if len(found) > 1:
            refuse(
                f"cannot choose {what} from a checkpoint: it holds these names {len(found)} times",
                where=str(self._content.where),
                needed=ONE_OF_EACH,
                available=", ".join(f"{prefix}*" for prefix in sorted(found)[:6]),
                remedy="Read it with torch, and save only the model and the optimizer to train.",
            )
        return found[0] if found else None

    def _numbered(self, prefix: str) -> list[tuple[str, int]]:
        """Return the number of each parameter, as torch gives them: by position in the parameter groups."""
        groups = self._content.groups.get(prefix)
        if groups is None or not _are_groups(groups):
            self._refuse_numbers(prefix, "the parameter groups are not in it, or not as torch saves them")
        numbers = [group["params"] for group in groups]
        names = self._order
        if all(isinstance(group.get("param_names"), list) for group in groups):
            names = [[*names_in_model(group["param_names"], self._known).values()] for group in groups]
        if names is None:
            self._refuse_numbers(prefix, "nothing says which parameter each number is")
        if [len(each) for each in names] != [len(each) for each in numbers]:
            refuse(
                "cannot load optimizer state by number: the checkpoint has other parameter groups than the optimizer",
                where=f"{prefix}param_groups in {self._content.where}",
                needed=f"groups of {_lengths(names)} parameters, in the same order",
                available=f"groups of {_lengths(numbers)}",
            )
        return [pair for here, there in zip(names, numbers) for pair in zip(here, there)]

    def _refuse_numbers(self, prefix: str, why: str) -> NoReturn:
        refuse(
            f"cannot load optimizer state by number: {why}",
            where=next(key for key in (*self._content.tensors, *self._content.numbers) if key.startswith(f"{prefix}state.")),
            needed=ONE_OF_EACH,
            remedy="ballast.load_checkpoint() of a file of torch.save() numbers the parameters as the optimizer does. Or save "
            "the result of torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer).",
        )


def only_model_in(content: Content) -> Keyed:
    """Return the Source of a checkpoint with one model, without knowing its names. Refuse several models."""
    models: dict[tuple[str, ...], list[str]] = {}
    for key in content.tensors:
        path = content.paths.get(key) or (key,)
        around, name = path[:-1], path[-1]
        if not around and OF_OPTIMIZERS.intersection(key.split(".")[:-1]):
            refuse(
                "cannot choose the weights in a checkpoint: it does not say which tensors are an optimizer's",
                where=f"{key} in {content.where}",
                remedy="ballast.load(model, directory) chooses by the names of a model.",
            )
        if not OF_OPTIMIZERS.intersection(around):
            models.setdefault(around, []).append(name)
    if len(models) != 1:
        refuse(
            "cannot choose the weights in a checkpoint" if models else "the checkpoint holds no weights",
            where=str(content.where),
            needed="one model",
            available=", ".join(sorted(".".join(around) or "tensors without a key" for around in models)),
            remedy="ballast.load(model, directory) chooses by the names of a model.",
        )
    [(around, names)] = models.items()
    prefix = "".join(f"{word}." for word in around)
    for wrapper in (f"{PARALLEL}.", f"{COMPILED}."):
        if all(name.startswith(wrapper) for name in names):
            prefix, names = prefix + wrapper, [name.removeprefix(wrapper) for name in names]
    return Keyed(content, names, names, model=prefix)


def prefixes(keys: Iterable[str], names: Sequence[str]) -> Counter[str]:
    """Count the prefixes that turn a name into a key.

    >>> prefixes(["model.a.b", "ema.a.b", "model.c"], ["a.b", "c"])
    Counter({'model.': 2, 'ema.': 1})
    """
    wanted = set(names)
    found: Counter[str] = Counter()
    for key in keys:
        words = key.split(".")
        for first in range(len(words)):
            if ".".join(words[first:]) in wanted:
                found["".join(f"{word}." for word in words[:first])] += 1
    return found


def _are_groups(found: Any, kind: type = int) -> bool:
    """Return whether these are the param_groups of a state_dict(), with parameters by number or by name."""
    if not isinstance(found, list) or not all(isinstance(group, dict) for group in found):
        return False
    numbers = [group.get("params") for group in found]
    names = [group.get("param_names") or [] for group in found]
    return all(
        isinstance(each, list) and isinstance(own, list) and all(type(number) is kind for number in each)
        for each, own in zip(numbers, names)
    ) and all(isinstance(name, str) for own in names for name in own)


def _lengths(groups: Sequence[Sequence[Any]]) -> str:
    return ", ".join(str(len(group)) for group in groups)


def _most_frequent(counts: Counter[str]) -> list[str]:
    """Return the prefixes with the highest count."""
    most = max(counts.values(), default=0)
    return [prefix for prefix, count in counts.items() if count == most]


def _model_prefixes(counts: Counter[str], trained: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the prefixes of complete models. A model may contain a copy of itself, whose names are below the model's
    prefix: that copy is not counted."""
    most = _most_frequent(counts)
    if not most or counts[most[0]] < len(trained):
        return most[:1]  # the caller reports the missing names

    def is_inside(inner: str, outer: str) -> bool:
        return inner != outer and inner.startswith(outer) and inner[len(outer) :] + trained[0] in known

    return [each for each in most if not any(is_inside(each, other) for other in most)]


def plain_torch_alone(path: Path) -> Keyed:
    """Return the Source of a file or folder without a model that says which names are its own."""
    content = content_of_files(path)
    inside = {around[0] for around in content.paths.values() if len(around) > 1}
    if named := [key for key in OF_MODELS if key in inside]:
        wanted = {*named, *(prefix.partition(".")[0] for prefix in content.groups)}
        kept = {key: each for key, each in content.tensors.items() if content.paths[key][0] in wanted}
        content = replace(content, tensors=kept)
    return only_model_in(content)


def content_of_files(path: Path) -> Content:
    """Return the tensors of a file, or of the files in a folder that belong together."""
    found = Content(path)
    weights, optimizer = torch_files_in(path) if path.is_dir() else ([path], None)
    files = [file for each in weights for file in (_listed(each) if each.suffix == ".json" else [each])]
    extra: Any = None
    for file in files:
        content = contents_of(file)
        extra = content.get("extra") if isinstance(content, dict) and len(files) == 1 else None
        found.add(content, (), file)
    if not files:
        for name, stored in tensors_in(path).items():
            found.add(stored, (name,), path)
    if optimizer is not None:
        found.add({"optimizer": contents_of(optimizer)}, (), optimizer)
    if any(key.startswith(OF_MASTERS) for key in found.tensors):
        # DeepSpeed's 16-bit training without ZeRO has its masters in a list, and the model has them rounded: with the moments
        # next to those, a training would continue from other values.
        log.warning("%s: the optimizer's state is left out, because its masters are not read", path)
        found.tensors = {key: each for key, each in found.tensors.items() if not key.startswith("optimizer.")}
        found.numbers, found.groups = {}, {}
    found.groups = {prefix: read_tensors(each) for prefix, each in found.groups.items()}
    found.extra, found.has_masters = partial(read_tensors, extra), bool(found.groups)
    return found


def _listed(index: Path) -> list[Path]:
    """Return the files that an index names, which are next to it."""
    found = set()
    for _, where in Json(read_json(index), str(index))["weight_map"].items():
        name = where.text()
        if "\0" in name or Path(name).name != name or not (index.parent / name).is_file():
            fail_malformed(str(index), f"{name}, which it names, is not there", needed="files next to the index")
        found.add(index.parent / name)
    return sorted(found)
