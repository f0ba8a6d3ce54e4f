"""Tests that the codes suite trains on two ranks, with a tiny model. They need the built package."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from python.conftest import BUILT

if not BUILT or find_spec("torch") is None:
    pytest.skip("the Python package is not built, or torch is missing", allow_module_level=True)

import codes  # noqa: E402 (as all below, it needs both)
import gpt  # noqa: E402
import loss_training  # noqa: E402
import suite  # noqa: E402
from codes import CONTEST, EXACT  # noqa: E402
from contest import Case  # noqa: E402
from python.wrap.support.ranks import run_ranks  # noqa: E402

STEPS = 20


def trained(rank: int) -> list[loss_training.Losses]:
    """Return the losses of each contender."""
    for name, value in {"LAYERS": 1, "WIDTH": 64, "HEADS": 1, "SEQUENCES": 2}.items():
        setattr(loss_training, name, value)
    gpt.RANK, gpt.RANKS = rank, 2
    words = loss_training.split([f"{number} bottles, {number + 1} glasses. ".encode() for number in range(400)])
    loss_training.TEXTS = {name: lambda: words for name in loss_training.TEXTS}
    losses = []
    for name in CONTEST.contenders:
        training = codes.training_of(name, 0, STEPS)
        losses.append(training.train())
        training.close()
    return losses


def test_codes_change_the_losses_little_on_both_ranks_alike():
    first, second = run_ranks(2, trained)
    assert first == second
    exact, int8, int4 = first
    assert len({exact.last, int8.last, int4.last}) == 3
    assert max(abs(exact.last - int8.last), abs(exact.last - int4.last)) < 0.05 < exact.curve[0][1] - exact.last


def test_a_run_starts_both_ranks_and_takes_the_losses_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def start(what: str, ranks: int, command: Callable[[int], list], folder: Path) -> list[dict[str, Any]]:
        assert ranks == 2 and command(1)[2:] == ["--rank", EXACT, "1", "20"]
        return [{"curve": [[20, 2.5]], "last": 2.25}]  # the other rank prints nothing

    monkeypatch.setattr(suite, "run_ranks", start)
    losses = codes.train_on_ranks(Case(EXACT, 1), STEPS, tmp_path)
    assert (losses.curve, losses.last) == ([[20, 2.5]], 2.25)
