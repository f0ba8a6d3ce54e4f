"""The functions that ranks run in the tests of deferred models. Other processes can find them by name."""

from __future__ import annotations

import ctypes
import hashlib

import ballast
import torch
from python.wrap.support.constructed import Tall
from python.wrap.support.resident import peak_resident


def constructs_with_its_own_seed(rank: int) -> list[list[torch.Tensor]]:
    """Return the initial parameters in stages 2 and 3, where each rank has set its own seed."""
    made = []
    for stage in (2, 3):
        torch.manual_seed(rank)
        with ballast.deferred():
            model = Tall()
        optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=stage)
        with ballast.gather(model):
            made.append([parameter.detach().clone() for parameter in model.parameters()])
        optimizer.close()
    return made


def constructs_differently(rank: int) -> str:
    with ballast.deferred():
        model = Tall()
        if rank == 1:
            torch.nn.init.ones_(model.blocks[0].weight), torch.nn.init.normal_(model.blocks[0].weight)
    try:
        ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3)
    except ballast.Error as error:
        return str(error)
    return ""


def large_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(76)))


def digest_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        with ballast.gather(parameter):
            digest.update(ctypes.string_at(parameter.data_ptr(), parameter.nbytes))
    return digest.hexdigest()


def begins_within_memory(rank: int, origin: str, folder: str) -> tuple[int, str]:
    """Return the memory that it takes until training can begin, and a digest of the parameters at that point."""
    with ballast.deferred():
        Tall()  # so that torch's lazy imports are not measured
    before = peak_resident(begin=True)
    if origin == "checkpoint":
        with torch.device("meta"):
            model = large_model()
    else:
        with ballast.deferred():
            model = large_model()
    kept = {kind: f"nvme:{folder}/drive" for kind in ("parameters", "state")}
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters()), model, stage=3, offload={**kept, "gradients": "host"})
    if origin == "checkpoint":
        ballast.load(model, folder)
    optimizer.memory()
    return peak_resident() - before, digest_of(model)
