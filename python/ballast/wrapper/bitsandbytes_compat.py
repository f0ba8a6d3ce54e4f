"""Attributes of bitsandbytes' modules that stage 3 has to know. tests/python/wrap/test_packed.py checks each."""

from __future__ import annotations

import logging

import torch

from ballast.wrapper.ungathered import kind_of

log = logging.getLogger("ballast")


def keep_packing(model: torch.nn.Module, *, warns: bool) -> None:
    """Keep modules from packing their weights anew in an evaluation on a CPU: the parameter would change outside of its
    memory. Warn of modules that keep a copy of their weights."""
    copies = None
    for name, module in model.named_modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False
        weight = module._parameters.get("weight")  # an attribute may be computed: torch's parametrizations do that
        if weight is not None and kind_of(weight).__name__ == "Int8Params":
            copies = copies or name
    if copies is not None and warns:
        log.warning(
            "module %s keeps a full copy of its 8-bit weights, as all of bitsandbytes' 8-bit modules do: stage 3 saves no "
            "memory there. Those of 4 bits are partitioned.",
            copies,
        )
