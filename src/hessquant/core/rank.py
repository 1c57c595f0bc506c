"""How many inputs of a Hessian say something of their own."""

from torch import Tensor

from hessquant.core.factor import Factor

_NOTICEABLE = 0.01
"""Of the mean variance of an input: below that, what an input says of its own counts as nothing."""


def effective_rank(factor: Factor, hessian: Tensor) -> int:
    """Inputs whose variance is not explained by those visited after them.

    M_jj^2 is the variance of input j that those after it leave unexplained, and the damping. Where inputs have been few
    different vectors, most of it is damping alone. It costs nothing once the factor is there
    (`docs/decisions/0017-variety.md`).

    Args:
        factor: Of the damped Hessian.
        hessian: [columns, columns], undamped.

    Returns:
        0 to columns. A dead column does not count.

    >>> import torch
    >>> from hessquant.core.factor import factorize
    >>> inputs = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, -7.0]])
    >>> alike = inputs.T @ inputs
    >>> effective_rank(factorize(alike, damping=1e-3, order="natural", group_width=3), alike)
    2
    """
    live = ~factor.dead
    if not bool(live.any()):
        return 0
    mean = float(hessian.diagonal()[live].double().mean())
    own = factor.lower.diagonal() ** 2 - mean * factor.damping_used
    return int((own[live[factor.order]] > _NOTICEABLE * mean).sum())
