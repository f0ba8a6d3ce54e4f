"""Tests with Accelerate, Hugging Face's Trainer and PEFT: results agree with those of the plain optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
from python.wrap.support.frameworks import as_launched, tiny_model
from python.wrap.support.loops import Run, keywords, mean_square, mlp
from python.wrap.support.ranks import FRAMEWORKS, run_ranks

Configuration = dict[str, Any] | None  # None: the plain optimizer


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


CANNOT_RESUME = "rank 0's alone cannot be resumed. Call ballast.save()"
WHY = "is not installed: .ci/bootstrap venv frameworks"
accelerate = pytest.importorskip("accelerate", reason=f"accelerate {WHY}")


def check_close(one, other):
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(one[1], other[1]):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_trains_as_before(mixed_precision, tmp_path):
    _, _, plain = accelerated(None, mixed_precision=mixed_precision)
    for configuration in ({"stage": 2}, {"stage": 2, "offload": f"nvme:{tmp_path}", "run": "mine"}):
        _, prepared, run = accelerated(configuration, mixed_precision=mixed_precision)
        assert type(prepared).__name__ == "AcceleratedOptimizer"
        assert prepared.optimizer is run.optimizer
        assert run.optimizer.steps == 4
        check_close((plain.losses, plain.parameters), (run.losses, run.parameters))


def test_accelerate_on_two_ranks_trains_as_its_data_parallelism_does():
    configurations = [None, {"stage": 0}, {"stage": 2}, {"stage": 3, "offload": "host"}]
    for plain, first, *others in run_ranks(2, accelerated_ranks, configurations, imported=FRAMEWORKS):
        check_close(plain, first)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


def test_accelerate_saves_a_training_and_resumes(tmp_path):
    accelerator, _, run = accelerated({"stage": 2})
    accelerator.save_state(str(tmp_path))
    batch = torch.ones(20)
    after = []
    for _ in range(2):
        mean_square(run.model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        after.append([parameter.detach().clone() for parameter in run.model.parameters()])
        accelerator.load_state(str(tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(*after))


def test_accelerate_on_two_ranks_warns_that_its_checkpoint_cannot_be_resumed(tmp_path):
    for before, saving in run_ranks(2, saves_with_accelerate, str(tmp_path), imported=FRAMEWORKS):
        assert before == []
        assert [CANNOT_RESUME in line for line in saving] == [True]


def test_accelerates_own_gradient_scaling():
    """Accelerate patches step() of the optimizer to see whether a step was skipped. This works."""
    from accelerate.optimizer import AcceleratedOptimizer

    _, _, run = accelerated({"stage": 2})
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(run.optimizer, scaler=scaler)
    skipped = []
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(mean_square(run.model, torch.ones(20)) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(run.optimizer.metrics()["skipped"])
    assert skipped == [0.0, 1.0, 0.0]
    assert scaler.get_scale() == 512.0


def test_trainer_trains_as_before_and_resumes_from_its_own_checkpoint(tmp_path):
    pytest.importorskip("transformers", reason=f"transformers {WHY}")
    plain = receiver_of(None, tmp_path / "plain")
    plain.train()
    for configuration in ({"stage": 2}, {"stage": 3}):
        folder = tmp_path / str(configuration["stage"])
        uninterrupted = receiver_of(configuration, folder)
        uninterrupted.train()
        check_close(outcome(plain), outcome(uninterrupted))
        resumed = receiver_of(configuration, folder)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert uninterrupted.optimizer.optimizer.steps == resumed.optimizer.optimizer.steps == 4
        for mine, theirs in zip(outcome(uninterrupted)[1], outcome(resumed)[1]):
            assert torch.equal(mine, theirs)


def test_peft_merges_adapters_as_before(tmp_path):
    if find_spec("peft") is None:  # only the ranks import it
        pytest.skip(f"peft {WHY}")
    on_drives = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    configurations = [None, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload": on_drives}]
    [[plain, *alone]] = run_ranks(1, merged_adapters_of_ranks, configurations, imported=FRAMEWORKS)
    together, _ = run_ranks(2, merged_adapters_of_ranks, configurations[1:], imported=FRAMEWORKS)
    for other in (*alone, *together):
        check_close(plain, other)
