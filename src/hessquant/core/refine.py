"""After the sweep: descent on the objective itself, over the scales and the codes, which never raises it.

The sweep fixes each column once, knowing nothing of the roundings to come. Afterwards all errors are known, so the best
scale of one group with all else fixed is a quotient (Gauss-Seidel), and the best code of one column is a rounding again
(coordinate descent; QuantEase, arXiv 2309.01885, eq. 9). Groups are visited in turn, first the scale and then the
columns' codes, by the sweep's own kernel with H in the place of M. A block of groups shares one matrix product.
"""

import torch
from torch import Tensor

from hessquant.core.grid import Grid, QuantizedWeight, SweepKernel
from hessquant.core.working import InPieces

_STRIP = 4096
"""Rows of the Hessian that are made at once, where they are made."""


def descend(
    weight: Tensor, quantized: QuantizedWeight, hessian: InPieces, *, block_size: int, kernel: SweepKernel
) -> QuantizedWeight:
    """One round over all groups.

    With e = w - q as of now and z a group's codes less their zeros, the group's scale becomes
    s + (z^T H_g. e) / (z^T H_gg z), row by row, if after rounding to its dtype that is positive and lowers the
    objective; then column j's target is w_j + (1 / H_jj) sum_{k != j} H_jk e_k.

    Args:
        weight: [..., rows, columns].
        quantized: Its codes and grid.
        hessian: [..., columns, columns], symmetric with a positive diagonal, same dtype.
        block_size: Columns per matrix product; does not change the result but for rounding.
        kernel: The loop over columns.

    Returns:
        New codes and scales; tr(E H E^T) is not larger, but for rounding.
    """
    grid, count = quantized.grid, weight.shape[-1]
    width = grid.spec.width(count)
    columns = weight.mT.contiguous()
    errors = columns - quantized.dequantize(weight.dtype).mT
    # Clones: one row's or one group's transpose is contiguous as it is.
    codes = quantized.codes.mT.clone(memory_format=torch.contiguous_format)
    scales = grid.scales.mT.clone(memory_format=torch.contiguous_format)
    zeros = grid.zeros.mT.to(weight.dtype).contiguous()
    step = width * max(1, block_size // width)
    for start in range(0, count, step):
        # H e for the block's columns; kept up to date as they change.
        block = slice(start, min(start + step, count))
        sums = _product(hessian, block, slice(0, count), errors)
        for first in range(start, block.stop, width):
            group, here = slice(first, first + width), slice(first - start, first - start + width)
            of_group = slice(first // width, first // width + 1)
            scale, zero = scales[..., of_group, :], zeros[..., of_group, :]
            steps = codes[..., group, :].to(weight.dtype) - zero
            found, change = _best_scale(scale, steps, sums[..., here, :], _product(hessian, group, group, steps))
            scale.copy_(found)
            moved = steps.mul_(-change)
            errors[..., group, :] += moved
            sums += _product(hessian, block, group, moved)
            for begin in range(first, group.stop, block_size):
                piece = slice(begin, min(begin + block_size, group.stop))
                within, old = hessian[piece, piece].contiguous(), errors[..., piece, :].clone()
                # The kernel adds the new errors of the piece's earlier columns itself.
                carried = sums[..., begin - start : piece.stop - start, :] - within.tril() @ old
                codes[..., piece, :], errors[..., piece, :] = kernel(
                    columns[..., piece, :],
                    within,
                    carried,
                    scale.to(weight.dtype),
                    zero,
                    torch.zeros(within.shape[:-1], dtype=torch.int64, device=weight.device),
                    grid.spec.top,
                )
                rest = slice(piece.stop, block.stop)
                sums[..., piece.stop - start :, :] += _product(hessian, rest, piece, errors[..., piece, :] - old)
    return QuantizedWeight(codes.mT.contiguous(), Grid(grid.spec, scales.mT.contiguous(), grid.zeros))


def _product(hessian: InPieces, rows: slice, columns: slice, right: Tensor) -> Tensor:
    """H[rows, columns] @ right, in strips of H's rows."""
    product = right.new_empty(*right.shape[:-2], rows.stop - rows.start, right.shape[-1])
    for first in range(rows.start, rows.stop, _STRIP):
        last = min(first + _STRIP, rows.stop)
        strip = product[..., first - rows.start : last - rows.start, :]
        torch.matmul(hessian[first:last, columns], right, out=strip)
    return product


def _best_scale(scale: Tensor, steps: Tensor, sums: Tensor, products: Tensor) -> tuple[Tensor, Tensor]:
    """One group's new scales, and by how much they changed in the steps' dtype, both [..., 1, rows].

    Args:
        scale: The present ones, in the stored dtype.
        steps: Codes less their zeros, [..., width, rows].
        sums: H e for the group's columns, [..., width, rows].
        products: H times the steps within the group, [..., width, rows].
    """
    slope = (steps * sums).sum(-2, keepdim=True)
    curvature = (steps * products).sum(-2, keepdim=True)
    old = scale.to(steps.dtype)
    candidate = (old + slope / curvature).to(scale.dtype)
    change = candidate.to(steps.dtype) - old
    # Steps that are all zero give NaN, and a scale beyond its dtype an infinite loss: neither is better.
    better = (candidate > 0) & (change * (2 * slope - change * curvature) > 0)
    return torch.where(better, candidate, scale), torch.where(better, change, torch.zeros_like(change))
