"""The cases: each optimizer, trained from each seed. Muon updates the matrices of blocks, with AdamW for all others."""

from contest import Contest

TORCH_MUON = "Muon in torch"
BALLAST_MUON = "Muon in Ballast"
BALLAST_ADAMW = "AdamW in Ballast"
CONTEST = Contest("optimizers", "optimizer", (TORCH_MUON, BALLAST_MUON, BALLAST_ADAMW))
