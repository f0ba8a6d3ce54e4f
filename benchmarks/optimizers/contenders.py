"""The cases: each optimizer, trained from each seed. Muon updates the matrices of blocks, with AdamW for all others."""

from typing import NamedTuple

from variants import SEEDS

TORCH_MUON = "Muon in torch"
BALLAST_MUON = "Muon in Ballast"
BALLAST_ADAMW = "AdamW in Ballast"
OPTIMIZERS = (TORCH_MUON, BALLAST_MUON, BALLAST_ADAMW)  # the others are compared with the first


class Case(NamedTuple):
    optimizer: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}, seed {self.seed}"


# All optimizers have one seed before the next one begins, so that an early stop leaves pairs to compare.
CASES = tuple(Case(optimizer, seed) for seed in SEEDS for optimizer in OPTIMIZERS)
