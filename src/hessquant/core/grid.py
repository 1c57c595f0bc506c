"""The uniform affine grid: which values a quantized weight may take.

A group of consecutive inputs of one row shares a scale s and a zero z; code c in 0 .. 2^bits - 1 stands for
s * (c - z). Symmetric grids fix z at mid-range. Scales are rounded to the dtype they are stored in *before* any
weight is rounded, so that the sweep compensates for that rounding as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hessquant.errors import GridError
from hessquant.records import GridSpec

SHRINK_FACTORS = tuple(1.0 - 0.025 * step for step in range(25))
"""Fractions of the min-max scale that the scale search tries on any grid: 1.0 down to 0.4 in 25 steps."""


def scale_factors(spec: GridSpec) -> tuple[float, ...]:
    """Multiples of the min-max scale that the scale search tries: `SHRINK_FACTORS`, and a wider one if symmetric.

    The min-max scale of a symmetric grid reaches half a step too short of the group's largest weight w if that is
    positive: codes end at 2^(bits-1) - 1 steps, while w lies at 2^(bits-1) - 1/2. With top / (top - 1) times that scale
    w is the largest value. One large weight that meets most of the input's energy cannot be clipped even so little: the
    other columns would run into their own limits in making up for it.

    >>> [round(factor, 3) for factor in scale_factors(GridSpec(bits=4))[:3]]
    [1.0, 1.071, 0.975]
    >>> scale_factors(GridSpec(bits=4, symmetric=False))[:2]
    (1.0, 0.975)
    """
    widest = (spec.top / (spec.top - 1),) if spec.symmetric else ()
    return SHRINK_FACTORS[:1] + widest + SHRINK_FACTORS[1:]


@dataclass(frozen=True)
class Grid:
    """Scales and zeros of one weight.

    Attributes:
        spec: What was asked for.
        scales: [rows, groups], dtype `scale_dtype(spec)`, finite and positive.
        zeros: [rows, groups], uint8, 0 .. 2^bits - 1.
    """

    spec: GridSpec
    scales: Tensor
    zeros: Tensor


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as integers on a grid.

    Attributes:
        codes: [rows, columns], uint8, 0 .. 2^bits - 1, in the columns' own order.
        grid: Scales and zeros.
    """

    codes: Tensor
    grid: Grid

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [rows, columns] that the codes stand for."""
        return decode(self.codes, self.grid, dtype)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same on a device; itself where it is there already."""
        grid = Grid(self.grid.spec, self.grid.scales.to(device), self.grid.zeros.to(device))
        return QuantizedWeight(self.codes.to(device), grid)

    def alone(self) -> "QuantizedWeight":
        """The same in memory of its own, which holds nothing else."""
        return QuantizedWeight(
            self.codes.clone(), Grid(self.grid.spec, self.grid.scales.clone(), self.grid.zeros.clone())
        )

    def members(self) -> Iterator["QuantizedWeight"]:
        """Views of each of the weights that these are, where all have a dimension more in front; else of this one."""
        parts = (part.view(-1, *part.shape[-2:]) for part in (self.codes, self.grid.scales, self.grid.zeros))
        for codes, scales, zeros in zip(*parts, strict=True):
            yield QuantizedWeight(codes, Grid(self.grid.spec, scales, zeros))


class SweepKernel(Protocol):
    """The triangular loop of one block; see `hessquant.kernels.twin.sweep_block`."""

    def __call__(
        self, weight: Tensor, lower: Tensor, carried: Tensor, scales: Tensor, zeros: Tensor, group: Tensor, top: int
    ) -> tuple[Tensor, Tensor]:
        """Take weight and carried [width, rows], lower [width, width], scales and zeros [groups, rows], group [width].

        Give codes uint8 and errors [width, rows].
        """


