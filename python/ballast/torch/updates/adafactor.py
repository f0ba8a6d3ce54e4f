"""Updates by torch's Adafactor. Its step needs sums over the rows and columns of full matrices: each rank makes those of its
shards, and the ranks add them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ballast.checks import refuse_unsupported
from ballast.ranks import Group
from ballast.torch.gpu import wait_for_current_streams
from ballast.torch.parameters.units import UnitParameter
from ballast.torch.process_groups import sum_in_fp32
from ballast.torch.updates.custom_step import group_of
from ballast.torch.updates.custom_updates import CustomUpdates, move_state_to
from ballast.torch.updates.sharded_state import ShardedState
from ballast.torch.updates.updates import Tiles, elements_in


class MatrixWindow:
    """Consecutive elements of a parameter of two dimensions or more. The last two are the rows and columns of a matrix, and the
    others those of a stack of matrices. The window has all columns of the rows with these elements; of a stack, all rows of the
    matrices with these elements.

    >>> window = MatrixWindow(torch.Size([3, 4]), first=6, count=3)
    >>> window.fill(torch.tensor([6.0, 7.0, 8.0], device="cpu"))
    tensor([[[0., 0., 6., 7.],
             [8., 0., 0., 0.]]])
    >>> window.elements_in(window.fill(torch.tensor([6.0, 7.0, 8.0], device="cpu")))
    tensor([6., 7., 8.])
    """

    def __init__(self, shape: torch.Size, first: int, count: int):
        *stack, height, width = shape
        self._is_stack = torch.Size(stack).numel() > 1
        self._count = count
        block = height * width if self._is_stack else width
        self._before, self._after = first % block, -(first + count) % block
        self._blocks = slice(first // block, (first + count + self._after) // block)
        blocks = self._blocks.stop - self._blocks.start
        self._shape = (blocks, height, width) if self._is_stack else (1, blocks, width)

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of the elements in their places, with zeros in the others: by matrix, row and column."""
        return torch.nn.functional.pad(values, (self._before, self._after)).view(self._shape)

    def elements_in(self, window: torch.Tensor) -> torch.Tensor:
        return window.reshape(-1)[self._before :][: self._count]

    def rows_in(self, row_values: torch.Tensor) -> torch.Tensor:
        """Return the window's part of values by matrix and row."""
        return row_values[self._blocks] if self._is_stack else row_values[:, self._blocks]

    def matrices_in(self, matrix_values: torch.Tensor) -> torch.Tensor:
        """Return the window's part of values of which the first dimension is the matrix."""
        return matrix_values[self._blocks] if self._is_stack else matrix_values


class RankSums:
    """The sums of all parameters lie in one tensor on the host, which takes one collective."""

    def __init__(self, sizes: Mapping[UnitParameter, Sequence[int]]):
        self._sizes = [size for member_sizes in sizes.values() for size in member_sizes]
        self._first = {}
        tensors = 0
        for member, member_sizes in sizes.items():
            self._first[member] = slice(tensors, tensors + len(member_sizes))
            tensors += len(member_sizes)
        self._total = torch.zeros(sum(self._sizes), dtype=torch.float32, device="cpu")

    def of(self, member: UnitParameter) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = self._total.split(self._sizes)
        return tensors[self._first[member]]

    def add_up(self, ranks: Group | None) -> None:
        """Add the numbers of all ranks. They call it together; without a group there is nothing to add."""
        self._total = sum_in_fp32(ranks, self._total)


class AdafactorUpdates(CustomUpdates):
    """The state is that of torch.optim.Adafactor. A rank with elements of a matrix keeps the means of all rows and columns."""

    whole_values = frozenset({"row_var", "col_var"})

    def custom_step(self, optimizer: Optimizer, shards: ShardedState, tiles: Tiles, factor: float, is_last: bool) -> None:
        mine = [
            Shard(member, shards.part(member)[0], masters, gradients, group_of(optimizer, member.parameter))
            for tile in tiles
            for member, _, masters, gradients in elements_in(tile, shards, factor)
        ]
        sums = RankSums({member: [1, *rows_and_columns(member.parameter.shape)] for member in shards.members})
        for shard in mine:
            shard.add_squares(*sums.of(shard.member))
        sums.add_up(shards.sharing)
        updates = RankSums({member: [1] for member in shards.members})
        for shard in mine:
            move_state_to(optimizer, shard.member.parameter, shard.masters)
            shard.make_update(optimizer.state[shard.member.parameter], *sums.of(shard.member)[1:])
            [squares] = updates.of(shard.member)
            squares += shard.update.square().sum().cpu()
        updates.add_up(shards.sharing)
        for shard in mine:
            shard.apply(float(sums.of(shard.member)[0]), float(updates.of(shard.member)[0]))
        wait_for_current_streams([shard.masters for shard in mine])  # the library continues in streams of its own


