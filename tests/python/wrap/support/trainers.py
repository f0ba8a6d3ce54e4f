"""Trainings with Trainers of transformers and TRL, as users write them: plain ones, and ones that train with Ballast."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ballast
import torch
import torch.distributed as dist
from ballast.torch.parameters.managed_parameter import ParameterState, managed
from python.wrap.support.frameworks import as_launched

WORDS = [f"w{number}" for number in range(60)]
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "reward")


@dataclass(frozen=True)
class Case:
    """A training with one Trainer. Without `options` it is the plain one."""

    kind: str  # "trainer", "sft", "dpo" or "grpo"
    options: dict[str, Any] | None = None  # of ballast.wrap()
    deferred: bool = False  # with the reference model
    has_adapters: bool = False
    plain: int | None = None  # the number of a plain case, from whose checkpoint it resumes too
    changes: dict[str, Any] = field(default_factory=dict)  # of the Trainer's arguments


@dataclass
class Trained:
    """What a training, and the same one from its second checkpoint on, has logged; and whether the exported model is the
    trained one."""

    logged: list[tuple[str, float]]
    resumed: list[tuple[str, float]] = field(default_factory=list)
    resumed_plain: list[tuple[str, float]] = field(default_factory=list)  # from the plain training's checkpoint on
    has_exported: bool = False
    has_best: bool = False
    model: str = ""  # the class of the model that the Trainer calls
    shares_reference: bool = False  # whether each rank keeps a shard of the reference model


def tiny_model() -> Any:
    """Return a model whose matrices are large enough to be deferred."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def tokenizer() -> Any:
    import tokenizers
    import transformers

    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", "<bos>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", bos_token="<bos>"
    )


def arguments(folder: Path, ranks: int, **changes: Any) -> dict[str, Any]:
    """Return arguments for global batches of 8 rows, evaluations in the middle, and a checkpoint every two steps."""
    chosen = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4 // ranks,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # so that clipping changes the update, and rounding errors of small gradients do not
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the best model is not the last one
        "report_to": "none",
        "disable_tqdm": True,
    }
    return chosen | changes


def rows_of(kind: str) -> list[dict[str, Any]]:
    numbers = torch.randint(4, 64, (40, 8), generator=torch.Generator().manual_seed(0)).tolist()
    text = [" ".join(WORDS[number - 4] for number in row) for row in numbers]
    if kind == "trainer":
        return [{"input_ids": row, "labels": row} for row in numbers]
    if kind == "sft":
        return [{"text": line} for line in text]
    if kind == "dpo":
        return [{"prompt": line, "chosen": " w1 w2", "rejected": " w3"} for line in text]
    return [{"prompt": line} for line in text]


def classes_of(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return the Trainer's class, that of its arguments, and what only this kind takes."""
    import transformers

    if kind == "trainer":
        return transformers.Trainer, transformers.TrainingArguments, {}
    import trl

    tokens = {"processing_class": tokenizer()}
    if kind == "sft":
        return trl.SFTTrainer, trl.SFTConfig, tokens
    if kind == "dpo":
        return trl.DPOTrainer, trl.DPOConfig, tokens
    return trl.GRPOTrainer, trl.GRPOConfig, {**tokens, "reward_funcs": longest_words}


def longest_words(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(len(word) for word in each.split())) for each in completions]


def trainer_of(case: Case, folder: Path) -> Any:
    from ballast.integrations.transformers import BallastTrainer, BallastTrainerMixin

    Plain, Arguments, more = classes_of(case.kind)
    options: dict[str, Any] = {}
    if case.options is not None:
        options = {"ballast": case.options}
        Mine = BallastTrainer if case.kind == "trainer" else type(Plain.__name__, (BallastTrainerMixin, Plain), {})
    else:
        Mine = Plain
    rows = rows_of(case.kind)
    if case.kind != "trainer":
        import datasets

        rows = datasets.Dataset.from_list(rows)
        split = rows.select(range(32)), rows.select(range(32, 40))
    else:
        split = rows[:32], rows[32:]
    given = Arguments(**arguments(folder, dist.get_world_size(), **case.changes))
    with ballast.deferred() if case.deferred else contextlib.nullcontext():
        model = with_adapters(tiny_model()) if case.has_adapters else tiny_model()
        if case.kind == "dpo":
            more["ref_model"] = tiny_model()
    if case.kind == "grpo":  # it reads the reference model from there
        model.config._name_or_path = f"{folder}-base"
        model.save_pretrained(model.config._name_or_path)  # rank 0 writes
        dist.barrier()
    assert any(each.is_meta for each in model.parameters()) is case.deferred
    return Mine(model=model, args=given, train_dataset=split[0], eval_dataset=split[1], **more, **options)


