"""The inner loops fused with Triton, for GPUs: a program per tile of rows, every row's columns in turn.

Each multiplication and addition is a rounding of its own, in the twin's order: compiled without fused multiply-adds,
and with divisions that round to nearest. Where TRITON_INTERPRET=1 is set before Triton is imported, the same code runs
on the CPU, slowly, for tests. Sizes and warps are fixed; docs/decisions/0020-triton.md has the reckoning.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hessquant.core.grid import affine
from hessquant.records import GridSpec

# A sweep's tile is one warp's, so that its 128 steps need no barrier between warps; 8 float32 fill a 32-byte sector.
_PANEL, _SWEPT = tl.constexpr(16), tl.constexpr(8)
_SEARCHED = tl.constexpr(32)

_SWEEP: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
_SEARCH: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}

# Scales of one launch. Making so many takes about half a gigabyte for a moment.
_CANDIDATES = 1 << 24


def sweep_block(
    weight: Tensor, lower: Tensor, carried: Tensor, scales: Tensor, zeros: Tensor, group: Tensor, spec: GridSpec
) -> tuple[Tensor, Tensor]:
    """`twin.sweep_block` on tensors of one device that Triton compiles for.

    All but `spec` may have one more dimension in front: as many weights of one shape, swept in one launch.
    """
    width, rows = weight.shape[-2:]
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    errors = torch.empty_like(weight, memory_format=torch.contiguous_format)
    # Of the triangle, columns are read; they are to lie in one piece.
    inputs = tuple(tensor.contiguous() for tensor in (weight, lower.mT, carried, scales, zeros, group))
    programs = weight[..., 0, 0].numel() * triton.cdiv(rows, _SWEPT.value)
    # Triton compiles for, and launches on, the current device.
    with torch.accelerator.device_index(weight.device.index):
        _sweep_block[programs,](inputs, (codes, errors), width, rows, scales.shape[-2], _top(spec), **_SWEEP)
    return codes, errors


def search_scales(
    weight: Tensor, column_weights: Tensor, spec: GridSpec, factors: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """`twin.search_scales` on tensors of one device that Triton compiles for.

    Weight and column weights may have one more dimension in front: as many weights of one shape.
    """
    columns, rows = weight.shape[-2:]
    width = spec.width(columns)
    members, importance = weight.reshape(-1, width, rows), column_weights.reshape(-1, width)
    few = max(1, _CANDIDATES // (rows * len(factors)))
    pieces = zip(torch.split(members, few), torch.split(importance, few), strict=True)
    found = [_best_of(*piece, spec, factors) for piece in pieces]
    scales, zeros = (torch.cat(parts).view(*weight.shape[:-2], -1, rows) for parts in zip(*found, strict=True))
    return scales, zeros


def _best_of(members: Tensor, importance: Tensor, spec: GridSpec, factors: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Scales and zeros [groups, rows] of weights [groups, width, rows]; importance is [groups, width]."""
    groups, width, rows = members.shape
    low, high = members.amin(1), members.amax(1)
    # Refuses a range that overflows, and names it; below it would be named times a factor.
    affine(low, high, spec)
    # All candidates at once, [factors, groups, rows]: on a GPU a call costs more than its arithmetic.
    tried = low.new_tensor(factors).view(-1, 1, 1)
    scales, zeros = affine(low * tried, high * tried, spec)
    best = torch.zeros(low.shape, dtype=torch.int64, device=low.device)
    inputs = tuple(tensor.contiguous() for tensor in (members, importance, scales, zeros))
    programs, size = groups * triton.cdiv(rows, _SEARCHED.value), triton.next_power_of_2(len(factors))
    with torch.accelerator.device_index(low.device.index):
        _search_scales[programs,](inputs, best, width, rows, len(factors), _top(spec), size, **_SEARCH)
    chosen = best.unsqueeze(0)
    return scales.gather(0, chosen)[0], zeros.gather(0, chosen)[0]


def _top(spec: GridSpec) -> int | None:
    """The largest code; None for a float grid, so that Triton compiles the loops for each."""
    return None if spec.is_float else spec.top