def refuse_parts_of_matrices() -> None:
    refuse_unsupported(
        "cannot update the matrices of Adafactor part by part: its step needs the sums of a whole matrix first",
        needed='state on the device or on the host alone, without ballast.Tuning(tile=), memory= and "auto"',
        remedy='Wrap it with offload={"state": "host"}, or without offload.',
    )


def rows_and_columns(shape: torch.Size) -> tuple[int, int]:
    """Return how many rows and columns the matrices of a parameter have together; none if it has less than two dimensions."""
    return (shape[:-1].numel(), shape[:-2].numel() * shape[-1]) if len(shape) > 1 else (0, 0)


class Shard:
    """This rank's elements of a parameter, from the element `first` on. A step calls the methods in their order here."""

    def __init__(
        self, member: UnitParameter, first: int, masters: torch.Tensor, gradients: torch.Tensor, group: dict[str, Any]
    ):
        shape = member.parameter.shape
        self.member, self.masters = member, masters
        self._shape, self._group = shape, group
        self.update = gradients.neg_() if group["maximize"] else gradients  # the update uses the memory of the gradients
        self._window = MatrixWindow(shape, first, len(masters)) if len(shape) > 1 else None
        self._steps = 0.0

    def add_squares(self, values: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Add the squares of the parameter, and of the gradient's rows and columns."""
        values += self.masters.square().sum().cpu()
        if self._window is not None:
            squares = self._window.fill(self.update).square_()
            self._window.rows_in(self._by_row(rows)).add_(squares.sum(-1).cpu())
            self._window.matrices_in(self._by_column(columns)).add_(squares.sum(-2).cpu())

    def make_update(self, state: dict[str, Any], rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Change the state by the sums of all ranks, and make the update from the gradient, before it is clipped."""
        if not state:
            self._begin(state)
        state["step"] += 1
        self._steps = float(state["step"])
        weight = self._steps ** self._group["beta2_decay"]
        eps = self._group["eps"][0]
        eps = torch.finfo(torch.float32).eps if eps is None else eps  # the epsilon of the masters, in which updates are made
        if self._window is None:
            variance = state["variance"].lerp_(self.update.view(state["variance"].shape).square(), weight).flatten().clone()
        else:
            row_var, col_var = self._by_row(state["row_var"]), self._by_column(state["col_var"])
            row_var.lerp_(self._by_row(rows).to(row_var.device) / self._shape[-1], weight)
            col_var.lerp_(self._by_column(columns).to(col_var.device) / self._shape[-2], weight)
            estimate = self._window.rows_in(row_var)[..., None] * self._window.matrices_in(col_var)[:, None]
            estimate.div_(self._window.matrices_in(row_var.mean(-1).clamp_(min=eps))[:, None, None])
            variance = self._window.elements_in(estimate)
        self.update.mul_(variance.clamp_(min=eps * eps).rsqrt_())

    def apply(self, squares_of_values: float, squares_of_update: float) -> None:
        elements, group = self._shape.numel(), self._group
        lr = float(group["lr"])
        size = max(group["eps"][1], (squares_of_values / elements) ** 0.5) * min(lr, 1 / self._steps**0.5)
        clipped_by = max(1.0, (squares_of_update / elements) ** 0.5 / group["d"])
        if group["weight_decay"] != 0:
            self.masters.mul_(1 - lr * group["weight_decay"])
        self.masters.add_(self.update, alpha=-size / clipped_by)

    def _begin(self, state: dict[str, Any]) -> None:
        zeros = torch.zeros_like(self.masters)
        state["step"] = torch.tensor(0.0, device="cpu")
        if self._window is None:
            state["variance"] = zeros if len(zeros) < self._shape.numel() else zeros.view(self._shape)
        else:
            state["row_var"] = zeros.new_zeros([*self._shape[:-1], 1])
            state["col_var"] = zeros.new_zeros([*self._shape[:-2], 1, self._shape[-1]])

    def _by_row(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(-1, self._shape[-2])  # the dimensions are matrix and row

    def _by_column(self, values: torch.Tensor) -> torch.Tensor:
        return values.view(-1, self._shape[-1])
