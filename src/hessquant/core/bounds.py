"""What theory expects of a layer, from the factor's diagonal and the scales alone.

Rounding errors are modelled as uniform on half a step to either side: variance s^2 / 12. They tell whether a better
algorithm could still help, or only more bits can. All are totals of tr(E H E^T) with the damped H over live columns,
clamping ignored.
"""

import torch

from hessquant.core.factor import Factor
from hessquant.core.grid import Grid

_CHUNK = 1 << 20
"""Weights whose scales are looked at one by one at a time."""


def expected_sweep_loss(grid: Grid, factor: Factor) -> float:
    """Expected loss of the sweep: sum_j s_j^2 / 12 * M_jj^2 (Babai's nearest plane, arXiv 2507.18553)."""
    live = ~factor.dead
    per_group = (grid.scales.double() ** 2).sum(0) / 12
    return float((per_group.repeat_interleave(grid.spec.width(len(live))) * factor.importance)[live].sum())


def order_free_floor(grid: Grid, factor: Factor) -> float:
    """What the sweep's expected loss cannot be below in any column order.

    The product of the s_j^2 M_jj^2 is a determinant and does not depend on the order; their sum is least when all are
    equal (arithmetic and geometric mean): columns * (prod_j s_j^2 M_jj^2)^(1/columns) / 12, summed over rows.
    """
    live = ~factor.dead
    if not bool(live.any()):
        return 0.0
    log_importance = factor.importance[live].log().mean()
    # In chunks of rows: a float64 per weight would be more than all else that a solve takes.
    height = max(1, _CHUNK // len(live))
    means = [
        grid.scales[row : row + height].double().repeat_interleave(grid.spec.width(len(live)), 1)[:, live].log().mean(1)
        for row in range(0, len(grid.scales), height)
    ]
    return float(live.sum() * torch.exp(2 * torch.cat(means) + log_importance).sum() / 12)