def with_adapters(model: Any) -> Any:
    """Add an adapter with a head that is trained in full, and another adapter, which is frozen."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(model, config)
    model.add_adapter("other", config)
    return model


def logged(trainer: Any) -> list[tuple[str, float]]:
    return [(key, line[key]) for line in trainer.state.log_history for key in LOGGED if key in line]


def is_exported(trainer: Any, folder: Path) -> bool:
    """Return whether from_pretrained() reads the model that the Trainer has."""
    import peft
    import transformers

    if isinstance(trainer.model, peft.PeftModel):
        dist.barrier()  # rank 0 writes the adapters alone
        read = peft.PeftModel.from_pretrained(tiny_model(), str(folder))
        read.load_adapter(str(folder / "other"), "other")
    else:
        read = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with ballast.gather(trainer.model):
        return all(torch.equal(mine, theirs) for mine, theirs in zip(trainer.model.parameters(), read.parameters()))


def train(case: Case, folder: Path) -> Trained:
    """Train; with Ballast also resume from the second step, and export."""
    trainer = trainer_of(case, folder)
    trainer.train()
    trained = Trained(logged(trainer), model=type(trainer.model_wrapped).__name__)
    if (reference := getattr(trainer, "ref_model", None)) is not None:
        states = {None if (mine := managed(each)) is None else mine.state for each in reference.parameters()}
        # The unit of the last use may still be gathered.
        trained.shares_reference = {ParameterState.SHARDED} <= states <= {ParameterState.SHARDED, ParameterState.GATHERED}
    if case.options is not None:
        best = trainer.state.best_model_checkpoint
        trained.has_best = best is None or is_exported(trainer, Path(best))
        trained.resumed, trained.has_exported = resume(case, folder, folder / "final")
    if case.plain is not None:
        trained.resumed_plain, _ = resume(case, folder.parent / str(case.plain), folder / "from_plain")
    return trained


def resume(case: Case, folder: Path, into: Path) -> tuple[list[tuple[str, float]], bool]:
    """Resume from the second step, and export. Return what was logged, and whether the exported model is the trained one."""
    trainer = trainer_of(case, folder)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    trainer.save_model(str(into))
    return logged(trainer), is_exported(trainer, into)


def trained_on_ranks(rank: int, folder: str, cases: list[Case]) -> tuple[list[Trained], tuple[list[int], ...]]:
    """Return what each case has trained, and what a model has generated."""
    as_launched(rank)
    return [train(case, Path(folder) / str(number)) for number, case in enumerate(cases)], generated_on_ranks(rank)


def generated_on_ranks(rank: int) -> tuple[list[int], list[int], list[int]]:
    """Return what the plain model and a sharded one generate, whole and unit by unit. The ranks generate different numbers of
    tokens."""
    from ballast.integrations.transformers import gathering_to_generate

    prompt, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 2 + 3 * rank, "do_sample": False}
    plain = tiny_model().generate(prompt, **options)
    model = tiny_model()
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3, timeout=60.0)
    with gathering_to_generate(model):
        sharded = model.generate(prompt, **options)
        by_units = model.generate(prompt, synced_gpus=True, **options)
    assert "generate" not in vars(model)
    optimizer.close()
    return plain[0].tolist(), sharded[0].tolist(), by_units[0].tolist()


def resumed_on_ranks(rank: int, folder: str, cases: dict[int, Case]) -> list[tuple[list[tuple[str, float]], bool]]:
    as_launched(rank)
    return [resume(case, there := Path(folder) / str(number), there / "resumed") for number, case in cases.items()]
