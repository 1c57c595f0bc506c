"""The grid: which values a quantized weight may take.

A group of consecutive inputs of one row shares a scale s and a zero z; code c in 0 .. 2^bits - 1 stands for
s * (c - z). Symmetric grids fix z at mid-range. On a grid of floats, s is multiplied by the number of E2M1 whose rank
is c - z: 0, 0.5, 1, 1.5, 2, 3, 4, 6 for 0 to 7, and likewise below zero. Scales are rounded to what can be stored
*before* any weight is rounded, so that the sweep compensates for that rounding as well.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hessquant.config import FLOAT_GROUP_SIZES, Config
from hessquant.errors import GridError
from hessquant.records import GridSpec

SHRINK_FACTORS = tuple(1.0 - 0.025 * step for step in range(25))
"""Fractions of the min-max scale that the scale search tries on a grid of integers: 1.0 down to 0.4 in 25 steps."""

_FLOAT_FACTORS = {
    # E4M3's numbers are at least 1/15 apart, so that steps of 6 % miss none; at 1.5 the largest weight is 4, not 6.
    "float8_e4m3fn": tuple(1.06**step for step in (0, *range(7, 0, -1), *range(-1, -17, -1))),
    "float8_e8m0fnu": (1.0, 2.0, 0.5),
}

FLOAT_GRIDS = {
    "nvfp4": GridSpec(4, FLOAT_GROUP_SIZES["nvfp4"], True, "float8_e4m3fn", "e2m1"),
    "mxfp4": GridSpec(4, FLOAT_GROUP_SIZES["mxfp4"], True, "float8_e8m0fnu", "e2m1"),
}
"""The grid of each format whose weights are 4-bit floats, but for a weight's own global scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the 4-bit float E2M1 that are not negative, by rank."""

_CELLS = (0.5, 0.5, 0.5, 0.5, 0.75, 1.0, 1.5, 2.0)
"""How far apart the weights are that become such a number; those that become the largest, as if there were a next."""

_MOST_BINADES = 100
"""Largest exponent of a global scale, either way: what it is made of stays normal in float32."""

_CHUNK = 1 << 20
"""Weights that are rounded or decoded at a time: what is made on the way is held for these alone."""


def scale_factors(spec: GridSpec) -> tuple[float, ...]:
    """Multiples of the min-max scale that the scale search tries: `SHRINK_FACTORS`, and a wider one if symmetric.

    On a grid of floats, whose scales are coarse: every scale that can be stored within 0.4 to 1.5 times the min-max
    one, or the powers of two next to it.

    The min-max scale of a symmetric grid reaches half a step too short of the group's largest weight w if that is
    positive: codes end at 2^(bits-1) - 1 steps, while w lies at 2^(bits-1) - 1/2. With top / (top - 1) times that scale
    w is the largest value. One large weight that meets most of the input's energy cannot be clipped even so little: the
    other columns would run into their own limits in making up for it.

    >>> [round(factor, 3) for factor in scale_factors(GridSpec(bits=4))[:3]]
    [1.0, 1.071, 0.975]
    >>> scale_factors(GridSpec(bits=4, symmetric=False))[:2]
    (1.0, 0.975)
    """
    if spec.is_float:
        return _FLOAT_FACTORS[spec.scale_dtype]
    widest = (spec.top / (spec.top - 1),) if spec.symmetric else ()
    return SHRINK_FACTORS[:1] + widest + SHRINK_FACTORS[1:]


@dataclass(frozen=True)
class Grid:
    """Scales and zeros of one weight.

    Attributes:
        spec: What was asked for.
        scales: [rows, groups], dtype `scale_dtype(spec)`, finite and positive: what a step is multiplied by.
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
        self,
        weight: Tensor,
        lower: Tensor,
        carried: Tensor,
        scales: Tensor,
        zeros: Tensor,
        group: Tensor,
        spec: GridSpec,
    ) -> tuple[Tensor, Tensor]:
        """Take weight and carried [width, rows], lower [width, width], scales and zeros [groups, rows], group [width].

        Of the spec, what codes stand for counts. Give codes uint8 and errors [width, rows].
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


def spec_for(config: Config, group_size: int) -> GridSpec:
    """The grid that a config asks for, with its group size resolved."""
    return FLOAT_GRIDS.get(config.format) or GridSpec(config.bits, group_size, config.symmetric)


