"""Tests of ballast.integrations on one rank: wrong use says what is wrong and what to do, and models are read from files."""

import inspect
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import ballast
import pytest
import torch
from ballast.integrations import require_framework, shard_frozen
from python.wrap.support.frameworks import tiny_model

WHY = "is not installed: .ci/bootstrap venv frameworks"
accelerate = pytest.importorskip("accelerate", reason=f"accelerate {WHY}")
transformers = pytest.importorskip("transformers", reason=f"transformers {WHY}")


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # a Trainer creates its folder there
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def trainer(model=None, *, arguments=None, ballast_options, **more):
    from ballast.integrations.transformers import BallastTrainer

    arguments = arguments or transformers.TrainingArguments(use_cpu=True, report_to="none", save_strategy="no", max_steps=1)
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    return BallastTrainer(model or tiny_model(64), arguments, train_dataset=rows, ballast=ballast_options, **more)


def accelerator(**options):
    from ballast.integrations.accelerate import Accelerator

    return Accelerator(cpu=True, **options)


def test_the_nearest_option_is_offered():
    with pytest.raises(ballast.UsageError, match='Did you mean "stage"'):
        trainer(ballast_options={"stag": 3})
    with pytest.raises(ballast.UsageError, match='Did you mean "offload"'):
        accelerator(ballast={"ofload": "host"})
    with pytest.raises(ballast.UsageError, match="such as ballast=dict"):
        accelerator(ballast=3)


def test_another_backend_is_refused():
    arguments = transformers.TrainingArguments(use_cpu=True, report_to="none")
    arguments.fsdp = "full_shard"  # its constructor refuses this without GPUs
    with pytest.raises(ballast.UsageError, match="cannot train with Ballast and fsdp=: both shard the model"):
        trainer(arguments=arguments, ballast_options={"stage": 3})
    with pytest.raises(ballast.UsageError, match="cannot train with Ballast and fsdp_plugin="):
        accelerator(ballast={}, fsdp_plugin=accelerate.utils.FullyShardedDataParallelPlugin())


def test_a_reference_model_that_is_written_to_is_refused_in_stage_3():
    arguments = transformers.TrainingArguments(use_cpu=True, report_to="none")
    arguments.sync_ref_model = True  # as in the arguments of DPO and GRPO
    with pytest.raises(ballast.UsageError, match="cannot train with sync_ref_model=True in stage 3"):
        trainer(arguments=arguments, ballast_options={"stage": 3})


def test_evaluations_that_cast_the_model_are_refused_before_the_training():
    arguments = transformers.TrainingArguments(use_cpu=True, report_to="none", bf16_full_eval=True)
    with pytest.raises(ballast.UsageError, match="cannot evaluate with bf16_full_eval=True(.|\n)*bf16=True, which"):
        trainer(arguments=arguments, ballast_options={"stage": 2})


def test_a_model_that_is_not_trained_is_partitioned_with_the_options_of_the_other(tmp_path):
    words = torch.arange(8).view(1, 8)
    expected = tiny_model(64)(input_ids=words).logits
    with ballast.deferred():
        model = tiny_model(64)
    drive = f"nvme:{tmp_path}"
    tiers = {"parameters": drive, "gradients": "host", "state": drive}
    owner = shard_frozen(model, {"stage": 3, "offload": tiers, "max_grad_norm": 1.0})
    assert torch.equal(model(input_ids=words).logits, expected)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert "\nhost" in owner._ballast.ledger()  # frozen parameters stay there
    owner.close()


def test_a_model_that_is_prepared_already_is_refused():
    for_it = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(ballast.UsageError, match="it is in DataParallel"):
        accelerator(ballast={}).prepare(for_it, torch.optim.SGD(for_it.parameters()))


def test_options_of_a_wrapped_optimizer_are_refused():
    model = tiny_model(64)
    optimizer = ballast.wrap(torch.optim.AdamW(model.parameters()), model)
    with pytest.raises(ballast.UsageError, match="cannot use ballast=: the optimizer is wrapped already"):
        trainer(model, ballast_options={"stage": 3}, optimizers=(optimizer, None)).train()
    trainer(model, ballast_options=None, optimizers=(optimizer, None)).train()
    assert optimizer.steps == 1


def test_an_optimizer_without_its_model_is_refused():
    with pytest.raises(ballast.UsageError, match="cannot prepare an optimizer without its model"):
        accelerator(ballast={}).prepare(torch.optim.SGD(torch.nn.Linear(2, 2).parameters()))


def test_updates_in_backward_have_no_norm():
    arguments = transformers.TrainingArguments(
        use_cpu=True, report_to="none", save_strategy="no", max_steps=2, logging_steps=1, max_grad_norm=0.0
    )
    training = trainer(arguments=arguments, ballast_options={"stage": 3, "tuning": ballast.Tuning(update_in_backward=True)})
    training.train()
    assert [("loss" in line, "grad_norm" in line) for line in training.state.log_history[:2]] == [(True, False)] * 2


