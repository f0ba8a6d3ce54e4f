"""Tests of copies of the parameters in stage 3: ranks that share one gather from each other, and all share the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from ballast.step_options import copies_on
from python.wrap.support import bodies
from python.wrap.support.loops import Loop, adapted, mlp, only_trained
from python.wrap.support.ranks import run_ranks

Values = list[torch.Tensor]


def loop_of(rank: int, **changes: Any) -> Loop:
    return Loop(rank=rank, ranks=dist.get_world_size(), **changes)


def values_of(run: Any) -> Values:
    with ballast.gather(run.model):
        return [parameter.detach().clone() for parameter in run.model.parameters()]


def saved_and_loaded(rank: int, folder: str) -> list[tuple[Values, Values]]:
    """Save with copies and load without them, and the other way round. Return the values before and after."""
    configurations: list[dict[str, Any]] = [{"stage": 3}, {"stage": 3, "replicas": 2}]
    pairs = []
    for number, (saving, loading) in enumerate(zip(configurations, reversed(configurations))):
        saved = loop_of(rank).run(**saving)
        directory = Path(folder) / str(number)
        ballast.save(directory, saved.model, saved.optimizer)
        loaded = loop_of(rank, steps=1).run(**loading)
        ballast.load_checkpoint(directory, loaded.model, loaded.optimizer)
        pairs.append((values_of(saved), values_of(loaded)))
    return pairs


def written_in_gather(rank: int) -> tuple[Values, Values]:
    """Return values that were written in gather(), and those that calls of the modules use afterwards."""
    run = loop_of(rank).run(stage=3, replicas=2)
    with ballast.gather(run.model), torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(3)
        written = [parameter.detach().clone() for parameter in run.model.parameters()]
    used: Values = []
    for module in run.model:
        module.register_forward_hook(lambda module, *_: used.extend(each.detach().clone() for each in module.parameters()))
    with torch.no_grad():
        run.model(torch.ones(20))
    return written, used


def with_frozen_parameters(rank: int, configurations: list[dict[str, Any]]) -> list[Values]:
    loop = loop_of(rank, make_model=adapted, make_optimizer=only_trained)
    return [values_of(loop.run(**options)) for options in configurations]


def kept_bytes(rank: int) -> list[tuple[float, float]]:
    """Return the bytes of parameters, and all bytes, without copies and with two."""
    bytes_of = []
    for copies in (None, 2):
        run = loop_of(rank, make_model=lambda: mlp(256)).run(stage=3, replicas=copies)
        memory = run.optimizer.metrics()
        bytes_of.append(memory["memory_bytes/device"])
    return [(bytes_of[0], bytes_of[1])]


def refusals(rank: int) -> list[str]:
    errors = []
    for options in ({"replicas": 3}, {"replicas": 4}, {"replicas": "host", "stage": 2}):
        try:
            loop_of(rank).run(**{"stage": 3, **options})
        except ballast.UsageError as error:
            errors.append(str(error))
    return errors


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(mine, theirs) for mine, theirs in zip(one, other))


def test_copies_train_as_one_does_with_the_same_bits_in_every_tier(tmp_path):
    options = [{}, {"offload": "host"}, {"offload": f"nvme:{tmp_path}"}, {"update_in_backward": True}, {"offload": "auto"}]
    configurations = [{"stage": 3}, *({"stage": 3, "replicas": 2, **each} for each in options)]
    for plain, shared, first, *others in run_ranks(4, bodies.in_every_configuration, {"micro_steps": 1}, configurations):
        assert shared[0] == pytest.approx(first[0], rel=1e-5)
        assert plain[0] == pytest.approx(first[0], rel=1e-5)
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(first[1], shared[1]))
        for other in others:
            assert other[0] == first[0]
            assert equal(other[1], first[1])


def test_checkpoints_are_those_of_one_copy(tmp_path):
    for pairs in run_ranks(4, saved_and_loaded, str(tmp_path)):
        assert all(equal(saved, loaded) for saved, loaded in pairs)


def test_a_write_in_gather_reaches_all_copies():
    results = run_ranks(4, written_in_gather)
    for written, used in results:
        assert equal(written, used)
        assert equal(written, results[0][0])


def test_frozen_parameters_are_in_each_copy():
    configurations = [{"stage": 3}, {"stage": 3, "replicas": 2}]
    for shared, copies in run_ranks(4, with_frozen_parameters, configurations):
        assert all(torch.allclose(mine, theirs, atol=1e-6) for mine, theirs in zip(shared, copies))


def test_a_copy_takes_the_memory_of_its_parameters():
    for [(one, two)] in run_ranks(4, kept_bytes):
        assert one < two


def test_copies_that_are_not_possible_are_refused():
    for errors in run_ranks(4, refusals):
        assert ["on 4 ranks" in error for error in errors[:2]] == [True, True]
        assert "replicas='host': in stage 2" in errors[2]


def test_hosts_that_cannot_share_copies_are_refused():
    assert copies_on(["a", "a", "b", "b", "c", "c"], "host") == 3
    for machines, words in (
        (["a", "a", "b"], "different numbers of ranks"),
        (["a", "b", "a", "b"], "no neighbours"),
        (["a", "b"], "each host has one rank"),
    ):
        with pytest.raises(ballast.UsageError, match=words):
            copies_on(machines, "host")


@pytest.mark.parametrize("replicas", ["hosts", 0, True, 1.5])
def test_other_words_are_refused(replicas):
    model = torch.nn.Linear(4, 1)
    with pytest.raises(ballast.UsageError, match="replicas="):
        ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, replicas=replicas)


def test_parameters_in_another_tier_have_no_copies():
    model = torch.nn.Linear(4, 1)
    with pytest.raises(ballast.UsageError, match="exclude each other"):
        ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, offload={"parameters": "host"}, replicas=2)
