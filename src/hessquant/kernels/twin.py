"""The inner loops in plain torch: the reference that every other kernel must match code for code.

Each multiplication and addition is a separate rounding, in the order that the loops of the fused kernels use, so that
codes agree exactly, not just nearly.
"""

import torch
from torch import Tensor

from hessquant.core.grid import affine, candidates
from hessquant.records import GridSpec


def sweep_block(
    weight: Tensor, lower: Tensor, carried: Tensor, scales: Tensor, zeros: Tensor, group: Tensor, top: int
) -> tuple[Tensor, Tensor]:
    """Round the columns of one block in turn, each error entering the columns after it.

    Args:
        weight: Columns in visiting order, [width, rows].
        lower: Diagonal block of M, [width, width].
        carried: sum_k M_jk e_k over the columns before the block, [width, rows].
        scales: [groups, rows].
        zeros: [groups, rows], same dtype as the scales.
        group: int64 [width], each column's group.
        top: Largest code.

    Returns:
        Codes, uint8, and errors w - q, both [width, rows].

    All but `top` may have one more dimension in front: as many weights of one shape.
    """
    total = carried.clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    errors = torch.empty_like(weight, memory_format=torch.contiguous_format)
    columns = group.unsqueeze(-1)
    scales, zeros = scales.take_along_dim(columns, -2), zeros.take_along_dim(columns, -2)
    inverses = 1 / lower.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    for j in range(weight.shape[-2]):
        scale, zero = scales[..., j, :], zeros[..., j, :]
        target = weight[..., j, :] + total[..., j, :] * inverses[..., j, :]
        code = (torch.round(target / scale) + zero).clamp(0, top)
        codes[..., j, :] = code
        errors[..., j, :] = weight[..., j, :] - scale * (code - zero)
        total[..., j + 1 :, :] += lower[..., j + 1 :, j, None] * errors[..., j, None, :]
    return codes, errors


def search_scales(
    weight: Tensor, column_weights: Tensor, spec: GridSpec, factors: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Per group, the multiple of the min-max scale with the least sum_j c_j (w_j - round(w_j))^2; the first on a tie.

    Args:
        weight: [columns, rows].
        column_weights: c_j, [columns], non-negative.
        spec: The grid; every candidate scale is rounded to its dtype before it is tried.
        factors: Multiples of the min-max range to try.

    Returns:
        Scales (dtype `scale_dtype(spec)`) and zeros (uint8), both [groups, rows].

    Raises:
        GridError: If a scale overflows its dtype.

    Weights and column weights may have one more dimension in front: as many weights of one shape.
    """
    width, rows = spec.width(weight.shape[-2]), weight.shape[-1]
    members = weight.reshape(-1, width, rows)
    importance = column_weights.reshape(-1, width, 1)
    low, high = members.amin(1), members.amax(1)
    best_loss = torch.full_like(low, torch.inf)
    best_scales, best_zeros = affine(low, high, spec)
    for scales, zeros in candidates(low, high, spec, factors):
        scale, zero = scales.to(weight.dtype).unsqueeze(1), zeros.to(weight.dtype).unsqueeze(1)
        code = (torch.round(members / scale) + zero).clamp(0, spec.top)
        error = members - scale * (code - zero)
        loss = torch.zeros_like(low)
        for term in (importance * (error * error)).unbind(1):
            loss += term
        better = loss < best_loss
        best_loss = torch.where(better, loss, best_loss)
        best_scales = torch.where(better, scales, best_scales)
        best_zeros = torch.where(better, zeros, best_zeros)
    shape = *weight.shape[:-2], -1, rows
    return best_scales.view(shape), best_zeros.view(shape)
