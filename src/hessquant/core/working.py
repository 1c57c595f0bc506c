"""The Hessian as a weight is solved with it, without a second matrix: what is asked for is made piece by piece."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hessquant.core.factor import Factor

_ORDINARY = 20
"""Hessians whose mean diagonal is within this many powers of two of 1 are used as they are."""


def is_ordinary(mean_diagonal: float) -> bool:
    """Whether a Hessian with this mean of its diagonal is used at its own scale."""
    return abs(math.frexp(mean_diagonal)[1]) <= _ORDINARY


@dataclass(frozen=True)
class WorkingHessian:
    """H / unit in the dtype of the weight, damped or not.

    `working[rows, columns]`, with slices that have both ends, is that piece: a view of H where nothing changes.

    Attributes:
        hessian: H, [columns, columns]; of a batch (`core.batch`) [members, columns, columns].
        dtype: Of the pieces.
        unit: A power of two, which changes no digit: a Hessian of any scale must neither overflow nor vanish.
        added: What the diagonals have besides, [..., columns], in `dtype` and by the unit; None for nothing.
    """

    hessian: Tensor
    dtype: torch.dtype
    unit: float
    added: Tensor | None = None

    @classmethod
    def of(cls, hessian: Tensor, dtype: torch.dtype) -> "WorkingHessian":
        """The undamped one, at a scale that `dtype` holds."""
        mean = float(hessian.diagonal(dim1=-2, dim2=-1).double().mean())
        return cls(hessian, dtype, 1.0 if is_ordinary(mean) else 2.0 ** math.frexp(mean)[1])

    def damped(self, factor: Factor) -> "WorkingHessian":
        """With what `factor` was damped with, and with dead columns as it took them."""
        diagonal = (self.hessian.diagonal(dim1=-2, dim2=-1) / self.unit).to(self.dtype)
        return replace(self, added=factor.added_to(diagonal))

    def __len__(self) -> int:
        """Columns."""
        return self.hessian.shape[-1]

    def __getitem__(self, tile: tuple[slice, slice]) -> Tensor:
        """One piece, [..., rows, columns]; not to be written to."""
        rows, columns = tile
        piece = self.hessian[..., rows, columns]
        if self.unit != 1:
            piece = piece / self.unit
        piece = piece.to(self.dtype)
        first, last = max(rows.start, columns.start), min(rows.stop, columns.stop)
        if self.added is not None and first < last:
            piece = piece.clone(memory_format=torch.contiguous_format)
            piece.diagonal(rows.start - columns.start, -2, -1).add_(self.added[..., first:last])
        return piece


InPieces = Tensor | WorkingHessian
"""A Hessian that is asked for piece by piece: all of it, or one that makes them."""
