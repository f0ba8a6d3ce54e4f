"""The state of the outer optimizer for one fragment: this rank's shard of the outer copy of the parameters and of the momentum,
in any tier."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ballast import _core
from ballast.connecting import connect
from ballast.outer.memory import PIECE, model_of_shard
from ballast.outer.options import DiLoCo
from ballast.torch.gpu import in_stream, stream_on
from ballast.torch.memory import tensor_at, tensor_of
from ballast.torch.updates.rules import Rule


@dataclass(frozen=True)
class Span:
    """This rank's elements of one parameter, and their position in the fragment's shard."""

    first: int  # of the parameter's elements
    count: int
    offset: int

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return these elements of the fragment's shard."""
        return values[self.offset : self.offset + self.count]


def part_of(values: torch.Tensor, momentum: torch.Tensor | None = None) -> _core.StatePart:
    """Show values in fp32 to the library. The caller keeps them alive."""
    at = 0 if momentum is None else momentum.data_ptr()
    return _core.StatePart(dtype=_core.DType.fp32, parameter=values.data_ptr(), momentum=at, count=values.numel())


def rule_of(options: DiLoCo) -> Rule:
    if options.momentum == 0:
        return _core.Sgd(lr=float(options.lr), weight_decay=0.0)
    return _core.SgdMomentum(
        lr=float(options.lr),
        momentum=float(options.momentum),
        dampening=0.0,
        weight_decay=0.0,
        nesterov=options.nesterov,
    )


class FragmentState:
    """A training of this rank alone, with the outer optimizer's rule, of the shard of one fragment. The shard is cut into
    pieces. They are updated one by one, as the units of a model are in a backward pass that updates."""

    def __init__(self, values: torch.Tensor, options: DiLoCo, *, name: str, gpu: int | None, threads: int):
        """Begin with these values of the outer copy, without momentum. `gpu` is that of the training, if it has one."""
        self.count = values.numel()
        self.has_momentum = options.momentum > 0
        self._rule = rule_of(options)
        self._gpu = gpu if options.tier == "device" else None  # state in other tiers is updated by the CPU
        self._stream = stream_on(self._gpu)
        model = model_of_shard(name, self.count)
        self._core = _core.Training(
            model=model,
            group=connect(rank=0, size=1)._core,
            norm_group=None,
            rules=[self._rule],
            options=self._options(options, len(model.units), threads),
        )

        def fill(unit: int, tensor: int, first: int, count: int, into: int) -> bool:
            begin = unit * PIECE + first
            tensor_at(into, count, torch.float32).copy_(values[begin : begin + count])
            return True

        self._core.start(fill)

    def _options(self, outer: DiLoCo, units: int, threads: int) -> _core.TrainingOptions:
        options = _core.TrainingOptions()
        options.stage = 3  # so that parameters too are where the options say
        options.format = _core.StateFormat.fp32
        options.gradient_format = _core.GradientFormat.fp32
        options.threads = threads
        options.gpu, options.stream = self._gpu, self._stream
        options.update_in_backward = True  # no gradients are kept
        options.backward_order = [*range(units)]
        if outer.tier == "nvme":
            options.parameters = options.state = _core.Spread(nvme=1.0)
            options.directories = [outer.directory]
        return options

    def _parts(self, part: _core.StatePart) -> slice:
        begin = part.unit * PIECE + part.first
        return slice(begin, begin + part.count)

    def subtract(self, values: torch.Tensor) -> None:
        """Replace parameters by the differences between the outer copy and them."""
        outer = torch.empty(min(PIECE, self.count), dtype=torch.float32, device="cpu")

        def look(part: _core.StatePart) -> None:
            copy, mine = outer[: part.count], values[self._parts(part)]
            part_of(copy).copy_from(part)
            torch.sub(copy, mine, out=mine)

        self._core.visit_shards(look)

    def read(self, values: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        """Copy the outer copy into `values`, and the momentum into `momentum`."""

        def look(part: _core.StatePart) -> None:
            where = self._parts(part)
            part_of(values[where], None if momentum is None else momentum[where]).copy_from(part)

        self._core.visit_shards(look)

    def write(self, values: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        """Replace the outer copy and the momentum, which becomes zero without `momentum`."""

        def change(part: _core.StatePart) -> None:
            where = self._parts(part)
            part.copy_from(part_of(values[where], None if momentum is None else momentum[where]))

        self._core.change_shards(change, lambda: None)

    def step(self, gradients: torch.Tensor) -> None:
        """Update the outer copy and the momentum with these gradients."""
        with in_stream(self._gpu, self._stream):
            self._core.prepare(rules=[self._rule], missed=[])
            for number, gradient in enumerate(gradients.split(PIECE)):
                memory = self._core.acquire_gradients(number)
                try:
                    tensor_of(memory, torch.float32, 0, gradient.numel()).copy_(gradient)
                finally:
                    self._core.release()
            self._core.step_prepared()
            self._core.finish()

    def offload(self) -> None:
        """Free the GPU's memory, if the state is there."""
        if self._gpu is not None:
            self._core.offload(parameters=True, agree=lambda failed: None)

    def reload(self) -> None:
        if self._gpu is not None:
            with in_stream(self._gpu, self._stream):
                self._core.reload(agree=lambda failed: None)

    @property
    def bytes(self) -> int:
        """The bytes of the outer copy and of the momentum."""
        return int((8 if self.has_momentum else 4) * self.count)

    def ledger(self) -> str:
        return self._core.ledger((_core.Tier.host, 0))