def with_global_scale(spec: GridSpec, largest: float) -> GridSpec:
    """The grid of weights of which the largest is known, by absolute value; itself where it has no global scale.

    That is the largest power of two with which the widest scale of the search is no more than half of E4M3's largest
    number: multiplied by it, scales stay exact in float32 and bfloat16, and what GPTQ adds to weights has room.

    >>> with_global_scale(FLOAT_GRIDS["nvfp4"], 1.0).global_scale
    512.0
    """
    if not spec.has_global_scale or not largest > 0:
        return spec
    most = torch.finfo(_stored_dtype(spec)).max / 2 / (max(scale_factors(spec)) * largest / E2M1[-1])
    return replace(spec, global_scale=2.0 ** min(max(math.floor(math.log2(most)), -_MOST_BINADES), _MOST_BINADES))


def scale_dtype(spec: GridSpec) -> torch.dtype:
    """The dtype that a grid's scales are held in: the one they are stored in, or float32 for those of 8 bits."""
    return torch.float32 if spec.is_float else _stored_dtype(spec)


def _stored_dtype(spec: GridSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.scale_dtype)
    return dtype


def storable(scales: Tensor, spec: GridSpec) -> Tensor:
    """The nearest scales that can be stored, as they are held; of a float grid, its first or last for any beyond."""
    if not spec.is_float:
        return scales.to(scale_dtype(spec))
    dtype = _stored_dtype(spec)
    kept = scales.clamp(min=_least_scale(spec)).mul_(spec.global_scale).clamp_(max=torch.finfo(dtype).max)
    return kept.to(dtype).to(torch.float32) / spec.global_scale


def smallest_scale(dtype: torch.dtype) -> float:
    """Smallest positive scale that `dtype` stores and float32 arithmetic does not flush.

    >>> smallest_scale(torch.float16) == 2.0**-24
    True
    """
    info = torch.finfo(dtype)
    return max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)


def _least_scale(spec: GridSpec) -> float:
    """The smallest scale that is taken.

    Of a float grid, a normal number: vLLM's kernel for E4M3 takes what is below for zero
    (`marlin_utils_fp4.nvfp4_marlin_process_scales`), and float32 arithmetic may.
    """
    if not spec.is_float:
        return smallest_scale(_stored_dtype(spec))
    ours, float32 = torch.finfo(_stored_dtype(spec)), torch.finfo(torch.float32)
    return max(ours.smallest_normal / spec.global_scale, float32.smallest_normal)


