"""Trainings with Lightning, with its own data parallelism and with BallastStrategy."""

from __future__ import annotations

import glob
import logging
import os
import warnings
from typing import Any

import ballast
import lightning as L
import torch
from ballast.integrations.lightning import BallastStrategy
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from python.wrap.support.frameworks import as_launched
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

SAMPLES, BATCH = 32, 8  # samples of all ranks

Options = dict[str, Any] | None  # the options of the strategy; None: Lightning's data parallelism


class Module(L.LightningModule):
    """A model with a parameter that no inner module has, which logs its losses. It is deferred, or exported at the end, on
    request."""

    layers: torch.nn.Module

    def __init__(self, width: int = 64, deferred: bool = False, export_to: str | None = None):
        super().__init__()
        self.save_hyperparameters()
        self.width, self.export_to = width, export_to
        if not deferred:
            self.make_layers()
        self.scale = torch.nn.Parameter(torch.ones(5))
        self.losses: list[float] = []
        self.validated: list[float] = []

    def make_layers(self) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(20, self.width), torch.nn.Tanh(), torch.nn.Linear(self.width, 5)
        self.layers = torch.nn.Sequential(*layers)

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            with ballast.deferred():
                self.make_layers()
            assert self.layers[0].weight.is_meta

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy.model, DistributedDataParallel) is not isinstance(strategy, BallastStrategy)

    def on_train_end(self) -> None:
        if self.export_to is not None:
            ballast.export(self, self.export_to)
            for _ in range(2):  # the second one replaces the first
                self.trainer.save_checkpoint(f"{self.export_to}.ckpt")

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch) * self.scale

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self(batch) - 1).square().mean() + 0.01 * self.scale.square().sum()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        loss = self.loss(batch)
        self.validated.append(loss.item())
        self.log("validated", loss, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(ranks: int) -> torch.utils.data.DataLoader[torch.Tensor]:
    samples = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(samples, batch_size=BATCH // ranks)


def trainer(ranks: int, options: Options, **settings: Any) -> L.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": True}
    checkpoints = {} if "callbacks" in settings else {"enable_checkpointing": False}
    strategy = "ddp" if options is None else BallastStrategy(**options)
    return L.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, **quiet, **checkpoints, **settings)


MIXED = ("bf16-mixed", "16-mixed")


def mixed(name: Any) -> MixedPrecision:
    """Return Lightning's mixed precision, which it gives a scaler of losses on GPUs only."""
    return MixedPrecision(name, "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10) if name == "16-mixed" else None)


Outcome = tuple[list[float], list[torch.Tensor], list[float]]


def outcome(module: Module) -> Outcome:
    """Return the losses of the training, the parameters by name, and the losses of validations."""
    return module.losses, [each.detach().clone() for _, each in sorted(module.named_parameters())], module.validated


def fitted(ranks: int, options: Options, module: Module | None = None, **settings: Any) -> Outcome:
    module = module or Module()
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, **settings}
    path = settings.pop("path", None)
    trainer(ranks, options, **settings).fit(module, loader(ranks), loader(ranks), ckpt_path=path)
    return outcome(module)


def evaluated(ranks: int, path: str, options: Options) -> Outcome:
    module = Module()
    trainer(ranks, options).validate(module, loader(ranks), ckpt_path=path, verbose=False)
    return outcome(module)


def everything(rank: int, folder: str) -> dict[Any, Any]:
    def launched(run: Any, *arguments: Any, **settings: Any) -> Any:
        as_launched(rank)  # Lightning clears the environment after each run
        return run(2, *arguments, **settings)

    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    first, last = f"{folder}/epoch=0.ckpt", f"{folder}/epoch=1.ckpt"
    exported = f"{folder}-exported.safetensors"
    return {
        "plain": launched(fitted, None),
        0: launched(fitted, {"stage": 0}),
        1: launched(fitted, {"stage": 1}),
        2: launched(fitted, {"stage": 2}),
        "mixed": [launched(fitted, options, plugins=[mixed(name)]) for name in MIXED for options in (None, {"stage": 3})],
        "deferred": launched(fitted, {"stage": 3}, Module(deferred=True)),
        "saved": launched(fitted, {"stage": 3}, Module(export_to=exported), callbacks=[saving]),
        "exported": [each for _, each in sorted(load_file(exported).items())],
        "files": sorted(os.listdir(folder)),
        "parts": len(glob.glob(f"{exported}.ckpt/lightning-*.ckpt")),
        "resumed": launched(fitted, {"stage": 2}, path=first),
        "evaluated": launched(evaluated, last, {"stage": 3}),
        "failures": [
            failure(lambda: BallastStrategy(stages=3)),
            failure(lambda: launched(fails, configure_optimizers=lambda _: None)),
            failure(lambda: launched(fails, configure_optimizers=two_optimizers, automatic_optimization=False)),
            failure(lambda: launched(fails, training_step=raises)),
        ],
    }


def averaged(rank: int, folder: str) -> dict[str, Any]:
    """Train with Lightning's averages of parameters, resume, and evaluate them."""

    def launched(run: Any, *arguments: Any, **settings: Any) -> Any:
        as_launched(rank)
        return run(2, *arguments, **settings)

    def averaging() -> EMAWeightAveraging:
        return EMAWeightAveraging(decay=0.5)

    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    module, swa = Module(), StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    module.layers.insert(1, torch.nn.BatchNorm1d(module.width))
    return {
        "plain": launched(fitted, None, callbacks=[averaging()], enable_checkpointing=False),
        "saved": launched(fitted, {"stage": 2}, callbacks=[averaging(), saving]),
        "resumed": launched(
            fitted, {"stage": 1}, callbacks=[averaging()], enable_checkpointing=False, path=f"{folder}/epoch=0.ckpt"
        ),
        "evaluated": launched(evaluated, f"{folder}/epoch=1.ckpt", {"stage": 3}),
        "normalized": launched(fitted, {"stage": 2}, module, callbacks=[swa], enable_checkpointing=False),
        "average": [each.detach().clone() for _, each in sorted(swa._average_model.named_parameters())],
    }


def on_another_number_of_ranks(rank: int, folder: str) -> tuple[Outcome, Outcome, Outcome]:
    as_launched(rank)
    there = evaluated(1, f"{folder}/epoch=1.ckpt", {"stage": 3})
    as_launched(rank)
    resumed = fitted(1, {"stage": 3}, path=f"{folder}/epoch=0.ckpt")
    loaded = Module()  # load_from_checkpoint() reads files only
    ballast.load(loaded, f"{folder}/epoch=1.ckpt")
    return there, resumed, outcome(loaded)


def fails(ranks: int, **replaced: Any) -> None:
    """Train a module with other attributes."""
    module = Module()
    for name, method in replaced.items():
        setattr(module, name, method.__get__(module) if callable(method) else method)
    trainer(ranks, {"stage": 3}, max_epochs=1).fit(module, loader(ranks))


def two_optimizers(module: Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.layers.parameters()), torch.optim.SGD([module.scale])]


def raises(*_: Any) -> None:
    raise RuntimeError("the step fails")


def failure(run: Any) -> str:
    """Return the first line of the error."""
    try:
        run()
    except Exception as error:
        return str(error).splitlines()[0]
    return ""
