"""Train the GPT in one case: the parameters are fp32, because torch's Muon adds its updates to bf16 ones without a master."""

from pathlib import Path
from typing import Any

import ballast
import loss_training
import texts
import torch
from contenders import BALLAST_ADAMW, TORCH_MUON
from contest import Case
from trainers import for_muon
from variants import TRAINING

WEIGHT_DECAY = 0.01  # of all optimizers; AdamW's default, where Muon's would be 0.1


def setting(steps: int) -> str:
    update = f"fp32 parameters, weight decay {WEIGHT_DECAY:g}, Muon's rate adjusted to AdamW's"
    return f"{loss_training.setting(TRAINING, steps, update)}, text {text().digest}"


def train(case: Case, steps: int, folder: Path) -> loss_training.Losses:
    torch.set_num_threads(1)
    run = training(case, steps)
    losses = run.train(folder)
    run.close()
    return losses


def text() -> texts.Text:
    return texts.TEXTS[TRAINING.text]()


def training(case: Case, steps: int) -> loss_training.Training:
    plan = loss_training.Plan(TRAINING, case.seed, steps)
    model = plan.model(torch.float32)
    plain = plain_optimizers(case, model)
    if case.contender == TORCH_MUON:
        return PlainTraining(plan, text(), model, plain)
    return loss_training.Training(plan, text(), model, ballast.wrap(plain, model, threads=1))


def plain_optimizers(case: Case, model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    options = {"lr": TRAINING.learning_rate, "weight_decay": WEIGHT_DECAY}
    if case.contender == BALLAST_ADAMW:
        return [torch.optim.AdamW(model.parameters(), **options)]
    matrices, others = for_muon(model)
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options)
    return [muon, torch.optim.AdamW(others, **options)]


class PlainTraining(loss_training.Training):
    """A training with optimizers that are not wrapped."""

    checkpoint = "checkpoint.pt"

    def save(self, unfinished: Path, progress: dict[str, Any]) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        unfinished.mkdir(parents=True, exist_ok=True)
        new = unfinished / "new.pt"
        torch.save({**progress, "model": self.model.state_dict(), "optimizers": optimizers}, new)
        new.replace(unfinished / self.checkpoint)  # a stop leaves the old one or the new one whole

    def load(self, unfinished: Path) -> dict[str, Any]:
        progress = torch.load(unfinished / self.checkpoint)
        self.model.load_state_dict(progress["model"])
        for optimizer, state in zip(self.optimizers, progress["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        return progress

    def close(self) -> None:
        """Do nothing: plain optimizers own nothing but memory."""