class SearchKernel(Protocol):
    """Best multiple of the min-max scale per group; see `hessquant.kernels.twin.search_scales`."""

    def __call__(
        self, weight: Tensor, column_weights: Tensor, spec: GridSpec, factors: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        """Take weight [columns, rows] and column_weights [columns]; give scales and zeros [groups, rows]."""


def min_max(weight: Tensor, spec: GridSpec) -> Grid:
    """Fit the grid to the range of each group (round-to-nearest's usual choice).

    Args:
        weight: [rows, columns], floating.
        spec: The grid to fit.

    Returns:
        Grid with scales [rows, groups]. A group of zeros gets scale 1 and dequantizes to exact zeros.

    Raises:
        GridError: If the group size does not divide the columns, or a scale overflows its dtype.

    >>> grid = min_max(torch.tensor([[-1.5, 0.75, 0.0, 0.0]]), GridSpec(bits=2, group_size=2))
    >>> grid.scales.tolist(), grid.zeros.tolist()
    ([[1.0, 1.0]], [[2, 2]])
    """
    return Grid(spec, *affine(*group_range(weight, spec), spec))


def group_range(weight: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Least and largest weight of each group, both [rows, groups]."""
    groups = _in_groups(weight, spec)
    return groups.amin(-1), groups.amax(-1)


def _in_groups(values: Tensor, spec: GridSpec) -> Tensor:
    """[..., rows, columns] as [..., rows, groups, columns of a group]."""
    return values.reshape(*values.shape[:-1], -1, spec.width(values.shape[-1]))


def scale_dtype(spec: GridSpec) -> torch.dtype:
    """The dtype that a grid's scales are stored in."""
    dtype: torch.dtype = getattr(torch, spec.scale_dtype)
    return dtype


def smallest_scale(dtype: torch.dtype) -> float:
    """Smallest positive scale that `dtype` stores and float32 arithmetic does not flush.

    >>> smallest_scale(torch.float16) == 2.0**-24
    True
    """
    info = torch.finfo(dtype)
    return max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)


def count_degenerate(weight: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Groups that are all zero, and groups too small for any scale of the stored dtype; one number per matrix.

    >>> count_degenerate(torch.tensor([[0.0, 0.0, 1e-9, 0.0]]), GridSpec(bits=4, group_size=2))
    (tensor(1), tensor(1))
    """
    span = _span(*group_range(weight, spec), spec)
    tiny = (span / spec.top < smallest_scale(scale_dtype(spec))) & (span > 0)
    return (span == 0).sum((-2, -1)), tiny.sum((-2, -1))


def _span(low: Tensor, high: Tensor, spec: GridSpec) -> Tensor:
    """From the least to the largest value that a group's grid must reach."""
    if spec.symmetric:
        return 2 * torch.maximum(low.abs(), high.abs())
    return high.clamp(min=0) - low.clamp(max=0)


def affine(low: Tensor, high: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Scales (stored dtype) and zeros (uint8) of groups that range from `low` to `high`, any one shape.

    Raises:
        GridError: If a scale overflows the stored dtype.
    """
    scales, zeros = _rounded_affine(low, high, spec)
    if not bool(torch.isfinite(scales).all()):
        raise GridError(
            f"a scale of {float((_span(low, high, spec) / spec.top).max()):.3g} does not fit {scales.dtype}; the "
            f"weights reach {float(torch.maximum(low.abs(), high.abs()).max()):.3g}: check the source checkpoint"
        )
    return scales, zeros


def candidates(
    low: Tensor, high: Tensor, spec: GridSpec, factors: tuple[float, ...]
) -> Iterator[tuple[Tensor, Tensor]]:
    """`affine` of the range times each factor, all checked by the widest before the first.

    Raises:
        GridError: If a scale overflows the stored dtype.
    """
    for factor in sorted({factors[0], max(factors)}):
        affine(low * factor, high * factor, spec)
    for factor in factors:
        yield _rounded_affine(low * factor, high * factor, spec)


def _rounded_affine(low: Tensor, high: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """`affine`, with infinite scales where they overflow."""
    span, dtype = _span(low, high, spec), scale_dtype(spec)
    scales = (span / spec.top).clamp(min=smallest_scale(dtype)).to(dtype)
    scales = torch.where(span == 0, torch.ones_like(scales), scales)
    if spec.symmetric:
        return scales, torch.full_like(scales, spec.middle, dtype=torch.uint8)
    zeros = torch.round(-low / scales.to(low.dtype)).clamp(0, spec.top)
    # Any zero stands for a group of zeros; 0 itself is the one that some formats cannot store.
    return scales, torch.where(span == 0, spec.middle, zeros).to(torch.uint8)


def encode(weight: Tensor, grid: Grid) -> Tensor:
    """Round each weight to the nearest grid value; codes uint8 [rows, columns].

    >>> grid = min_max(torch.tensor([[-1.5, 0.75]]), GridSpec(bits=2, group_size=2))
    >>> encode(torch.tensor([[-1.5, 0.75]]), grid).tolist()
    [[0, 3]]
    """
    scales, zeros = grid.scales.to(weight.dtype).unsqueeze(-1), grid.zeros.unsqueeze(-1)
    codes = (_in_groups(weight, grid.spec) / scales).round_().add_(zeros).clamp_(0, grid.spec.top)
    return codes.to(torch.uint8).view(weight.shape)


def decode(codes: Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that codes [rows, columns] stand for: (code - zero) * scale, in `dtype`.

    In float32 the product is exact: a code difference has at most 8 bits and a stored scale at most 11.

    >>> grid = min_max(torch.tensor([[-1.5, 0.75]]), GridSpec(bits=2, group_size=2))
    >>> decode(torch.tensor([[0, 3]], dtype=torch.uint8), grid).tolist()
    [[-2.0, 1.0]]
    """
    steps = _in_groups(codes, grid.spec).to(dtype)
    return steps.sub_(grid.zeros.unsqueeze(-1)).mul_(grid.scales.to(dtype).unsqueeze(-1)).view(codes.shape)
