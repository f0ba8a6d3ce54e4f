"""Tests that the formats suite trains, with a tiny model. They need the built package."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from python.conftest import BUILT

if not BUILT or find_spec("torch") is None:
    pytest.skip("the Python package is not built, or torch is missing", allow_module_level=True)

import contest  # noqa: E402 (as all below, it needs both)
import formats  # noqa: E402
import loss_training  # noqa: E402
import torch  # noqa: E402
from contest import FINE_TUNING, TRAINING, Case  # noqa: E402
from formats import START, contender, training_of  # noqa: E402

WORDS = loss_training.split([f"{number} bottles, {number + 1} glasses. ".encode() for number in range(400)])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Train as the suite does. Threads of torch that wait for each other would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LAYERS": 1, "WIDTH": 32, "HEADS": 1, "SEQUENCES": 2}.items():
        monkeypatch.setattr(loss_training, name, value)
    monkeypatch.setattr(loss_training, "TEXTS", {name: lambda: WORDS for name in loss_training.TEXTS})


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats.TASKS, TRAINING.name, TRAINING._replace(learning_rate=1e-2))


def case_of(state: str, gradients: str, seed: int = 0) -> Case:
    return Case(contender(TRAINING, state, gradients), seed)


def trained(case: Case, steps: int = 20) -> loss_training.Losses:
    return training_of(case, steps).to_the_end()


def test_the_same_seed_gives_the_same_losses(fast: None):
    losses = trained(START)
    assert losses == trained(START)
    assert losses != trained(START._replace(seed=1))
    assert losses.curve[-1][1] < losses.curve[0][1] - 0.5
    assert losses.last != losses.curve[-1][1]  # more sequences


@pytest.mark.parametrize("pair", [("compact", "fp32"), ("4bit", "fp32"), ("fp32", "bf16")], ids=" ".join)
def test_a_format_changes_the_losses(pair: tuple[str, str]):
    assert trained(case_of(*pair)) != trained(START)


def test_split_has_the_losses_of_fp32():
    assert trained(case_of("split", "fp32")) == trained(START)


def test_parameters_and_activations_are_bf16():
    run = training_of(START, 20)
    dtypes = {parameter.dtype for parameter in run.model.parameters()}
    run.model.head.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    run.validate(4)
    assert dtypes == {torch.bfloat16}
    run.close()


def test_seeds_of_fine_tuning_differ_in_their_batches_alone():
    start = training_of(START, 20).model.state_dict()
    tuned = [training_of(Case(contender(FINE_TUNING, "fp32", "fp32"), seed), 20, start) for seed in (0, 1)]
    assert tuned[0].validate(4) == tuned[1].validate(4)
    assert tuned[0].train() != tuned[1].train()


def test_the_learning_rate_rises_then_falls_to_a_tenth():
    rates = [loss_training.rate(step, 100, 0.05) for step in range(101)]
    assert rates[0] == pytest.approx(0.2) and max(rates) == 1 == rates[5]
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[100] == pytest.approx(loss_training.LOWEST_RATE)


def test_the_suite_resumes_and_fine_tunes_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    path = tmp_path / "runs.jsonl"
    tuned = Case(contender(FINE_TUNING, "compact", "fp32"), 0)

    def run_suite(*options: str) -> list[str]:
        """Return the names of the runs that were made."""
        monkeypatch.setattr("sys.argv", ["formats", "--runs", str(path), "--steps", "100", *options])
        formats.main()
        lines = capfd.readouterr().err.splitlines()
        return [line.removeprefix("formats: ") for line in lines if line.startswith("formats: ") and "seed" in line]

    assert run_suite("--only", START.name) == [START.name]
    assert run_suite("--only", START.name, "--only", tuned.name) == [tuned.name]
    assert run_suite("--only", START.name, "--only", tuned.name) == []
    with pytest.raises(SystemExit, match="cannot add to the recorded runs: .*100 steps.*; use another file"):
        run_suite("--only", START.name, "--steps", "200")
    begun, ended = (each.read(path)[case] for each, case in zip(formats.CONTESTS, (START, tuned)))
    assert ended["curve"][0][1] < begun["curve"][0][1] - 0.1  # it began with trained parameters
    assert len(begun["curve"]) == contest.POINTS and begun["setting"] in ended["setting"]


def test_a_lost_start_is_trained_again_for_fine_tuning(tmp_path: Path):
    kept = formats.start_of(20, tmp_path)
    (tmp_path / "start.pt").unlink()
    again = formats.start_of(20, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["start.pt"]
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    other = formats.start_of(40, tmp_path)  # another setting
    assert not all(torch.equal(kept[name], other[name]) for name in kept)
