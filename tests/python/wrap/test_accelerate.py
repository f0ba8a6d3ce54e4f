"""Tests of ballast.integrations.accelerate on two ranks: it trains as Accelerate's data parallelism does, saves, resumes on the
same and on another number of ranks, and exports."""

from importlib.util import find_spec

import pytest
import torch
from python.wrap.support import accelerators
from python.wrap.support.ranks import FRAMEWORKS, run_ranks

if find_spec("accelerate") is None:  # only the ranks import it
    pytest.skip("accelerate is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)

CONFIGURATIONS = [
    (None, False),
    ({"stage": 0}, False),
    ({"stage": 1}, False),
    ({"stage": 2}, True),
    ({"stage": 3, "offload": "host"}, True),
    ({"stage": 3}, False),
]
WITH_BALLAST = range(1, len(CONFIGURATIONS))
LAST = slice(-7, None)  # of two steps: two losses and a norm each, and the loss of an evaluation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accelerated")


@pytest.fixture(scope="module")
def trained(folder):
    return run_ranks(2, accelerators.trained_on_ranks, str(folder), CONFIGURATIONS, imported=FRAMEWORKS)


def close(mine, theirs):
    return torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=1e-5, rtol=1e-5)


def test_it_trains_as_data_parallelism_does(trained):
    plain = trained[0][0]
    assert plain.model == "DistributedDataParallel"
    for number in WITH_BALLAST:
        mine = trained[0][number]
        assert mine.model == "Sequential"
        assert close(mine.losses, plain.losses)
        assert mine.parameters.keys() == plain.parameters.keys()
        assert all(torch.allclose(mine.parameters[name], plain.parameters[name], atol=1e-5) for name in plain.parameters)


def test_only_the_main_process_gets_the_full_state(trained):
    assert all(trained[1][number].parameters == {} for number in WITH_BALLAST)


def test_a_saved_model_is_the_trained_one(trained):
    for number in WITH_BALLAST:
        mine = trained[0][number]
        assert mine.exported.keys() == mine.parameters.keys()
        assert all(torch.equal(mine.exported[name], mine.parameters[name]) for name in mine.parameters)


def test_a_state_has_a_checkpoint_of_ballast_instead_of_the_model_and_the_optimizer(trained):
    for number in WITH_BALLAST:
        assert trained[0][number].files == ["ballast", "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin"]


def test_it_resumes_with_the_same_bits(trained):
    for outcomes in trained:
        for number in WITH_BALLAST:
            assert outcomes[number].resumed == outcomes[number].losses[LAST]


def test_it_resumes_on_another_number_of_ranks(trained, folder):
    configurations = {number: CONFIGURATIONS[number] for number in WITH_BALLAST}
    [resumed] = run_ranks(1, accelerators.resumed_on_ranks, str(folder), configurations, imported=FRAMEWORKS)
    for number, losses in zip(WITH_BALLAST, resumed):
        assert close(losses, trained[0][number].losses[LAST])


def test_inputs_are_joined_where_they_are_even():
    for is_uneven, seen, refused in run_ranks(2, accelerators.joined_on_ranks, imported=FRAMEWORKS):
        assert is_uneven and seen == [False, True]
        assert refused == "cannot join uneven inputs: all ranks make each step of a wrapped optimizer together"
