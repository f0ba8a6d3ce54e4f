"""Describe a torch.nn.Module by its names, shapes and dtypes. It may be on the meta device, and a mixture of experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ballast import _core
from ballast.checks import refuse
from ballast.models.description import Description, dtype_named, holds_experts, matrix_flops

if TYPE_CHECKING:
    import torch

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")
WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
NO_ATTENTION = "the time of attention between tokens is not counted"
ALL_EXPERTS = "the time is counted as if each token passed through all experts"


@dataclass(frozen=True)
class Experts:
    """The experts of a block: their number, those that a token passes through, and their inner widths."""

    count: int
    chosen: int
    width: int
    shared_width: int  # the experts that each token passes through, together

    @property
    def active(self) -> float:
        """The part of the experts' parameters that a token is multiplied with."""
        return min(1.0, self.chosen / self.count)


def experts_of(config: Any) -> Experts | None:
    """Return the experts of a configuration of transformers, or of the language model in it; None without experts.

    >>> from types import SimpleNamespace
    >>> experts_of(SimpleNamespace(num_local_experts=8, num_experts_per_tok=2, intermediate_size=64)).active
    0.25
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count, chosen, width = (first_size(text, names) for names in (EXPERTS, CHOSEN, WIDTH))
    if count is None or chosen is None or width is None:
        return None
    shared = first_size(text, ("shared_expert_intermediate_size",)) or width * (first_size(text, ("n_shared_experts",)) or 0)
    return Experts(count, chosen, width, shared)


def first_size(config: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


@dataclass(frozen=True)
class Part:
    name: str
    module: torch.nn.Module
    recurse: bool = True  # includes the modules below it

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        named = self.module.named_parameters(recurse=self.recurse, remove_duplicate=False)
        return list({id(parameter): (name, parameter) for name, parameter in named}.values())

    def modules(self) -> Iterator[torch.nn.Module]:
        return (module for _, module in self.named_modules())

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        return self.module.named_modules() if self.recurse else iter([("", self.module)])


def from_module(module: torch.nn.Module, *, dtype: str | None = None) -> Description:
    """Describe a module: each repeated block becomes a unit, and so does each part outside of the blocks.

    >>> import torch
    >>> blocks = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(2)])
    >>> model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(8, 4), "blocks": blocks})
    >>> from_module(model).unit_names
    ['embedding', 'blocks.0', 'blocks.1']
    """
    homes: dict[int, tuple[int, int]] = {}  # the unit and the tensor of each parameter, by id
    units: list[_core.Unit] = []
    parts = list(parts_of(module))
    for index, part in enumerate(parts):
        parameters = part.parameters()
        own = [(name, p) for name, p in parameters if id(p) not in homes]
        tied = [(name, homes[id(p)]) for name, p in parameters if id(p) in homes]
        homes |= {id(p): (index, i) for i, (_, p) in enumerate(own)}
        units.append(
            _core.Unit(
                part.name,
                dtype=dtype_named(dtype or _usual_dtype(parameters)),
                tensors=[_core.Tensor(name, list(p.shape), frozen=not p.requires_grad) for name, p in own],
                ties=[_core.Tie(name, unit=unit, tensor=tensor) for name, (unit, tensor) in tied],
            )
        )
    if not units:
        refuse("cannot plan for a module without parameters", where=type(module).__name__, needed="at least one parameter")
    experts = experts_of(module.config) if hasattr(module, "config") else None
    active = experts.active if experts else 1.0
    held = [parameter.numel() for name, parameter in module.named_parameters() if holds_experts(name)]
    return Description(
        name=type(module).__name__,
        model=_core.Model(units),
        flops=[_flops(part, active) for part in parts],
        frozen_flops=[_flops(part, active, only_frozen=True) for part in parts],
        inactive=round(sum(held) * (1 - active)),
        scripted=next((name or "model" for name, each in module.named_modules() if _is_scripted(each)), None),
        notes=[NO_ATTENTION, *([ALL_EXPERTS] if held and not experts else [])],
    )


def _is_scripted(module: torch.nn.Module) -> bool:
    import torch

    return isinstance(module, torch.jit.ScriptModule)


def parts_of(module: torch.nn.Module, name: str = "") -> Iterator[Part]:
    """Yield the parts that become units, in the order of declaration."""
    if not _holds_parameters(module):
        return
    if not any(_are_blocks(below) for below in module.modules()):
        yield Part(name or "model", module)
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield Part(f"{name}.own" if name else "own", module, recurse=False)
    blocks = _are_blocks(module)
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if not blocks:
            yield from parts_of(child, full)
        elif _holds_parameters(child):
            yield Part(full, child)


def _holds_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _are_blocks(module: torch.nn.Module) -> bool:
    """Return whether this is a list of modules with at least two of one class that hold parameters."""
    import torch

    if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        return False
    kinds = Counter(type(child) for child in module.children() if _holds_parameters(child))
    return any(count >= 2 for count in kinds.values())


def _usual_dtype(parameters: list[tuple[str, torch.nn.Parameter]]) -> str:
    counts: Counter[str] = Counter()
    for _, parameter in parameters:
        counts[str(parameter.dtype)] += parameter.numel()
    return counts.most_common(1)[0][0]


def _flops(part: Part, active: float, *, only_frozen: bool = False) -> float:
    """Return the flops of a token, or those with frozen parameters. It passes through the `active` part of the experts."""
    import torch

    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return sum(
        matrix_flops(tuple(parameter.shape)) * (active if holds_experts(f"{name}.{own}") else 1.0)
        for name, module in part.named_modules()
        if not isinstance(module, tables)
        for own, parameter in module.named_parameters(recurse=False)
        if not (only_frozen and parameter.requires_grad)
    )
