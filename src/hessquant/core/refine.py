"""After the sweep: descent on the objective itself, over the scales and the codes, which never raises it.

The sweep fixes each column once, knowing nothing of the roundings to come. Afterwards all errors are known, so the best
scale of one group with all else fixed is a quotient (Gauss-Seidel), and the best code of one column is a rounding again
(coordinate descent; QuantEase, arXiv 2309.01885, eq. 9). Groups are visited in turn, first the scale and then the
columns' codes, by the sweep's own kernel with H in the place of M. A block of groups shares one matrix product.
"""

import torch
from torch import Tensor

from hessquant.core.grid import Grid, QuantizedWeight, SweepKernel


def descend(
    weight: Tensor, quantized: QuantizedWeight, hessian: Tensor, *, block_size: int, kernel: SweepKernel
) -> QuantizedWeight:
    """One round over all groups.

    With e = w - q as of now and z a group's codes less their zeros, the group's scale becomes
    s + (z^T H_g. e) / (z^T H_gg z), row by row, if after rounding to its dtype that is positive and lowers the
    objective; then column j's target is w_j + (1 / H_jj) sum_{k != j} H_jk e_k.

    Args:
        weight: [rows, columns].
        quantized: Its codes and grid.
        hessian: [columns, columns], symmetric with a positive diagonal, same dtype.
        block_size: Columns per matrix product; does not change the result but for rounding.
        kernel: The loop over columns.

    Returns:
        New codes and scales; tr(E H E^T) is not larger, but for rounding.
    """
    grid, width = quantized.grid, quantized.grid.spec.width(weight.shape[1])
    columns = weight.T.contiguous()
    errors = columns - quantized.dequantize(weight.dtype).T
    # Clones: one row's or one group's transpose is contiguous as it is.
    codes = quantized.codes.T.clone(memory_format=torch.contiguous_format)
    scales = grid.scales.T.clone(memory_format=torch.contiguous_format)
    zeros = grid.zeros.T.to(weight.dtype).contiguous()
    step = width * max(1, block_size // width)
    for start in range(0, len(columns), step):
        # H e for the block's columns; kept up to date as they change.
        block = slice(start, min(start + step, len(columns)))
        sums = hessian[block] @ errors
        for first in range(start, block.stop, width):
            group = slice(first, first + width)
            index, here = first // width, slice(first - start, first - start + width)
            steps = codes[group].to(weight.dtype) - zeros[index]
            scales[index], change = _best_scale(scales[index], steps, sums[here], hessian[group, group])
            moved = -change * steps
            errors[group] += moved
            sums += hessian[block, group] @ moved
            for begin in range(first, group.stop, block_size):
                piece = slice(begin, min(begin + block_size, group.stop))
                within, old = hessian[piece, piece].contiguous(), errors[piece].clone()
                # The kernel adds the new errors of the piece's earlier columns itself.
                carried = sums[begin - start : piece.stop - start] - within.tril() @ old
                codes[piece], errors[piece] = kernel(
                    columns[piece],
                    within,
                    carried,
                    scales[index : index + 1].to(weight.dtype),
                    zeros[index : index + 1],
                    torch.zeros(len(within), dtype=torch.int64, device=weight.device),
                    grid.spec.top,
                )
                rest = slice(piece.stop, block.stop)
                sums[piece.stop - start :] += hessian[rest, piece] @ (errors[piece] - old)
    return QuantizedWeight(codes.T.contiguous(), Grid(grid.spec, scales.T.contiguous(), grid.zeros))


def _best_scale(scale: Tensor, steps: Tensor, sums: Tensor, hessian: Tensor) -> tuple[Tensor, Tensor]:
    """One group's new scales, and by how much they changed in the steps' dtype, both [rows].

    Args:
        scale: The present ones, in the stored dtype.
        steps: Codes less their zeros, [width, rows].
        sums: H e for the group's columns, [width, rows].
        hessian: The group's own part, [width, width].
    """
    slope = (steps * sums).sum(0)
    curvature = (steps * (hessian @ steps)).sum(0)
    old = scale.to(steps.dtype)
    candidate = (old + slope / curvature).to(scale.dtype)
    change = candidate.to(steps.dtype) - old
    # Steps that are all zero give NaN, and a scale beyond its dtype an infinite loss: neither is better.
    better = (candidate > 0) & (change * (2 * slope - change * curvature) > 0)
    return torch.where(better, candidate, scale), torch.where(better, change, torch.zeros_like(change))
