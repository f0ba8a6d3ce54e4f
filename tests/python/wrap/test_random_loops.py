"""Tests of random training loops: Ballast on two ranks shows the losses, norms and parameters of plain torch, and the same bits
in every stage and tier.

A failure names its seed. BALLAST_LOOPS=1000 tries as many loops, and BALLAST_FIRST_LOOP=60 begins with that seed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import ballast
import pytest
import torch
from ballast.torch.calls import sharded_parameters
from python.wrap.support.loops import keywords
from python.wrap.support.ranks import run_ranks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

RANKS = 2
WIDTH = 20
BLOCKS = 4
MODULES = BLOCKS + 2  # the first and the last layer count too


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(WIDTH, 24)
        self.narrow = torch.nn.Linear(24, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.tanh(self.narrow(torch.tanh(self.wide(values))))


class Adapted(torch.nn.Module):
    """A frozen block with an adapter of rank 3."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Block().requires_grad_(False)
        self.down, self.up = torch.nn.Linear(WIDTH, 3, bias=False), torch.nn.Linear(3, WIDTH, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.up(self.down(values))
        return self.base(values) + added


class Fused(torch.autograd.Function):
    """Computes a block with the parameters of modules of two blocks, and saves one of each."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        wide, of_wide, narrow, of_narrow = parameters
        inner = torch.tanh(functional.linear(values, wide, of_wide))
        added = torch.tanh(functional.linear(inner, narrow, of_narrow))
        ctx.save_for_backward(values, inner, added, wide, narrow)
        return values + added

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, inner, added, wide, narrow = ctx.saved_tensors
        of_added = gradient * (1 - added.square())
        of_inner = of_added @ narrow * (1 - inner.square())
        of_parameters = of_inner.T @ values, of_inner.sum(0), of_added.T @ inner, of_added.sum(0)
        return gradient + of_inner @ wide, *of_parameters


def fused(wide: torch.nn.Module, narrow: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = Fused.apply(values, *wide.parameters(), *narrow.parameters())
    return result


class Model(torch.nn.Module):
    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = features
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([Block() for _ in range(BLOCKS)])
        if "adapter" in features:
            self.blocks[0] = Adapted()
        self.last = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        if "tied" in features:
            self.last.weight = self.first.weight
        if "bfloat16" in features:
            self.to(torch.bfloat16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values.to(torch.bfloat16) if "bfloat16" in self.features else values)
        for number, block in enumerate(self.blocks):
            if "skipping" in self.features and number == 1 and torch.is_grad_enabled():
                continue
            is_fused = "function" in self.features and number == 2
            call = partial(fused, block.wide, self.blocks[3].narrow) if is_fused else block
            if "checkpointed" in self.features and torch.is_grad_enabled():
                values = checkpoint(call, values, use_reentrant=False)
            else:
                values = call(values)
        if "shared" in self.features:
            values = self.blocks[2](values)
        return values if "chunked" in self.features else self.last(values).float()

    def module(self, number: int) -> torch.nn.Module:
        return [self.first, *self.blocks, self.last][number]


class Interruption(Exception):
    """Is raised in the middle of a pass."""


def interrupt(*_: Any) -> None:
    raise Interruption


def interrupt_in_backward(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    if output.requires_grad:
        output.register_hook(interrupt)


class Action(NamedTuple):
    name: str  # the name of a method of Training
    module: int = 0


class Case(NamedTuple):
    """What both trainings do, and how Ballast is wrapped."""

    features: tuple[str, ...]
    options: dict[str, Any]
    steps: list[list[Action]]  # the actions of each step, with all that is done until the next one
    folder: str  # a folder for checkpoints


OFTEN = ("forward", "backward", "forward", "backward", "forward", "backward")
FORWARD = ("forward", "forward_gathered")
AT_ANY_TIME = (
    *("write", "load", "evaluate", "look", "call", "evaluate_gathered", "forward_gathered", "train_without_sync", "set_rate"),
    *("discard", "clear", "drop", "interrupt_forward", "interrupt_backward", "add_after_a_factor"),
)
BETWEEN_STEPS = (
    *("write", "load", "evaluate", "evaluate_gathered", "look", "call", "freeze", "move", "save_and_load", "set_rate"),
    *("drop", "freeze_all", "evaluate_frozen", "step_with_closure"),
)


FEATURES = ("tied", "checkpointed", "shared", "skipping", "several", "function", "adapter", "chunked")


def random_case(seed: int, folder: Path) -> Case:
    chosen = random.Random(seed)
    features = chosen.sample(FEATURES, chosen.choice([0, 1, 2, 3]))
    return Case(tuple(features), random_options(chosen, folder / "drive"), random_steps(chosen), str(folder / "saved"))


def in_several_ways(seed: int, folder: Path) -> list[Case]:
    """Return a loop in bfloat16 with several options, which all have the same bits."""
    case = random_case(seed, folder)
    chosen = random.Random(-seed)
    kept = {"state_format": chosen.choice(["split", "fp32", "bf16", "compact"])}
    ways = [{"stage": 0}, *(random_options(chosen, folder / f"drive-{number}") for number in range(4))]
    case = case._replace(features=(*case.features, "bfloat16"))
    return [case._replace(options={**kept, **way}, folder=f"{case.folder}-{n}") for n, way in enumerate(ways)]


def random_options(chosen: random.Random, drive: Path) -> dict[str, Any]:
    drive.mkdir(parents=True, exist_ok=True)
    everywhere = [{}, {}, {"offload": "host"}, {"offload": f"nvme:{drive}"}, {"tile": 512}]
    below = [*everywhere, {"overlap_gathers": True}]
    sharded = [*everywhere, {"keep_gathered": True}, {"keep_gathered": "6KiB"}, {"prefetch": 2}, {"units": "Linear"}]
    sharded += [{"offload": {"parameters": tier, "state": tier}} for tier in ("host", f"nvme:{drive}")]
    stage = chosen.choice([0, 1, 2, 3, 3, 3, 3])
    return {"stage": stage, **chosen.choice(sharded if stage == 3 else below)}


def random_steps(chosen: random.Random) -> list[list[Action]]:
    """Return steps of three kinds, each of them repeated: the third of its kind has a plan that contains all of it."""
    steps = []
    for _ in range(3):
        names = (*OFTEN, *chosen.sample(AT_ANY_TIME, 3))
        steps += chosen.randint(1, 5) * [random_step(chosen, names)]
    return steps


def random_step(chosen: random.Random, names: Sequence[str]) -> list[Action]:
    actions: list[Action] = []
    pending = 0  # losses without a backward pass
    for name in chosen.choices(names, k=chosen.randint(2, 9)):
        if (name == "backward" and pending == 0) or (name in FORWARD and pending == 2):
            continue
        pending += {"backward": -1}.get(name, int(name in FORWARD))
        actions.append(Action(name, chosen.randrange(MODULES)))
    actions += [Action("backward")] * pending + [Action("forward"), Action("backward")]
    actions += [Action("scale")] * (chosen.random() < 0.25)
    actions += [Action("clip")] * chosen.randint(0, 1)
    actions += [Action("write", chosen.randrange(MODULES))] * chosen.randint(0, 1)
    after = chosen.choices(BETWEEN_STEPS, k=chosen.randint(0, 2))
    return [*actions, Action("step"), *(Action(name, chosen.randrange(MODULES)) for name in after)]


class Training:
    """A training in plain torch, whose ranks are all here. It notes every figure that a user could see."""

    ranks: Sequence[int] = range(RANKS)

    def __init__(self, case: Case):
        self.case = case
        self.model = Model(case.features)
        self.optimizers: list[Any] = self.plain_optimizers()
        self.losses: list[torch.Tensor] = []
        self.batches = 0
        self.trains_others = False  # whether others are trained than at the last call with gradients
        self.seen: list[tuple[str, float]] = []

    def plain_optimizers(self) -> list[torch.optim.Optimizer]:
        blocks = [*self.model.blocks.parameters()]
        others = [each for each in self.model.parameters() if all(each is not block for block in blocks)]
        if "several" in self.case.features:
            return [torch.optim.SGD(blocks, lr=0.05, momentum=0.9), torch.optim.SGD(others, lr=0.02, momentum=0.5)]
        return [torch.optim.SGD([*blocks, *others], lr=0.05, momentum=0.9)]

    def run(self) -> list[tuple[str, float]]:
        for actions in self.case.steps:
            for action in actions:
                getattr(self, action.name)(self.model.module(action.module))
        for module in (self.model.first, *self.model.blocks, self.model.last):
            self.look(module)
        return self.seen

    def note(self, what: str, value: float) -> None:
        self.seen.append((what, value))

    def batches_of_ranks(self) -> list[torch.Tensor]:
        self.batches += 1
        return [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(RANKS * self.batches + r)) for r in self.ranks]

    def loss(self) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.trains_others = False
        return torch.stack([self.loss_of(batch) for batch in self.batches_of_ranks()]).mean()

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        output = self.model(batch)
        return self.loss_of_words(output, batch.argmax(1)) if "chunked" in self.case.features else output.square().mean()

    def loss_of_words(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model.last(hidden).float(), labels)

    def gathered(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def without_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    # --- Actions ---

    def forward(self, module: torch.nn.Module) -> None:
        self.losses.append(self.loss())
        self.note("loss", self.losses[-1].item())

    def backward(self, module: torch.nn.Module) -> None:
        self.losses.pop(0).backward()

    def write(self, module: torch.nn.Module) -> None:
        """Write values, unless losses in chunks are pending: they have made their gradients, and others have not."""
        if "chunked" in self.case.features and self.losses:
            return
        with self.gathered(module), torch.no_grad():
            for parameter in module.parameters():
                parameter.data.mul_(0.97)

    def load(self, module: torch.nn.Module) -> None:
        """Load values, unless losses are pending: torch refuses their backward passes then."""
        if not self.losses:
            with self.gathered(self.model):
                self.model.load_state_dict({name: 0.97 * value for name, value in self.model.state_dict().items()})

    def evaluate(self, module: torch.nn.Module) -> None:
        with torch.no_grad():
            self.note("loss", self.loss().item())

    def call(self, module: torch.nn.Module) -> None:
        with torch.no_grad():
            values = torch.ones(WIDTH, dtype=next(module.parameters()).dtype)
            self.note("output", module(values).float().square().sum().item())

    def evaluate_gathered(self, module: torch.nn.Module) -> None:
        with self.gathered(self.model):
            self.evaluate(module)

    def forward_gathered(self, module: torch.nn.Module) -> None:
        """Compute a loss inside of gather(), unless other parameters are trained: stage 3 makes no partition there."""
        with nullcontext() if self.trains_others else self.gathered(module):
            self.forward(module)

    def train_without_sync(self, module: torch.nn.Module) -> None:
        with self.without_sync():
            self.loss().backward()

    def look(self, module: torch.nn.Module) -> None:
        with self.gathered(module):
            self.note("parameters", sum(each.detach().double().square().sum().item() for each in module.parameters()))

    def discard(self, module: torch.nn.Module) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def clear(self, module: torch.nn.Module) -> None:
        self.model.zero_grad()

    def drop(self, module: torch.nn.Module) -> None:
        """Drop a backward pass, as after a bad batch."""
        self.loss().backward()
        self.discard(module)

    def interrupt_forward(self, module: torch.nn.Module) -> None:
        with suppress(Interruption), module.register_forward_pre_hook(interrupt):
            self.loss()

    def interrupt_backward(self, module: torch.nn.Module) -> None:
        """Stop the backward pass of each rank below a module. Gradients of the modules above it stay."""
        for batch in self.batches_of_ranks():
            with module.register_forward_hook(interrupt_in_backward):
                loss = self.loss_of(batch) / len(self.ranks)
            with suppress(Interruption):
                loss.backward()

    def scale(self, module: torch.nn.Module) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def add_after_a_factor(self, module: torch.nn.Module) -> None:
        """Add a backward pass to scaled gradients, which the library refuses, and drop them all."""
        self.scale(module)
        self.note("refused", float(self.is_refused(self.loss())))
        self.discard(module)

    def is_refused(self, loss: torch.Tensor) -> bool:
        scaled = [each for each in self.model.parameters() if each.grad is not None]
        before = [each.grad.clone() for each in scaled]
        loss.backward()
        return not all(map(torch.equal, before, (each.grad for each in scaled)))

    def set_rate(self, module: torch.nn.Module) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.9

    def freeze(self, module: torch.nn.Module) -> None:
        """Freeze a block, or thaw it."""
        block, self.trains_others = self.model.blocks[3], True
        with self.gathered(block):
            block.requires_grad_(not block.wide.weight.requires_grad)

    @contextmanager
    def frozen(self, module: torch.nn.Module) -> Iterator[None]:
        trained = [each for each in module.parameters() if each.requires_grad]
        module.requires_grad_(False)
        yield
        for parameter in trained:
            parameter.requires_grad_(True)

    def freeze_all(self, module: torch.nn.Module) -> None:
        """Make a step without gradients while all parameters are frozen."""
        with self.frozen(self.model):
            self.evaluate(module)
            for optimizer in self.optimizers:
                optimizer.step()

    def evaluate_frozen(self, module: torch.nn.Module) -> None:
        with self.frozen(module):
            self.evaluate(module)

    def step_with_closure(self, module: torch.nn.Module) -> None:
        def closure() -> torch.Tensor:
            self.discard(module)
            loss = self.loss()
            loss.backward()
            return loss

        for optimizer in self.optimizers:
            self.note("loss", optimizer.step(closure).item())
        self.discard(module)

    def clip(self, module: torch.nn.Module) -> None:
        self.note("norm", float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)))

    def step(self, module: torch.nn.Module) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def move(self, module: torch.nn.Module) -> None:
        """Note what Ballast does with parameters that are off the device: plain optimizers cannot leave it."""
        self.note("refused", 1.0)

    def save_and_load(self, module: torch.nn.Module) -> None:
        """Do nothing: it changes no value."""


class RankTraining(Training):
    """The same on one rank of Ballast."""

    def __init__(self, case: Case, rank: int):
        self.ranks = [rank]
        super().__init__(case)
        self.optimizers = ballast.wrap(self.optimizers, self.model, **keywords(**case.options))
        self.saved = 0

    def loss_of_words(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return ballast.chunked_loss(hidden, self.model.last, labels, chunk=3)

    def gathered(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        return ballast.gather(module)

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def is_refused(self, loss: torch.Tensor) -> bool:
        try:
            loss.backward()
        except ballast.UsageError as error:
            assert "cannot add gradients" in str(error), error
            return True
        return False

    def move(self, module: torch.nn.Module) -> None:
        for optimizer in self.optimizers:
            optimizer.offload()
        self.note("refused", float(self.is_off_device()))
        for optimizer in self.optimizers:
            optimizer.reload()
        assert not self.is_off_device()

    def is_off_device(self) -> bool:
        try:
            with self.gathered(self.model.last):
                return False
        except ballast.UsageError as error:
            return "device" in str(error)

    def save_and_load(self, module: torch.nn.Module) -> None:
        self.saved += 1
        folder = f"{self.case.folder}-{self.saved}"
        ballast.save(folder, self.model, self.optimizers)
        ballast.load_checkpoint(folder, self.model, self.optimizers)


def run_cases(rank: int, cases: Sequence[Case]) -> list[list[tuple[str, float]]]:
    found = []
    for case in cases:
        # Parameters of a Function count as large: they are copied only if views of them outlive their unit.
        most_copied = 0 if "function" in case.features else sharded_parameters.MOST_COPIED
        with mock.patch.object(sharded_parameters, "MOST_COPIED", most_copied):
            training = RankTraining(case, rank)
            found.append(training.run())
            for optimizer in training.optimizers:
                optimizer.close()
    return found


FIRST = int(os.environ.get("BALLAST_FIRST_LOOP", "0"))
LOOPS = int(os.environ.get("BALLAST_LOOPS", "20"))
TOGETHER = 10  # loops in one launch of the ranks


@pytest.mark.parametrize("first", range(FIRST, FIRST + LOOPS, TOGETHER))
def test_loops_show_the_figures_of_plain_torch(first, tmp_path):
    seeds = range(first, first + TOGETHER)
    cases = [random_case(seed, tmp_path / str(seed)) for seed in seeds]
    by_rank = run_ranks(RANKS, run_cases, cases)
    for seed, case, *found in zip(seeds, cases, *by_rank):
        for number, ((what, expected), *seen) in enumerate(zip(Training(case).run(), *found, strict=True)):
            values = [value for _, value in seen]
            told = f"seed {seed}: {case}: {what}, number {number}"
            if what == "loss":
                values = [sum(values) / RANKS]
            assert values == pytest.approx([expected] * len(values), rel=2e-4), told


@pytest.mark.parametrize("seed", range(FIRST, FIRST + LOOPS, TOGETHER // 2))
def test_loops_in_bfloat16_have_the_same_bits_in_every_stage_and_tier(seed, tmp_path):
    cases = in_several_ways(seed, tmp_path)
    for by_way in run_ranks(RANKS, run_cases, cases):
        for case, seen in zip(cases, by_way):
            different = [each for each in zip(by_way[0], seen, strict=True) if each[0] != each[1]]
            assert not different, f"{case}: {different[0]}"
