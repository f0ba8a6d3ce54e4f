"""Tests that the optimizers suite trains, with a tiny model. They need the built package."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from python.conftest import BUILT

if not BUILT or find_spec("torch") is None:
    pytest.skip("the Python package is not built, or torch is missing", allow_module_level=True)

import loss_training  # noqa: E402 (as all below, it needs both)
import optimizers  # noqa: E402
import torch  # noqa: E402
from contest import Case  # noqa: E402
from optimizers import BALLAST_ADAMW, BALLAST_MUON, CONTEST, TORCH_MUON  # noqa: E402

WORDS = loss_training.split([f"{number} bottles, {number + 1} glasses. ".encode() for number in range(400)])
STEPS = 20


@pytest.fixture(autouse=True, scope="module")
def tiny() -> Iterator[None]:
    """Train a small model, on one thread as the suite does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LAYERS": 1, "WIDTH": 64, "HEADS": 1, "SEQUENCES": 2}.items():
            patch.setattr(loss_training, name, value)
        patch.setattr(loss_training, "TEXTS", {name: lambda: WORDS for name in loss_training.TEXTS})
        yield
    torch.set_num_threads(before)


def test_muon_has_the_losses_of_torch_and_adamw_others(tmp_path: Path):
    whole = {optimizer: optimizers.train(Case(optimizer, 0), STEPS, tmp_path) for optimizer in CONTEST.contenders}
    theirs, ours, adamw = (whole[optimizer] for optimizer in (TORCH_MUON, BALLAST_MUON, BALLAST_ADAMW))
    gaps = [abs(our - their) for (_, our), (_, their) in zip(ours.curve, theirs.curve, strict=True)]
    assert max(gaps) < 1e-3 < abs(adamw.last - theirs.last)
    assert all(losses.curve[-1][1] < losses.curve[0][1] - 0.1 for losses in whole.values())


def test_optimizers_share_the_start_and_each_parameter_has_one():
    runs = {optimizer: optimizers.training_of(Case(optimizer, 1), STEPS) for optimizer in CONTEST.contenders}
    starts = [run.validate(4) for run in runs.values()]
    assert starts == starts[:1] * len(CONTEST.contenders)
    for run in runs.values():
        updated = [parameter for each in run.optimizers for group in each.param_groups for parameter in group["params"]]
        assert {id(each) for each in updated} == {id(each) for each in run.model.parameters()}
        assert len(updated) == len(list(run.model.parameters()))
        assert {parameter.dtype for parameter in updated} == {torch.float32}
        run.close()
    assert type(runs[TORCH_MUON].optimizers[0]) is torch.optim.Muon
    assert isinstance(runs[BALLAST_MUON].optimizers[0], torch.optim.Muon) and runs[BALLAST_MUON].optimizers[0].steps == 0
    assert [isinstance(each, torch.optim.AdamW) for each in runs[BALLAST_ADAMW].optimizers] == [True]


def test_the_suite_repeats_no_run_and_refuses_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "runs.jsonl"

    def run_suite(*options: str) -> list[str]:
        """Return the names of the runs that were made."""
        monkeypatch.setattr("sys.argv", ["optimizers", "--runs", str(path), "--steps", str(STEPS), *options])
        optimizers.main()
        lines = capfd.readouterr().err.splitlines()
        return [line.removeprefix("optimizers: ") for line in lines if line.startswith("optimizers: ") and "seed" in line]

    first, second = Case(BALLAST_ADAMW, 0), Case(BALLAST_ADAMW, 1)
    assert run_suite("--only", first.name) == [first.name]
    assert run_suite("--only", BALLAST_ADAMW, "--table") == []
    assert run_suite("--only", first.name, "--only", second.name) == [second.name]
    with pytest.raises(SystemExit, match="cannot add to the recorded runs: .*20 steps.*; use another file"):
        run_suite("--only", first.name, "--steps", "40")
    finished = CONTEST.read(path)
    assert list(finished) == [first, second] and finished[first]["loss"] != finished[second]["loss"]
