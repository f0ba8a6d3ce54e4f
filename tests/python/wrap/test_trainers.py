"""Tests of ballast.integrations.transformers with Trainers of transformers and TRL on two ranks: they log what the plain ones
log, evaluate, save, resume on the same and on another number of ranks, and export."""

from importlib.util import find_spec

import pytest
import torch
from python.wrap.support import trainers
from python.wrap.support.ranks import FRAMEWORKS, run_ranks
from python.wrap.support.trainers import Case

if any(find_spec(name) is None for name in ("datasets", "peft", "transformers", "trl")):  # only the ranks import them
    pytest.skip("TRL is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)

GENERATES = {
    "load_best_model_at_end": False,
    "eval_strategy": "no",
    "num_generations": 2,
    "max_completion_length": 4,
    "beta": 0.1,  # with a reference model
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
    return run_ranks(2, trainers.trained_on_ranks, str(folder), CASES, imported=FRAMEWORKS)


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


def test_trainers_resume_on_another_number_of_ranks(trained, folder):
    """Their losses are those of two ranks; but there GRPO samples other tokens."""
    cases = {number: case for number, case in enumerate(CASES) if case.options is not None and case.options["stage"] > 0}
    [resumed] = run_ranks(1, trainers.resumed_on_ranks, str(folder), cases, imported=FRAMEWORKS)
    for (number, case), (logged, has_exported) in zip(cases.items(), resumed):
        keys = ("learning_rate",) if case.kind == "grpo" else trainers.LOGGED
        check_close(*([line for line in lines if line[0] in keys] for lines in (logged, trained[number].logged)))
        assert has_exported


def test_a_trainer_resumes_from_a_plain_checkpoint(trained):
    [number] = [number for number, case in enumerate(CASES) if case.plain is not None]
    check_close(trained[number].resumed_plain, trained[CASES[number].plain].logged)
