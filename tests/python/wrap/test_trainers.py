"""Tests of ballast.integrations.transformers with Trainers of transformers and TRL on two ranks: they log what the plain ones
log, evaluate, save, resume on the same and on another number of ranks, and export."""

from __future__ import annotations

import contextlib
import gc
import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast.torch.parameters.managed_parameter import ParameterState, managed
from python.wrap.support.frameworks import as_launched, tiny_model
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from python.wrap.support.resident import peak_resident, proportional
from torch.utils._python_dispatch import TorchDispatchMode

if any(find_spec(name) is None for name in ("datasets", "peft", "transformers", "trl")):  # only the ranks import them
    pytest.skip("TRL is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)


WORDS = [f"w{number}" for number in range(60)]
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "reward")


@dataclass(frozen=True)
class Case:
    """A training with one Trainer. Without `options` it is the plain one."""

    kind: str  # "trainer", "sft", "dpo" or "grpo"
    options: dict[str, Any] | None = None  # the options of ballast.wrap()
    deferred: bool = False  # the reference model is deferred too
    has_adapters: bool = False
    plain: int | None = None  # the number of a plain case, from whose checkpoint it resumes too
    changes: dict[str, Any] = field(default_factory=dict)  # changes of the Trainer's arguments
    words: int = 64  # of the vocabulary


@dataclass
class Trained:
    """What a training, and the same one from its second checkpoint on, has logged; and whether the exported model is the
    trained one."""

    logged: list[tuple[str, float]]
    resumed: list[tuple[str, float]] = field(default_factory=list)
    resumed_plain: list[tuple[str, float]] = field(default_factory=list)  # figures from the plain training's checkpoint on
    has_exported: bool = False
    has_best: bool = False
    model: str = ""  # the class of the model that the Trainer calls
    shares_reference: bool = False  # whether each rank keeps a shard of the reference model


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
        "adam_epsilon": 1e-3,  # clipping then changes the update, and rounding errors of small gradients do not
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the best model is then not the last one
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
        model = tiny_model(64, case.words)
        model = with_adapters(model) if case.has_adapters else model
        if case.kind == "dpo":
            more["ref_model"] = tiny_model(64)
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
        read = peft.PeftModel.from_pretrained(tiny_model(64), str(folder))
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
    plain = tiny_model(64).generate(prompt, **options)
    model = tiny_model(64)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model, stage=3, tuning=ballast.Tuning(timeout=60.0))
    with gathering_to_generate(model):
        sharded = model.generate(prompt, **options)
        by_units = model.generate(prompt, synced_gpus=True, **options)
    assert "generate" not in vars(model)
    optimizer.close()
    return plain[0].tolist(), sharded[0].tolist(), by_units[0].tolist()


class Copies(TorchDispatchMode):
    """Counts the copies of a tensor's values, or of most of them, that operators make."""

    def __init__(self, elements: int):
        super().__init__()
        self.elements, self.count = elements, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten.copy_):
            self.count += args[0].numel() > self.elements // 2
        return function(*args, **(kwargs or {}))


@dataclass
class ManyWords:
    """What a training with a large vocabulary shows."""

    losses: list[float] = field(default_factory=list)
    copies: int = 0  # copies of the head that the loss makes, or leaves to be made
    gathers: int = 0  # of the head
    begun: int = 0  # bytes of the process where the last loss begins
    unplanned: int = 0  # the same, with its share of what others map too, beyond the plan
    grown: int = 0  # the most by which the process grows from there to its peak in the loss


def trained_with_many_words(rank: int, folder: str, cases: list[Case]) -> list[ManyWords]:
    import trl.trainer.utils
    from ballast.torch.parameters import unit_gather

    as_launched(rank)
    results, loss = [], trl.trainer.utils._ChunkedLogProbFunction
    for number, case in enumerate(cases):
        of_process, found = proportional(), ManyWords()
        trainer = trainer_of(case, there := Path(folder) / str(number))
        copies, moves = Copies(case.words * 64), mock.Mock(wraps=unit_gather.swap_memory)

        def forward(*args: Any) -> Any:
            found.unplanned = proportional() - of_process
            found.begun = peak_resident(begin=True)
            with copies:
                return of_trl[0](*args)

        def backward(*args: Any) -> Any:
            with copies:
                result = of_trl[1](*args)
            found.grown = max(found.grown, peak_resident() - found.begun)
            return result

        of_trl = loss.forward, loss.backward
        with mock.patch.multiple(loss, forward=staticmethod(forward), backward=staticmethod(backward)):
            with mock.patch.object(unit_gather, "swap_memory", moves):
                trainer.train()
        if case.options is not None:
            trainer.optimizer.optimizer.write_timeline(file := there / f"{rank}.json")
            found.gathers = sum(event["name"] == "gather lm_head" for event in json.loads(file.read_text()))
            found.unplanned -= trainer.optimizer.optimizer.metrics()["memory_bytes/device"]
        found.losses = [value for key, value in logged(trainer) if key == "loss"]
        found.copies = copies.count + moves.call_count
        results.append(found)
        del trainer, forward, backward  # the next training takes the place of this one
        gc.collect()
    return results


def resumed_on_ranks(rank: int, folder: str, cases: dict[int, Case]) -> list[tuple[list[tuple[str, float]], bool]]:
    as_launched(rank)
    return [resume(case, there := Path(folder) / str(number), there / "resumed") for number, case in cases.items()]


