"""Read mixtures of experts: how many experts a token passes through, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_top_k", "moe_topk")
WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")


@dataclass(frozen=True)
class Experts:
    """The experts of a block: their number, those that a token passes through, and their inner widths."""

    count: int
    chosen: int
    width: int
    shared_width: int  # of the experts that each token passes through, together

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


def holds_experts(name: str) -> bool:
    """Return whether a parameter with this name belongs to the experts among which a router chooses.

    >>> holds_experts("layers.0.mlp.experts.down_proj"), holds_experts("layers.0.mlp.shared_experts.up_proj.weight")
    (True, False)
    """
    return "experts" in name.split(".")[:-1]


def first_size(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first of these sizes that the configuration has."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)
