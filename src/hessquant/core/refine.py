"""After the sweep: descent on the objective itself, over the codes and over the scales, which never raises it.

The sweep fixes each column once, knowing nothing of the roundings to come. Afterwards all errors are known, so the
best code of one column with all others fixed is a rounding again (coordinate descent; QuantEase, arXiv 2309.01885,
eq. 9), and the best scale of one group with all codes fixed is a division. Both visit a block of columns at a time: one
matrix product for the errors elsewhere, and the sweep's own kernel, or 64-wide products, for those within.
"""

import torch
from torch import Tensor

from hessquant.core.grid import Grid, QuantizedWeight, SweepKernel


def descend_codes(
    weight: Tensor, quantized: QuantizedWeight, hessian: Tensor, *, block_size: int, kernel: SweepKernel
) -> QuantizedWeight:
    """One round of coordinate descent over the columns, in their own order, on the grid as it is.

    Column j's target is w_j + (1 / H_jj) sum_{k != j} H_jk e_k, with e_k = w_k - q_k as of now.

    Args:
        weight: [rows, columns].
        quantized: Its codes and grid.
        hessian: [columns, columns], symmetric with a positive diagonal, same dtype.
        block_size: Columns per block; does not change the result but for rounding.
        kernel: The loop within a block.

    Returns:
        New codes on the same grid; tr(E H E^T) is not larger, but for rounding.
    """
    grid = quantized.grid
    columns = weight.T.contiguous()
    errors = columns - quantized.dequantize(weight.dtype).T
    codes = quantized.codes.T.contiguous()
    scales = grid.scales.T.to(weight.dtype).contiguous()
    zeros = grid.zeros.T.to(weight.dtype).contiguous()
    group = torch.arange(len(columns), device=weight.device) // grid.spec.width(len(columns))
    for start in range(0, len(columns), block_size):
        block = slice(start, min(start + block_size, len(columns)))
        within = hessian[block, block].contiguous()
        # The kernel adds the new errors of the block's earlier columns itself.
        carried = hessian[block] @ errors - within.tril() @ errors[block]
        codes[block], errors[block] = kernel(
            columns[block], within, carried, scales, zeros, group[block], grid.spec.top
        )
    return QuantizedWeight(codes.T.contiguous(), grid)


def descend_scales(weight: Tensor, quantized: QuantizedWeight, hessian: Tensor) -> QuantizedWeight:
    """One round of Gauss-Seidel over the groups' scales, with the codes as they are.

    With z the codes less their zeros, group g's best scale is s + (z_g^T H_g. e) / (z_g^T H_gg z_g). A new scale is
    taken, row by row, if after rounding to its dtype it is positive and lowers the objective.

    Args:
        weight: [rows, columns].
        quantized: Its codes and grid.
        hessian: [columns, columns], symmetric, same dtype.

    Returns:
        The same codes with new scales; tr(E H E^T) is not larger, but for rounding.
    """
    spec, width = quantized.grid.spec, quantized.grid.spec.width(weight.shape[1])
    errors = (weight - quantized.dequantize(weight.dtype)).T.contiguous()
    scales, zeros = quantized.grid.scales.T.clone(), quantized.grid.zeros.T
    for index in range(len(scales)):
        members = slice(index * width, (index + 1) * width)
        steps = quantized.codes[:, members].T.to(weight.dtype) - zeros[index].to(weight.dtype)
        slope = (steps * (hessian[members] @ errors)).sum(0)
        curvature = (steps * (hessian[members, members] @ steps)).sum(0)
        old = scales[index].to(weight.dtype)
        candidate = (old + slope / curvature).to(spec.scale_dtype)
        change = candidate.to(weight.dtype) - old
        better = (candidate > 0) & torch.isfinite(candidate) & (change * (2 * slope - change * curvature) > 0)
        change = torch.where(better, change, torch.zeros_like(change))
        scales[index] = torch.where(better, candidate, scales[index])
        errors[members] -= change * steps
    return QuantizedWeight(quantized.codes, Grid(spec, scales.T.contiguous(), quantized.grid.zeros))
