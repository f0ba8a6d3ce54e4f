"""The rows and matrices that hold a range of a parameter's elements."""

from __future__ import annotations

import torch


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

    def rows_in(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Return the window's part of values by matrix and row."""
        return of_rows[self._blocks] if self._is_stack else of_rows[:, self._blocks]

    def matrices_in(self, of_matrices: torch.Tensor) -> torch.Tensor:
        """Return the window's part of values of which the first dimension is the matrix."""
        return of_matrices[self._blocks] if self._is_stack else of_matrices