def test_the_files_of_a_model_are_pushed_to_the_hub(monkeypatch):
    pushed = []

    class Hub:
        def create_repo(self, name, **_):
            return SimpleNamespace(repo_id=f"mine/{name}")

        def upload_folder(self, folder_path, **_):
            pushed.append({each.name for each in Path(folder_path).iterdir()})
            return SimpleNamespace(done=lambda: True)

    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    arguments = transformers.TrainingArguments(
        use_cpu=True, report_to="none", save_steps=1, max_steps=1, push_to_hub=True, hub_token="none"
    )
    training = trainer(arguments=arguments, ballast_options={"stage": 3})
    training.train()
    training.push_to_hub()
    assert len(pushed) == 2  # one with the checkpoint, and one by the call
    assert all({"config.json", "generation_config.json", "model.safetensors"} <= files for files in pushed)


def test_a_framework_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers is not installed. Install it: pip install transformers"):
        require_framework("transformers")


def test_from_pretrained_reads_what_a_rank_keeps(tmp_path):
    from ballast.integrations.transformers import from_pretrained

    model = tiny_model(64)
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(tmp_path)
    random_state = torch.get_rng_state()
    deferred = from_pretrained(transformers.AutoModelForCausalLM, tmp_path, use_cache=False)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert deferred.generation_config.eos_token_id == [1, 7]
    assert not deferred.config.use_cache
    assert not deferred.training
    assert all(parameter.is_meta for parameter in deferred.parameters() if parameter.dim() > 1)
    optimizer = ballast.wrap(torch.optim.AdamW(deferred.parameters()), deferred, stage=3)
    with ballast.gather(deferred):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(deferred.parameters(), model.parameters()))
    optimizer.close()


def test_from_pretrained_reads_the_revision_that_is_named_and_refuses_what_it_would_ignore(tmp_path, monkeypatch):
    import huggingface_hub
    from ballast.integrations.transformers import from_pretrained

    model = tiny_model(64)
    model.save_pretrained(tmp_path / "inner")
    requested = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: requested.update(options) or tmp_path)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name, **_: (model.config, {}))
    from_pretrained(transformers.LlamaForCausalLM, "of/hub", revision="v1", subfolder="inner")
    assert requested["revision"] == "v1"
    monkeypatch.undo()
    with pytest.raises(ballast.UsageError, match="cannot read a deferred model with quantization_config=, device_map="):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path / "inner", quantization_config={}, device_map="auto")


def test_from_pretrained_of_transformers_loads_its_values_inside_of_deferred(tmp_path):
    model = tiny_model(64)
    model.save_pretrained(tmp_path)
    with ballast.deferred():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    optimizer = ballast.wrap(torch.optim.AdamW(loaded.parameters()), loaded, stage=3)
    with ballast.gather(loaded):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(loaded.parameters(), model.parameters()))
    optimizer.close()


def test_methods_of_transformers_that_the_mixin_replaces():
    """The mixin replaces methods that are no part of the API of transformers. Another version may rename them."""
    parameters = {
        "_move_model_to_device": ["model", "device"],
        "_get_grad_norm": ["model", "grad_norm"],
        "_save": ["output_dir", "state_dict"],
        "_save_optimizer_and_scheduler": ["output_dir"],
        "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
        "_load_optimizer_and_scheduler": ["checkpoint"],
        "_load_best_model": [],
    }
    for name, expected in parameters.items():
        assert [*inspect.signature(getattr(transformers.Trainer, name)).parameters][1:] == expected, name


def test_an_accelerator_and_its_loaders_can_be_pickled():
    accelerate.state.GradientState._reset_state()  # a process has one, in which a Trainer's loader may be open
    prepared = accelerator(ballast={"stage": 2})
    loader = prepared.prepare(torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2))
    copy = pickle.loads(pickle.dumps(prepared))
    assert copy.ballast_options == {"stage": 2} and copy.state.__dict__ == prepared.state.__dict__
    assert [each.shape for each in pickle.loads(pickle.dumps(loader))] == [(2, 2)] * 2
    model = torch.nn.Linear(2, 2)
    model, optimizer = prepared.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [each.shape for each in pickle.loads(pickle.dumps(loader))] == [(2, 2)] * 2
    with pytest.raises(ballast.UsageError, match="cannot pickle a wrapped optimizer"):
        pickle.dumps(prepared)
    optimizer.optimizer.close()


def test_private_names_of_accelerate():
    """save_state() and load_state() replace this list for a moment: Accelerate has no hook to save optimizers."""
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    assert accelerator._optimizers == [optimizer]
