"""The objective, how far a layer's outputs move when its weights are replaced, and what theory expects of it.

||W X - Q X||^2 = tr((W - Q) H (W - Q)^T) with H = sum_n x_n x_n^T. Rows decouple (GPTQ, arXiv 2210.17323, eq. 1-2).

What theory expects comes from the factor's diagonal and the scales alone. Rounding errors are modelled as uniform on
half a step to either side: variance s^2 / 12. It tells whether a better algorithm could still help, or only more bits
can. The expectations are totals of tr(E H E^T) with the damped H over live columns, clamping ignored.
"""

import torch
from torch import Tensor

from hessquant.core.factor import Factor
from hessquant.core.gram import lower_tiles
from hessquant.core.grid import Grid
from hessquant.core.working import InPieces

_CHUNK = 1 << 20
"""Weights whose scales are looked at one by one at a time."""


def loss_per_row(error: Tensor, hessian: InPieces) -> Tensor:
    """e_r H e_r^T for every row.

    Args:
        error: W - Q, [..., rows, columns], floating.
        hessian: [..., columns, columns], same dtype, symmetric.

    Returns:
        [..., rows], same dtype, non-negative up to rounding.

    >>> h = torch.tensor([[4.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    >>> round(loss_per_row(torch.tensor([[0.12, -0.2]], dtype=torch.float64), h).item(), 6)
    0.0816
    """
    total = error.new_zeros(error.shape[:-1])
    for rows, columns in lower_tiles(0, error.shape[-1]):
        part = ((error[..., rows] @ hessian[rows, columns]) * error[..., columns]).sum(-1)
        total += part if rows == columns else 2 * part
    return total


def loss(error: Tensor, hessian: Tensor) -> float:
    """tr(E H E^T): the sum of `loss_per_row`.

    >>> loss(torch.eye(2), 3 * torch.eye(2))
    6.0
    """
    return float(loss_per_row(error, hessian).double().sum())


def expected_sweep_loss(grid: Grid, factor: Factor) -> Tensor:
    """Expected loss of the sweep: sum_j s_j^2 / 12 * M_jj^2 (Babai's nearest plane, arXiv 2507.18553).

    A number, float64; of a batch one per member.
    """
    per_group = (grid.scales.double() ** 2).sum(-2) / 12
    per_column = per_group.repeat_interleave(grid.spec.width(len(factor.dead)), -1)
    return (per_column * factor.importance).index_select(-1, factor.live).sum(-1)


def order_free_floor(grid: Grid, factor: Factor) -> Tensor:
    """What the sweep's expected loss cannot be below in any column order; as `expected_sweep_loss`.

    The product of the s_j^2 M_jj^2 is a determinant and does not depend on the order; their sum is least when all are
    equal (arithmetic and geometric mean): columns * (prod_j s_j^2 M_jj^2)^(1/columns) / 12, summed over rows.
    """
    live, columns = factor.live, len(factor.dead)
    scales = grid.scales
    if not len(live):
        return factor.importance.new_zeros(scales.shape[:-2])
    log_importance = factor.importance.index_select(-1, live).log().mean(-1, keepdim=True)
    # In chunks of rows: a float64 per weight would be more than all else that a solve takes.
    height = max(1, _CHUNK // columns)
    width = grid.spec.width(columns)
    means = [
        rows.double().repeat_interleave(width, 1)[:, live].log().mean(1)
        for rows in torch.split(scales.reshape(-1, scales.shape[-1]), height)
    ]
    per_row = torch.cat(means).view(scales.shape[:-1])
    return len(live) * torch.exp(2 * per_row + log_importance).sum(-1) / 12
