"""The order in which columns are rounded."""

import torch
from torch import Tensor

from hessquant.config import Order


def column_order(diagonal: Tensor, order: Order, group_width: int) -> Tensor:
    """Columns in the order the sweep visits them.

    "activation": descending H_jj, groups staying contiguous channels with scales fixed before the sweep. "group": whole
    groups by descending mean H_jj, and within a group by descending H_jj. "natural": 0, 1, 2, ...

    Args:
        diagonal: H_jj, [columns].
        order: Which order.
        group_width: Columns per group; divides the columns.

    Returns:
        int64 [columns], a permutation; ties keep their natural order.

    >>> column_order(torch.tensor([1.0, 3.0, 2.0, 9.0]), "activation", 2).tolist()
    [3, 1, 2, 0]
    >>> column_order(torch.tensor([1.0, 3.0, 2.0, 9.0]), "group", 2).tolist()
    [3, 2, 1, 0]
    """
    if order == "natural":
        return torch.arange(len(diagonal), device=diagonal.device)
    if order == "activation":
        return torch.argsort(diagonal, descending=True, stable=True)
    groups = diagonal.view(-1, group_width)
    by_mean = torch.argsort(groups.mean(1), descending=True, stable=True)
    within = torch.argsort(groups, dim=1, descending=True, stable=True)
    return (by_mean.unsqueeze(1) * group_width + within[by_mean]).flatten()
