"""Tests with Accelerate, Hugging Face's Trainer and PEFT: results agree with those of the plain optimizer."""

from importlib.util import find_spec

import pytest
import torch
from python.wrap.support import frameworks
from python.wrap.support.loops import mean_square
from python.wrap.support.ranks import FRAMEWORKS, run_ranks

CANNOT_RESUME = "rank 0's alone cannot be resumed. Call ballast.save()"
WHY = "is not installed: .ci/bootstrap venv frameworks"
accelerate = pytest.importorskip("accelerate", reason=f"accelerate {WHY}")


def check_close(one, other):
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(one[1], other[1]):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_trains_as_before(mixed_precision, tmp_path):
    _, _, plain = frameworks.accelerated(None, mixed_precision=mixed_precision)
    for configuration in ({"stage": 2}, {"stage": 2, "offload": f"nvme:{tmp_path}", "run": "mine"}):
        _, prepared, run = frameworks.accelerated(configuration, mixed_precision=mixed_precision)
        assert type(prepared).__name__ == "AcceleratedOptimizer"
        assert prepared.optimizer is run.optimizer
        assert run.optimizer.steps == 4
        check_close((plain.losses, plain.parameters), (run.losses, run.parameters))


def test_accelerate_on_two_ranks_trains_as_its_data_parallelism_does():
    configurations = [None, {"stage": 0}, {"stage": 2}, {"stage": 3, "offload": "host"}]
    for plain, first, *others in run_ranks(2, frameworks.accelerated_ranks, configurations, imported=FRAMEWORKS):
        check_close(plain, first)
        for other in others:
            assert other[0] == first[0]
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(other[1], first[1]))


def test_accelerate_saves_a_training_and_resumes(tmp_path):
    accelerator, _, run = frameworks.accelerated({"stage": 2})
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
    for before, saving in run_ranks(2, frameworks.saves_with_accelerate, str(tmp_path), imported=FRAMEWORKS):
        assert before == []
        assert [CANNOT_RESUME in line for line in saving] == [True]


def test_accelerates_own_gradient_scaling():
    """Accelerate patches step() of the optimizer to see whether a step was skipped. This works."""
    from accelerate.optimizer import AcceleratedOptimizer

    _, _, run = frameworks.accelerated({"stage": 2})
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
    plain = frameworks.receiver_of(None, tmp_path / "plain")
    plain.train()
    for configuration in ({"stage": 2}, {"stage": 3}):
        folder = tmp_path / str(configuration["stage"])
        uninterrupted = frameworks.receiver_of(configuration, folder)
        uninterrupted.train()
        check_close(frameworks.outcome(plain), frameworks.outcome(uninterrupted))
        resumed = frameworks.receiver_of(configuration, folder)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert uninterrupted.optimizer.optimizer.steps == resumed.optimizer.optimizer.steps == 4
        for mine, theirs in zip(frameworks.outcome(uninterrupted)[1], frameworks.outcome(resumed)[1]):
            assert torch.equal(mine, theirs)


def test_peft_merges_adapters_as_before(tmp_path):
    if find_spec("peft") is None:  # only the ranks import it
        pytest.skip(f"peft {WHY}")
    on_drives = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    configurations = [None, {"stage": 2}, {"stage": 3}, {"stage": 3, "offload": on_drives}]
    [[plain, *alone]] = run_ranks(1, frameworks.merged_adapters_of_ranks, configurations, imported=FRAMEWORKS)
    together, _ = run_ranks(2, frameworks.merged_adapters_of_ranks, configurations[1:], imported=FRAMEWORKS)
    for other in (*alone, *together):
        check_close(plain, other)