def count_degenerate(weight: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Groups that are all zero, and groups too small for any scale of the stored dtype; one number per matrix.

    >>> count_degenerate(torch.tensor([[0.0, 0.0, 1e-9, 0.0]]), GridSpec(bits=4, group_size=2))
    (tensor(1), tensor(1))
    """
    span = _span(*group_range(weight, spec), spec)
    tiny = (span / _reach(spec) < _least_scale(spec)) & (span > 0)
    return (span == 0).sum((-2, -1)), tiny.sum((-2, -1))


def _span(low: Tensor, high: Tensor, spec: GridSpec) -> Tensor:
    """From the least to the largest value that a group's grid must reach."""
    if spec.symmetric:
        return 2 * torch.maximum(low.abs(), high.abs())
    return high.clamp(min=0) - low.clamp(max=0)


def _reach(spec: GridSpec) -> float:
    """The min-max scale times this is the span of a grid.

    A power of two is taken if the largest weight is below 7 of it, which would be rounded to 6 if there were an 8.
    """
    if not spec.is_float:
        return spec.top
    return 2 * (14 / 3 if spec.scale_dtype == "float8_e8m0fnu" else E2M1[-1])


def affine(low: Tensor, high: Tensor, spec: GridSpec) -> tuple[Tensor, Tensor]:
    """Scales (dtype `scale_dtype(spec)`) and zeros (uint8) of groups that range from `low` to `high`, any one shape.

    Raises:
        GridError: If a scale overflows the stored dtype.
    """
    scales, zeros = _rounded_affine(low, high, spec)
    if not bool(torch.isfinite(scales).all()):
        raise GridError(
            f"a scale of {float((_span(low, high, spec) / _reach(spec)).max()):.3g} does not fit {scales.dtype}; the "
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
    span = _span(low, high, spec)
    scales = storable((span / _reach(spec)).clamp(min=_least_scale(spec)), spec)
    scales = torch.where(span == 0, 1 / spec.global_scale, scales)
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
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for rows, scales, zeros in _pieces(grid, weight):
        ratios = _in_groups(weight[rows], grid.spec) / scales.to(weight.dtype)
        codes[rows] = nearest(ratios, zeros, grid.spec).view(codes[rows].shape)
    return codes


def _pieces(grid: Grid, values: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Some rows of values at a time, or some of a batch's weights, with their scales and zeros, [..., groups, 1]."""
    height = max(1, _CHUNK * len(values) // max(1, values.numel()))
    for start in range(0, len(grid.scales), height):
        rows = slice(start, start + height)
        yield rows, grid.scales[rows].unsqueeze(-1), grid.zeros[rows].unsqueeze(-1)


def nearest(ratios: Tensor, zeros: Tensor, spec: GridSpec) -> Tensor:
    """Codes of the grid values nearest to weights, given as multiples of their scales; in their dtype and place.

    Ties go to the even integer, or to the number of E2M1 whose last digit is 0; what is beyond the grid, to its end.

    >>> nearest(torch.tensor([0.25, 0.75, -2.6, 5.0, 5.1, -9.0]), torch.tensor(8.0), FLOAT_GRIDS["nvfp4"]).tolist()
    [8.0, 10.0, 3.0, 14.0, 15.0, 1.0]
    """
    if not spec.is_float:
        return ratios.round_().add_(zeros).clamp_(0, spec.top)
    # Numbers of E2M1 are 0.5 apart up to 2, 1 up to 4, and then 2. Where they are farther apart, fewer lie below a
    # number, so the least of the three ranks is the right one; ties are even in all, since 2 and 4 are.
    size = ratios.abs()
    ranks = (2 * size).round_().clamp_(max=len(E2M1) - 1)
    torch.minimum(ranks, size.round().add_(2), out=ranks)
    torch.minimum(ranks, size.div_(2).round_().add_(4), out=ranks)
    return ranks.copysign_(ratios).add_(zeros)


def steps(codes: Tensor, zeros: Tensor, spec: GridSpec) -> Tensor:
    """What codes stand for in multiples of their scales; codes are given in a floating dtype, and overwritten.

    >>> steps(torch.tensor([8.0, 10.0, 3.0, 15.0]), torch.tensor(8.0), FLOAT_GRIDS["nvfp4"]).tolist()
    [0.0, 1.0, -3.0, 6.0]
    """
    ranks = codes.sub_(zeros)
    if not spec.is_float:
        return ranks
    # The same three pieces the other way around.
    size = ranks.abs()
    taken = torch.maximum(0.5 * size, size - 2)
    return torch.maximum(taken, size.mul_(2).sub_(8), out=taken).copysign_(ranks)


def evened(quantized: QuantizedWeight) -> Grid:
    """The grid, with scales as wide as the steps around its codes are: root mean square, by group.

    Those of integers are all as wide as the scale is.
    """
    grid = quantized.grid
    if not grid.spec.is_float:
        return grid
    scales, cells = grid.scales.clone(), grid.scales.new_tensor(_CELLS) ** 2
    for rows, _, zeros in _pieces(grid, quantized.codes):
        ranks = (_in_groups(quantized.codes[rows], grid.spec).int() - zeros.int()).abs()
        scales[rows] *= cells[ranks].mean(-1).sqrt()
    return Grid(grid.spec, scales, grid.zeros)


def decode(codes: Tensor, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that codes [rows, columns] stand for: step * scale, in `dtype`.

    In float32 the product is exact: a step has at most 8 bits and a stored scale at most 11. Of a float grid that holds
    where the global scale is a power of two.

    >>> grid = min_max(torch.tensor([[-1.5, 0.75]]), GridSpec(bits=2, group_size=2))
    >>> decode(torch.tensor([[0, 3]], dtype=torch.uint8), grid).tolist()
    [[-2.0, 1.0]]
    """
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    for rows, scales, zeros in _pieces(grid, codes):
        taken = steps(_in_groups(codes[rows], grid.spec).to(dtype), zeros, grid.spec)
        values[rows] = taken.mul_(scales.to(dtype)).view(values[rows].shape)
    return values
