"""The objective: how far a layer's outputs move when its weights are replaced.

||W X - Q X||^2 = tr((W - Q) H (W - Q)^T) with H = sum_n x_n x_n^T. Rows decouple (GPTQ, arXiv 2210.17323, eq. 1-2).
"""

from torch import Tensor

from hessquant.core.hessian import lower_tiles


def loss_per_row(error: Tensor, hessian: Tensor) -> Tensor:
    """e_r H e_r^T for every row.

    Args:
        error: W - Q, [rows, columns], floating.
        hessian: [columns, columns], same dtype, symmetric.

    Returns:
        [rows], same dtype, non-negative up to rounding.

    >>> import torch
    >>> h = torch.tensor([[4.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    >>> round(loss_per_row(torch.tensor([[0.12, -0.2]], dtype=torch.float64), h).item(), 6)
    0.0816
    """
    total = error.new_zeros(len(error))
    for rows, columns in lower_tiles(0, len(hessian)):
        part = ((error[:, rows] @ hessian[rows, columns]) * error[:, columns]).sum(1)
        total += part if rows == columns else 2 * part
    return total


def loss(error: Tensor, hessian: Tensor) -> float:
    """tr(E H E^T): the sum of `loss_per_row`.

    >>> import torch
    >>> loss(torch.eye(2), 3 * torch.eye(2))
    6.0
    """
    return float(loss_per_row(error, hessian).double().sum())
