"""Tests of ranks that use different units in stage 3: a unit that only some of them use counts as zero on the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import ballast
import pytest
import torch
import torch.distributed as dist
from python.wrap.support.bodies import Heard
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks
from torch.utils.checkpoint import checkpoint

BLOCKS = 5
FIRST, LAST = BLOCKS, BLOCKS + 1
EVERYTHING = range(BLOCKS + 2)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Dropping(torch.nn.Module):
    """Blocks between two layers, of which each call leaves some out. `counts_zeros` adds zeros for these, so that all ranks use
    all of them."""

    def __init__(self, checkpointing: str = "none", counts_zeros: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.last = torch.nn.Linear(8, 8)
        self.checkpointing, self.counts_zeros = checkpointing, counts_zeros

    def forward(self, x: torch.Tensor, kept: Sequence[int]) -> torch.Tensor:
        for number, module in ((FIRST, self.first), *enumerate(self.blocks), (LAST, self.last)):
            if number in kept:
                x = self.call(module, x)
            elif self.counts_zeros:
                x = x + 0 * sum(each.sum() for each in module.parameters())
        return x

    def call(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none" or not isinstance(module, Block):
            return module(x)
        return checkpoint(module, x, use_reentrant=self.checkpointing == "reentrant")


class Training(NamedTuple):
    make: Any  # the optimizer
    passes: int = 1
    clip: str = ""  # the one that clips: torch, or the optimizer
    drops: bool = False  # every fourth step is dropped after its backward passes
    checkpointing: str = "none"
    counts_zeros: bool = False
    steps: int = 20
    several: bool = False  # optimizers


def kept_in(step: int, number: int, rank: int) -> list[int]:
    """Return what a rank uses in one pass, at least one block. No rank uses the third block in every fifth step."""
    chosen = random.Random(1000 * step + 10 * number + rank)
    kept = [each for each in EVERYTHING if chosen.random() < 0.6]
    return [each for each in (kept if min(kept, default=BLOCKS) < BLOCKS else [*kept, 1]) if each != 2 or step % 5 > 0] or [1]


def batch_of(step: int, number: int, rank: int) -> torch.Tensor:
    batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * number + rank))
    return batch.requires_grad_()  # a rank may use blocks whose first one is checkpointed


def train(rank: int, training: Training, options: dict[str, Any]) -> list[Any]:
    """Return losses, norms and the parameters."""
    model = Dropping(training.checkpointing, training.counts_zeros)
    if training.several:
        blocks = [*model.blocks[1:4].parameters()]
        others = [each for each in model.parameters() if all(each is not block for block in blocks)]
        optimizers = ballast.wrap([training.make(blocks), training.make(others)], model, **keywords(timeout=60, **options))
    else:
        optimizers = [ballast.wrap(training.make(model.parameters()), model, **keywords(timeout=60, **options))]
    seen: list[Any] = []
    for step in range(training.steps):
        for number in range(training.passes):
            batch = batch_of(step, number, rank)
            loss = model(batch, kept_in(step, number, rank)).square().mean() / training.passes
            dist.all_reduce(seen_loss := loss.detach().clone())  # ranks end calls of the model together
            seen.append(seen_loss.item())
            loss.backward()
            dist.all_reduce(seen_loss)  # ranks end backward passes together too
        if training.clip == "torch":
            seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        elif training.clip:
            seen.append(float(optimizers[0].clip_grad_norm_(0.5)))
        for optimizer in optimizers:
            if not training.drops or step % 4 != 2:
                optimizer.step()
            optimizer.zero_grad()
    with ballast.gather(model):
        seen += [each.detach().clone() for each in model.parameters()]
    for optimizer in optimizers:
        optimizer.close()
    return seen


def trained(rank: int, cases: Sequence[tuple[Training, dict[str, Any]]]) -> list[list[Any]]:
    return [train(rank, training, options) for training, options in cases]


def trained_with_ddp(rank: int, training: Training) -> list[torch.Tensor]:
    """Return the parameters after the same training in DistributedDataParallel."""
    model = Dropping()
    optimizer = training.make(model.parameters())
    ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(training.steps):
        for number in range(training.passes):
            batch = batch_of(step, number, rank)
            (ddp(batch, kept_in(step, number, rank)).square().mean() / training.passes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


def differs_in_step(rank: int, step: int, options: dict[str, Any]) -> tuple[str, list[str]]:
    """Train 14 steps in stage 3, in one of which rank 1 leaves a block out. Return the error, and the log."""
    heard = Heard()
    model = Dropping()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **keywords(stage=3, timeout=5, **options))
    try:
        for number in range(14):
            kept = [each for each in EVERYTHING if (rank, number, each) != (1, step, 3)]
            model(torch.ones(2, 8), kept).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except ballast.Error as refused:
        return str(refused), heard.lines
    optimizer.close()
    return "", heard.lines


def evaluates_alone(rank: int) -> list[Any]:
    """Train in stage 3. Rank 1 evaluates alone between steps, and in the middle of one."""
    model = Dropping()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, tuning=ballast.Tuning(timeout=60))
    batch, everything, seen = torch.ones(2, 8), EVERYTHING, []
    for _ in range(3):
        loss = model(batch, everything).square().mean()
        with torch.no_grad():
            seen += [model(batch, everything).square().mean().item() == loss.item()] * (rank == 1)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            seen += [model(batch, everything).square().mean().item() < loss.item()] * (rank == 1)
        optimizer.zero_grad()
    optimizer.close()
    return seen


def fails_in_a_call(rank: int, where: str) -> list[Any]:
    """Train in stage 3. In one step a block fails on rank 1, in its forward or backward pass, and all ranks drop the step."""
    model = Dropping()
    optimizer = ballast.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, tuning=ballast.Tuning(calls_differ=True, timeout=60)
    )
    failures = 0
    for step in range(4):
        fails = where if (rank, step) == (1, 1) else ""
        with model.blocks[2].register_forward_hook(lambda _, inputs, output: Failing.apply(output, fails)):
            try:
                loss = model(torch.ones(2, 8), EVERYTHING).square().mean()
                if where == "backward" or step != 1:  # other ranks have been told of a failure in forward, by a collective
                    loss.backward()
            except FloatingPointError:
                failures += 1
        if where == "forward":
            dist.all_reduce(torch.ones(1))
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    with ballast.gather(model):
        found = [each.detach().clone() for each in model.parameters()]
    optimizer.close()
    return [failures, *found]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: str) -> torch.Tensor:
        ctx.fails = fails == "backward"
        if fails == "forward":
            raise FloatingPointError
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise FloatingPointError
        return gradient, None


def ends_a_step_in_its_own_way(rank: int) -> str:
    """Let rank 1 drop a step that rank 0 makes. Return the error."""
    model = Dropping()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, tuning=ballast.Tuning(timeout=10))
    try:
        model(torch.ones(2, 8), EVERYTHING[rank:]).sum().backward()
        optimizer.step() if rank == 0 else optimizer.zero_grad()
    except ballast.Error as refused:
        return str(refused)
    return ""


def comes_late(rank: int) -> str:
    """Let rank 1 stay away while rank 0 uses the model. Return the error."""
    model = Dropping()
    optimizer = ballast.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, tuning=ballast.Tuning(calls_differ=True, timeout=2)
    )
    try:
        model(torch.ones(2, 8), EVERYTHING)
        if rank == 0:
            model(torch.ones(2, 8), EVERYTHING)
        dist.barrier()
        optimizer.close()
    except ballast.Error as refused:
        if rank == 0:
            dist.barrier()
        return str(refused)
    return ""


def waits_in_the_model(rank: int) -> str:
    """Let rank 1 leave the last layer out, and wait in a collective of the model while rank 0 uses it. Return the error."""
    model = Dropping()
    optimizer = ballast.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, stage=3, tuning=ballast.Tuning(timeout=2))
    model.register_forward_hook(lambda *_: dist.barrier())
    try:
        model(torch.ones(2, 8), EVERYTHING[: len(EVERYTHING) - rank])
        optimizer.close()
    except ballast.Error as refused:
        dist.barrier()
        return str(refused)
    return ""


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1)


def equal(one, other):
    return len(one) == len(other) and all(
        torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs for mine, theirs in zip(one, other)
    )


def check_equal(ranks, cases):
    for found in run_ranks(ranks, trained, cases):
        for case, each in zip(cases, found):
            assert equal(each, found[0]), case


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("checkpointing", ["none", "not reentrant", "reentrant"])
def test_stage_3_has_the_bits_of_stage_2(ranks, checkpointing, tmp_path):
    on_drive = {"parameters": f"nvme:{tmp_path}", "state": f"nvme:{tmp_path}"}
    for clip, options in (("optimizer", {}), ("", {"max_grad_norm": 0.5})):
        of_stages = [{"stage": 2}, {"stage": 3}, {"stage": 3, "calls_differ": True, "offload": on_drive}]
        if not clip:
            of_stages.append({"stage": 3, "prefetch": 2, "keep_gathered": True})
        training = Training(ADAMW, clip=clip, drops=True, checkpointing=checkpointing)
        check_equal(ranks, [(training, {**each, **options}) for each in of_stages])


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_accumulated_pass_counts_zeros_for_what_a_rank_does_not_use(ranks):
    for clip in ("", "torch"):
        training = Training(SGD, passes=3, clip=clip, drops=True)
        cases = [(training._replace(counts_zeros=True), {"stage": 2}), (training, {"stage": 3})]
        check_equal(ranks, [*cases, (training._replace(checkpointing="reentrant"), {"stage": 3, "calls_differ": True})])


@pytest.mark.parametrize("ranks", [2, 3])
def test_updates_in_the_backward_pass_have_the_same_bits(ranks):
    training = Training(ADAMW)
    check_equal(ranks, [(training, {"stage": 2}), (training, {"stage": 3, "update_in_backward": True})])


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_optimizers_have_the_same_bits(ranks):
    training = Training(ADAMW, several=True)
    check_equal(ranks, [(training, {"stage": 2}), (training, {"stage": 3}), (training, {"stage": 3, "calls_differ": True})])


def test_parameters_are_those_of_data_parallel():
    training = Training(torch.optim.Adagrad, passes=2)
    expected = run_ranks(2, trained_with_ddp, training)[0]
    [found] = run_ranks(2, trained, [(training, {"stage": 3})])[0]
    torch.testing.assert_close(found[-len(expected) :], expected, rtol=1e-5, atol=1e-6)


def test_rank_0_logs_that_ranks_agree_from_now_on():
    (refused, lines), (_, of_others) = run_ranks(2, differs_in_step, 4, {})
    assert refused == "" and of_others == []
    assert [line for line in lines if "as blocks.3, which rank 0 alone uses now" in line] == lines[-1:], lines


def test_a_later_difference_names_the_option_with_which_it_works():
    for (refused, _), (allowed, lines) in zip(
        run_ranks(2, differs_in_step, 12, {}),
        run_ranks(2, differs_in_step, 12, {"calls_differ": True}),
    ):
        assert refused.startswith(("B1003", "B1007", "B3301")) and "rank" in refused, refused
        assert allowed == "" and not any("different units" in line for line in lines)
    assert "calls_differ=True" in run_ranks(2, differs_in_step, 12, {})[0][0]


def test_one_rank_evaluates_while_the_others_train():
    assert run_ranks(2, evaluates_alone) == [[], [True] * 6]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_call_that_fails_on_one_rank_can_be_dropped_on_all(where):
    one, other = run_ranks(2, fails_in_a_call, where)
    assert (one[0], other[0]) == (0, 1) and equal(one[1:], other[1:])


def test_a_step_that_one_rank_drops_is_refused():
    for refused in run_ranks(2, ends_a_step_in_its_own_way):
        assert refused.startswith("B1001 cannot make a step: rank 1 discarded its gradients"), refused


def test_a_rank_that_stays_away_is_named():
    refused, _ = run_ranks(2, comes_late, lost=[])
    assert refused.startswith("B3302") and "rank 1" in refused, refused


def test_the_unit_that_a_waiting_rank_leaves_out_is_named():
    refused, _ = run_ranks(2, waits_in_the_model)
    assert refused.startswith("B3302") and "rank 1" in refused, refused
    assert "unit last, a use of it" in refused and "has left this unit out" in refused, refused
