"""The devices that a test runs on: the CPU, an emulated GPU of torch, and a card, where there is one."""

from __future__ import annotations

import ballast
import pytest
import torch


def a_gpu() -> pytest.MarkDecorator:
    known = ballast.this_machine()
    usable = torch.cuda.is_available() and len(known["gpus"]) > 0
    return pytest.mark.skipif(not usable, reason=f"no usable GPU: {known['no_gpu_because'] or 'torch has no CUDA'}")


emulated = pytest.param("emulated", marks=pytest.mark.emulated)
cuda = pytest.param("cuda", marks=a_gpu())
on_devices = pytest.mark.parametrize("device", ["cpu", emulated, cuda])
on_gpus = pytest.mark.parametrize("device", [emulated, cuda])
