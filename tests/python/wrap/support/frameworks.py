"""Trainings as users of frameworks write them, with and without ballast.wrap()."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from python.wrap.support.keywords import keywords
from python.wrap.support.loops import Loop, Run, mean_square, mlp

Configuration = dict[str, Any] | None  # None: the plain optimizer


def as_launched(rank: int) -> None:
    """Set the environment variables in which frameworks look for the rank, and for the number of threads."""
    ranks = str(dist.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # one rank alone would use all cores, and wait in a loop


def accelerated(configuration: Configuration, *, mixed_precision: str = "no", steps: int = 4) -> tuple[Any, Any, Run]:
    """Train with two micro-batches a step, clipping and a schedule. Return the accelerator, its optimizer, and the run."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
    batches = torch.randn(8 * accelerator.num_processes * steps, 20, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(batches, batch_size=4)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if configuration is not None:
        optimizer = ballast.wrap(optimizer, model, **keywords(**configuration))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = accelerated_steps(accelerator, *prepared)
    return accelerator, prepared[1], Run(model, optimizer, losses)


def accelerated_steps(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[float]:
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = mean_square(model, batch)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def accelerated_ranks(rank: int, configurations: list[Configuration]) -> list[tuple[list[float], list[torch.Tensor]]]:
    as_launched(rank)
    trained = []
    for configuration in configurations:
        _, _, run = accelerated(configuration)
        with ballast.gather(run.model):
            trained.append((run.losses, run.parameters))
    return trained


def tiny_model(hidden: int = 16) -> Any:
    """Return a model, whose matrices are large enough to be deferred with a hidden size of 64."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def receiver_of(configuration: Configuration, folder: Path, *, steps: int = 4) -> Any:
    """Return a Trainer with two micro-batches a step, clipping, and a checkpoint every two steps."""
    import transformers

    class GatheringTrainer(transformers.Trainer):
        """A Trainer that gathers the model on all ranks before one of them saves it."""

        def _save_checkpoint(self, *arguments: Any) -> None:
            with ballast.gather(self.model):
                super()._save_checkpoint(*arguments)

    words = torch.randint(64, (64, 8), generator=torch.Generator().manual_seed(0)).tolist()
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if configuration is not None:
        optimizer = ballast.wrap(optimizer, model, **keywords(**configuration))
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    rows = [{"input_ids": row, "labels": row} for row in words]
    return GatheringTrainer(model, arguments, train_dataset=rows, optimizers=(optimizer, scheduler))


def warnings_of(save: Callable[[], Any]) -> list[str]:
    """Return Ballast's warnings during a call."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        save()
    return [str(each.message) for each in told if "ballast" in str(each.message)]


def saves_with_accelerate(rank: int, folder: str) -> tuple[list[str], list[str]]:
    """Return the warnings of a training before and while it saves its state."""
    as_launched(rank)
    made: list[Any] = []
    before = warnings_of(lambda: made.extend(accelerated({"stage": 2})))
    return before, warnings_of(lambda: made[0].save_state(folder))


def outcome(trainer: Any) -> tuple[list[float], list[torch.Tensor]]:
    logged = [line[key] for line in trainer.state.log_history if "grad_norm" in line for key in ("loss", "grad_norm")]
    with ballast.gather(trainer.model):
        return logged, [parameter.detach().clone() for parameter in trainer.model.parameters()]


def trained(rank: int, configuration: dict[str, Any]) -> dict[str, float]:
    run = Loop(rank=rank, ranks=dist.get_world_size()).run(**configuration)
    with ballast.gather(run.model):
        return {"loss": run.losses[-1], "sum": sum(float(each.double().sum()) for each in run.parameters)}


def ray_worker(training: dict[str, Any]) -> None:
    """Train and write the result to a file. Ray has already called torch.distributed.init_process_group()."""
    rank = dist.get_rank()
    (Path(training["folder"]) / f"rank {rank}").write_text(json.dumps(trained(rank, training["configuration"])))


def merged_adapters(configuration: Configuration) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of three LoRA steps and of the merged model, and the merged model's parameters."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    if configuration is not None:
        optimizer = ballast.wrap(optimizer, model, **keywords(**configuration))
    words = torch.arange(16).view(2, 8)
    losses = []
    for _ in range(3):
        loss = model(input_ids=words, labels=words).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(model):
        merged = model.merge_and_unload()
    with torch.no_grad():
        losses.append(merged(input_ids=words, labels=words).loss.item())
    with ballast.gather(merged):
        return losses, [parameter.detach().clone() for parameter in merged.parameters()]


def merged_adapters_of_ranks(_: int, configurations: list[Configuration]) -> list[tuple[list[float], list[torch.Tensor]]]:
    return [merged_adapters(configuration) for configuration in configurations]