GENERATES = {
    "load_best_model_at_end": False,
    "eval_strategy": "no",
    "num_generations": 2,
    "max_completion_length": 4,
    "beta": 0.1,  # a reference model is used
}
CASES = [
    Case("trainer"),
    Case("trainer", {"stage": 0}),
    Case("trainer", {"stage": 1}),
    Case("trainer", {"stage": 2}),
    Case("trainer", {"stage": 3, "offload": "host"}, deferred=True, plain=0),
    Case("trainer", has_adapters=True),
    Case("trainer", {"stage": 3}, has_adapters=True),
    Case("sft"),
    Case("sft", {"stage": 2}, deferred=True),
    Case("sft", {"stage": 3}),
    Case("dpo"),
    Case("dpo", {"stage": 2}),
    Case("dpo", {"stage": 3}, deferred=True),
    Case("grpo", changes=GENERATES),
    Case("grpo", {"stage": 2}, changes=GENERATES),
    Case("grpo", {"stage": 3}, changes=GENERATES),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def of_ranks(folder):
    return run_ranks(2, trained_on_ranks, str(folder), CASES, imported=FRAMEWORKS)


@pytest.fixture(scope="module")
def trained(of_ranks):
    """Return what each case has trained on the first of two ranks."""
    return of_ranks[0][0]


def check_close(mine, theirs):
    assert [key for key, _ in mine] == [key for key, _ in theirs]
    torch.testing.assert_close([value for _, value in mine], [value for _, value in theirs], atol=1e-4, rtol=1e-3)


def plain_of(case, trained):
    kinds = [(each.kind, each.has_adapters, each.options is None) for each in CASES]
    return trained[kinds.index((case.kind, case.has_adapters, True))]


def with_ballast(trained):
    return [(case, each) for case, each in zip(CASES, trained) if case.options is not None]


def test_trainers_log_what_plain_ones_log(trained):
    for case, mine in with_ballast(trained):
        check_close(mine.logged, plain_of(case, trained).logged)


def test_trainers_resume_with_the_same_bits(trained):
    for _, mine in with_ballast(trained):
        assert mine.resumed == mine.logged


def test_trainers_export_models_for_from_pretrained(trained):
    assert all(mine.has_exported for _, mine in with_ballast(trained))


def test_trainers_load_the_best_model_at_the_end(trained):
    assert all(mine.has_best for _, mine in with_ballast(trained))


def test_no_data_parallelism_is_around_the_model(trained):
    assert trained[0].model == "DistributedDataParallel"
    assert {mine.model for _, mine in with_ballast(trained)} == {"LlamaForCausalLM", "PeftModel"}


def test_ranks_generate_different_numbers_of_tokens(of_ranks):
    for number, (_, (plain, sharded, by_units)) in enumerate(of_ranks):
        assert sharded == by_units == plain
        assert len(sharded) == 3 + 2 + 3 * number


def test_reference_models_are_sharded_in_stage_3(trained):
    for case, mine in zip(CASES, trained):
        expected = case.kind in ("dpo", "grpo") and case.options == {"stage": 3}
        assert mine.shares_reference is expected, case


def test_the_head_of_a_large_vocabulary_is_gathered_once_a_pass_and_not_copied(tmp_path):
    """TRL computes the loss from the weight of the head in five tiles of the vocabulary, outside of the head's call, and again
    in backward. The process has what the plan says, and grows in the loss as with plain torch: by the gradient of the head, and
    logits of a tile."""
    steps = 3
    changes = {"gradient_accumulation_steps": 1, "max_steps": steps, "save_strategy": "no"}
    changes |= {"eval_strategy": "no", "load_best_model_at_end": False}
    tuning = ballast.Tuning(timeline=True, keep_gathered=False)
    options = [None, {"stage": 2, "tuning": ballast.Tuning(timeline=True)}, {"stage": 3, "tuning": tuning}]
    cases = [Case("sft", each, changes=changes, words=152_064) for each in options]
    head = 152_064 * 64 * torch.float32.itemsize
    for plain, *ours in run_ranks(2, trained_with_many_words, str(tmp_path), cases, imported=FRAMEWORKS):
        for mine in ours:
            assert mine.losses == pytest.approx(plain.losses, rel=1e-4) and len(mine.losses) == steps
            assert mine.copies == plain.copies
            assert mine.unplanned < head // 2 and mine.grown < plain.grown + head // 2
            assert mine.gathers <= 2 * steps + 1  # the next step has begun
        assert ours[1].gathers >= steps


def test_trainers_resume_on_another_number_of_ranks(trained, folder):
    """Their losses are those of two ranks; but there GRPO samples other tokens."""
    cases = {number: case for number, case in enumerate(CASES) if case.options is not None and case.options["stage"] > 0}
    [resumed] = run_ranks(1, resumed_on_ranks, str(folder), cases, imported=FRAMEWORKS)
    for (number, case), (logged, has_exported) in zip(cases.items(), resumed):
        keys = ("learning_rate",) if case.kind == "grpo" else LOGGED
        check_close(*([line for line in lines if line[0] in keys] for lines in (logged, trained[number].logged)))
        assert has_exported


def test_a_trainer_resumes_from_a_plain_checkpoint(trained):
    [number] = [number for number, case in enumerate(CASES) if case.plain is not None]
    check_close(trained[number].resumed_plain, trained[CASES[number].plain].logged)
