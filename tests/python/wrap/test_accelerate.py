"""Tests of ballast.integrations.accelerate on two ranks: it trains as Accelerate's data parallelism does, saves, resumes on the
same and on another number of ranks, and exports."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.frameworks import as_launched
from python.wrap.support.loops import mean_square, mlp
from python.wrap.support.ranks import FRAMEWORKS, run_ranks

if find_spec("accelerate") is None:  # only the ranks import it
    pytest.skip("accelerate is not installed: .ci/bootstrap venv frameworks", allow_module_level=True)


ROWS = 8  # rows of a global batch, in two micro-steps


@dataclass
class Outcome:
    losses: list[float]  # losses and norms
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)  # the result of get_state_dict() on the main process
    resumed: list[float] = field(default_factory=list)  # the losses from the second step on
    exported: dict[str, torch.Tensor] = field(default_factory=dict)  # what safetensors reads
    model: str = ""  # the class of the prepared model
    files: list[str] = field(default_factory=list)  # the files of save_state()


class Loop:
    """A training of four steps with accumulation, clipping and a schedule. Only how the Accelerator is made differs."""

    def __init__(self, options: dict[str, Any] | None, deferred: bool = False):
        import accelerate
        from ballast.integrations.accelerate import Accelerator

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        steps = {"cpu": True, "gradient_accumulation_steps": 2, "step_scheduler_with_optimizer": False}
        self.accelerator = accelerate.Accelerator(**steps) if options is None else Accelerator(ballast=options, **steps)
        with ballast.deferred() if deferred else contextlib.nullcontext():
            model = mlp(64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        batches = torch.randn(4 * ROWS, 20, generator=torch.Generator().manual_seed(0))
        loader = torch.utils.data.DataLoader(batches, batch_size=ROWS // 2 // dist.get_world_size())
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def run(self, first: int = 0, saving_into: Path | None = None) -> list[float]:
        """Return losses over all ranks, norms, and the loss of an evaluation. Save the state after the second step."""
        logged = []
        for number, batch in enumerate(self.accelerator.skip_first_batches(self.loader, 2 * first)):
            with self.accelerator.accumulate(self.model):
                loss = mean_square(self.model, batch)
                self.accelerator.backward(loss)
                logged.append(self.accelerator.reduce(loss.detach(), "mean").item())
                if self.accelerator.sync_gradients:
                    logged.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.05)))
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            if number == 3 and saving_into is not None:
                self.accelerator.save_state(str(saving_into))
        with torch.no_grad():
            logged.append(mean_square(self.model.eval(), torch.ones(4, 20)).item())
        return logged


def train(options: dict[str, Any] | None, deferred: bool, folder: Path) -> Outcome:
    import safetensors.torch

    loop = Loop(options, deferred)
    saving_into = None if options is None else folder / "state"
    outcome = Outcome(loop.run(saving_into=saving_into), model=type(loop.model).__name__)
    outcome.parameters = loop.accelerator.get_state_dict(loop.model)
    if options is None:
        return outcome
    loop.accelerator.save_model(loop.model, str(folder / "model"))
    outcome.exported = safetensors.torch.load_file(folder / "model" / "model.safetensors")
    outcome.files = sorted(each.name for each in (folder / "state").iterdir())
    outcome.resumed = resume(options, deferred, folder)
    return outcome


def resume(options: dict[str, Any], deferred: bool, folder: Path) -> list[float]:
    loop = Loop(options, deferred)
    loop.accelerator.load_state(str(folder / "state"))
    return loop.run(first=2)


Configuration = tuple[dict[str, Any] | None, bool]  # the options of wrap(), and whether the model is deferred


def trained_on_ranks(rank: int, folder: str, configurations: list[Configuration]) -> list[Outcome]:
    as_launched(rank)
    return [train(*each, Path(folder) / str(number)) for number, each in enumerate(configurations)]


def resumed_on_ranks(rank: int, folder: str, configurations: dict[int, Configuration]) -> list[list[float]]:
    as_launched(rank)
    return [resume(*each, Path(folder) / str(number)) for number, each in configurations.items()]


def joined_on_ranks(rank: int) -> tuple[bool, list[bool], str]:
    """Return whether untrained models join uneven inputs, even_batches inside of joins, and the error of a trained model. On
    CPUs Accelerate joins nothing, so it is told that there are GPUs."""
    import accelerate
    from ballast.integrations.accelerate import Accelerator

    class OnGpus(Accelerator):
        multi_device = True

    as_launched(rank)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = OnGpus(cpu=True, ballast={"stage": 2})
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(3, 20)))
    plain = accelerator.prepare(mlp(64))
    with accelerator.join_uneven_inputs([plain], even_batches=False):
        seen = [loader.batch_sampler.even_batches]
        is_uneven = [len(list(loader))] == [2 - rank]
    model = mlp(64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with accelerator.join_uneven_inputs([model], even_batches=True):
        seen.append(loader.batch_sampler.even_batches)
        for batch in loader:
            accelerator.backward(mean_square(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            return is_uneven, seen, "no error"
    except ballast.UsageError as error:
        return is_uneven, seen, error.what_happened


CONFIGURATIONS = [
    (None, False),
    ({"stage": 0}, False),
    ({"stage": 1}, False),
    ({"stage": 2}, True),
    ({"stage": 3, "offload": "host"}, True),
    ({"stage": 3}, False),
]
WITH_BALLAST = range(1, len(CONFIGURATIONS))
LAST = slice(-7, None)  # the figures of two steps: two losses and a norm each, and the loss of an evaluation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("accelerated")


@pytest.fixture(scope="module")
def trained(folder):
    return run_ranks(2, trained_on_ranks, str(folder), CONFIGURATIONS, imported=FRAMEWORKS)


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
    [resumed] = run_ranks(1, resumed_on_ranks, str(folder), configurations, imported=FRAMEWORKS)
    for number, losses in zip(WITH_BALLAST, resumed):
        assert close(losses, trained[0][number].losses[LAST])


def test_inputs_are_joined_where_they_are_even():
    for is_uneven, seen, refused in run_ranks(2, joined_on_ranks, imported=FRAMEWORKS):
        assert is_uneven and seen == [False, True]
        assert refused == "cannot join uneven inputs: all ranks make each step of a wrapped optimizer together"


def test_a_hook_of_data_parallelism_has_no_effect_and_a_warning():
    [[told]] = run_ranks(1, warnings_of_a_hook, imported=FRAMEWORKS)
    assert told.startswith("comm_hook='bf16' has no effect")


def warnings_of_a_hook(_: int) -> list[str]:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
    from ballast.integrations.accelerate import Accelerator

    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Accelerator(cpu=True, kwargs_handlers=[hook], ballast={"stage": 2})
    return [str(each.message) for each in told if "comm_hook" in str(each.message)]
