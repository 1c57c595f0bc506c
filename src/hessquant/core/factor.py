"""One factorisation of the damped Hessian, in the order the sweep needs it: H = M^T M with M lower triangular.

M = flip(cholesky(flip(H)))^T. The ratios M_jk / M_jj are GPTQ's compensation coefficients, so H is never inverted
(Babai's nearest plane on the lattice of H: arXiv 2507.18553).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hessquant.config import Order
from hessquant.core.order import column_order
from hessquant.errors import FactorizationError, NonFiniteError

LARGEST_DAMPING = 1.0
"""Damping is never raised above this fraction of the mean diagonal."""

_FIRST_RETRY = 1e-6


@dataclass(frozen=True)
class Factor:
    """H + lambda I = M^T M, columns in visiting order.

    Attributes:
        lower: M, [columns, columns], float64, lower triangular, positive diagonal.
        order: int64 [columns]: `order[k]` is the column visited k-th.
        damping_used: Damping that the factorisation succeeded with, as a fraction of the mean live diagonal.
        attempts: Factorisations that took; 1 when the damping asked for was enough.
        dead: bool [columns], in the columns' own order: never excited by the calibration data.
    """

    lower: Tensor
    order: Tensor
    damping_used: float
    attempts: int
    dead: Tensor

    def lower_as(self, dtype: torch.dtype) -> Tensor:
        """`lower` in float64 or float32; the conversion is made once for all weights with these inputs."""
        return self.lower if dtype == torch.float64 else self._single

    @cached_property
    def _single(self) -> Tensor:
        return self.lower.float()

    def damp(self, hessian: Tensor) -> Tensor:
        """The Hessian with what this factor was damped with, and with dead columns as it took them."""
        diagonal = hessian.diagonal()
        live_mean = diagonal[~self.dead].mean() if not bool(self.dead.all()) else diagonal.new_ones(())
        damped = hessian.clone()
        damped.diagonal().add_(live_mean * (self.damping_used + self.dead))
        return damped

    @property
    def importance(self) -> Tensor:
        """M_jj^2 of each column in the columns' own order, [columns], float64; a dead column's is the live mean."""
        squares = torch.empty_like(self.lower.diagonal())
        squares[self.order] = self.lower.diagonal() ** 2
        if bool(self.dead.any()) and not bool(self.dead.all()):
            squares[self.dead] = squares[~self.dead].mean()
        return squares


def factorize(hessian: Tensor, *, damping: float, order: Order, group_width: int) -> Factor:
    """Damp the Hessian and factor it in float64.

    Dead columns (H_jj = 0) get the mean of the live diagonal: their weights are rounded to nearest, since nothing
    couples to them, and count like average ones when scales are searched. When the factorisation fails, or its
    smallest pivot is rounding noise, damping is raised tenfold up to `LARGEST_DAMPING`.

    Args:
        hessian: [columns, columns], symmetric, floating.
        damping: Fraction of the mean live diagonal to add to the diagonal.
        order: Order in which columns are visited.
        group_width: Columns per group, for the order "group".

    Raises:
        NonFiniteError: If H holds NaN or Inf: inputs were not finite, and damping cannot help.
        FactorizationError: If the largest damping is not enough: H is not a Gram matrix.

    >>> h = torch.tensor([[4.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    >>> m = factorize(h, damping=0.0, order="natural", group_width=2).lower
    >>> torch.allclose(m.T @ m, h), round(float(m[1, 0] / m[1, 1]), 4)
    (True, 0.6667)
    """
    if not all(math.isfinite(float(extreme)) for extreme in hessian.aminmax()):
        channel = int((~torch.isfinite(hessian)).nonzero()[0][0])
        raise NonFiniteError(f"the Hessian is not finite at channel {channel}: an input was NaN or Inf")
    diagonal = hessian.diagonal().double()
    dead = diagonal == 0
    live_mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    visit = column_order(diagonal, order, group_width)
    # Gathered in its own dtype, from the last column visited to the first: at 4096 columns each float64 copy costs as
    # much as a tenth of the factorisation.
    backwards = visit.flip(0)
    reversed_hessian = hessian.index_select(0, backwards).index_select(1, backwards).double()
    undamped = (diagonal + dead.double() * live_mean)[backwards]
    wanted, attempts = damping, 0
    while True:
        attempts += 1
        reversed_hessian.diagonal().copy_(undamped + wanted * live_mean)
        lower = _cholesky(reversed_hessian)
        if lower is not None:
            return Factor(lower, visit, wanted, attempts, dead)
        if wanted >= LARGEST_DAMPING:
            raise FactorizationError(
                f"the Hessian of {len(hessian)} inputs cannot be factored even with damping {wanted:g}: it is not a "
                "sum of squares; check how its statistics were made"
            )
        wanted = min(max(10 * wanted, _FIRST_RETRY), LARGEST_DAMPING)


def _cholesky(reversed_hessian: Tensor) -> Tensor | None:
    """M, given the damped H with rows and columns reversed; None if that fails or rests on rounding noise."""
    upper, info = torch.linalg.cholesky_ex(reversed_hessian, upper=True)
    if int(info) != 0:
        return None
    noise = torch.finfo(upper.dtype).eps * len(upper) * reversed_hessian.diagonal().max()
    if bool((upper.diagonal() ** 2).min() <= noise):
        return None
    lower: Tensor = upper.flip(0, 1)
    return lower