@triton.jit
def _sweep_block(inputs, outputs, width, rows, groups, top):  # type: ignore[no-untyped-def]
    """Sweep one weight's tile of rows, panel by panel; what panels hand on are errors, written and read again."""
    weight, upper, carried, scales, zeros, group = inputs
    codes, errors = outputs
    tiles = tl.cdiv(rows, _SWEPT)
    pitch = tl.cast(rows, tl.int64)
    row = tl.program_id(0) % tiles * _SWEPT + tl.arange(0, _SWEPT)
    # Rows of the weights, and of the scales, that lie before this weight's in the batch.
    first = tl.cast(tl.program_id(0) // tiles, tl.int64) * width
    first_group = tl.cast(tl.program_id(0) // tiles, tl.int64) * groups
    for start in range(0, width, _PANEL):
        column = start + tl.arange(0, _PANEL)
        inside = column < width
        here = inside[:, None] & (row < rows)[None, :]
        at = (first + column)[:, None] * pitch + row[None, :]
        w = tl.load(weight + at, mask=here, other=0.0)
        total = tl.load(carried + at, mask=here, other=0.0)
        g = first_group + tl.load(group + first + column, mask=inside, other=0)
        scale = tl.load(scales + g[:, None] * pitch + row[None, :], mask=here, other=1.0)
        zero = tl.load(zeros + g[:, None] * pitch + row[None, :], mask=here, other=0.0)
        inverse = _over(1.0, tl.load(upper + (first + column) * width + column, mask=inside, other=1.0))[:, None]
        for k in tl.range(0, start, loop_unroll_factor=4):
            coefficient = tl.load(upper + (first + k) * width + column, mask=inside, other=0.0)
            earlier = tl.load(errors + (first + k) * pitch + row, mask=row < rows, other=0.0)
            total += coefficient[:, None] * earlier[None, :]
        for k in range(start, start + _PANEL):
            # All columns of the panel are rounded each time: those up to k have their codes, k is the next that has.
            _, error = _rounded(w, w + total * inverse, scale, zero, top)
            of_k = tl.sum(tl.where((column == k)[:, None], error, 0.0), axis=0)
            coefficient = tl.load(upper + (first + k) * width + column, mask=inside & (column > k), other=0.0)
            total += coefficient[:, None] * of_k[None, :]
        code, error = _rounded(w, w + total * inverse, scale, zero, top)
        tl.store(codes + at, code.to(tl.uint8), mask=here)
        tl.store(errors + at, error, mask=here)
        # Other threads read them.
        tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _search_scales(inputs, best, width, rows, factors, top, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The best candidate's number for one group of a tile of rows; all candidates side by side, SIZE or fewer."""
    weight, column_weights, scales, zeros = inputs
    tiles = tl.cdiv(rows, _SEARCHED)
    pitch = tl.cast(rows, tl.int64)
    row = tl.program_id(0) % tiles * _SEARCHED + tl.arange(0, _SEARCHED)
    g = tl.cast(tl.program_id(0) // tiles, tl.int64)
    factor = tl.arange(0, SIZE)
    there = (factor < factors)[:, None]
    here = there & (row < rows)[None, :]
    at = (factor[:, None] * (tl.num_programs(0) // tiles) + g) * pitch + row[None, :]
    scale = tl.load(scales + at, mask=here, other=1.0).to(weight.dtype.element_ty)
    zero = tl.load(zeros + at, mask=here, other=0).to(weight.dtype.element_ty)
    loss = tl.zeros((SIZE, _SEARCHED), weight.dtype.element_ty)
    for column in range(0, width):
        w = tl.load(weight + (g * width + column) * pitch + row, mask=row < rows, other=0.0)[None, :]
        _, error = _rounded(w, w, scale, zero, top)
        loss += tl.load(column_weights + g * width + column) * (error * error)
    # As in the twin: of equal losses the first, and the first of all where none is finite.
    loss = tl.where(there & (loss < float("inf")), loss, float("inf"))
    tl.store(best + g * pitch + row, tl.argmin(loss, axis=0).to(tl.int64), mask=row < rows)


@triton.jit
def _rounded(weight, target, scale, zero, top):  # type: ignore[no-untyped-def]
    """The code nearest to a target, and what is then left of the weight; see `hessquant.core.grid.nearest`.

    To add and subtract 1.5 * 2^23 (2^52 in float64), which has no digits after the point to spare, rounds to the
    nearest integer, ties to even. From 2^22 on it may be off, where every code is at its limit.
    """
    large: tl.constexpr = 6755399441055744.0 if weight.dtype == tl.float64 else 12582912.0
    ratio = _over(target, scale)
    if top is None:
        size = tl.abs(ratio)
        rank = tl.minimum((2.0 * size + large) - large, (size + large) - large + 2.0)
        rank = tl.minimum(rank, tl.minimum((0.5 * size + large) - large + 4.0, 7.0))
        step = tl.maximum(tl.maximum(0.5 * rank, rank - 2.0), 2.0 * rank - 8.0)
        sign = tl.where(ratio < 0.0, -1.0, 1.0).to(weight.dtype)
        code = zero + sign * rank
        step *= sign
    else:
        code = tl.minimum(tl.maximum((ratio + large) - large + zero, 0.0), top)
        step = code - zero
    return code, weight - scale * step


@triton.jit
def _over(numerator, denominator):  # type: ignore[no-untyped-def]
    """The quotient, rounded to nearest; in float32 `/` would be a few units in the last place off."""
    return numerator / denominator if denominator.dtype == tl.float64 else tl.math.div_rn(numerator, denominator)
