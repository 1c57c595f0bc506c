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
from hessquant.errors import FactorizationError, NonFiniteError
from hessquant.memory import let_go
from hessquant.place import HOST

LARGEST_DAMPING = 1.0
"""Damping is never raised above this fraction of the mean diagonal."""

_FIRST_RETRY = 1e-6

_NOTICEABLE = 0.01
"""Of the mean variance of an input: below that, what an input says of its own counts as nothing."""

_CHUNK = 1 << 20
"""Elements that are gathered or turned around at once: all that a factorisation holds besides its one matrix."""


@dataclass(frozen=True)
class Factor:
    """H + lambda I = M^T M, columns in visiting order.

    Attributes:
        lower: M, [columns, columns], float64 or float32, lower triangular, positive diagonal. 8 columns^2 bytes in
            either dtype.
        diagonal: M's diagonal in float64, whatever `lower` is in.
        order: int64 [columns]: `order[k]` is the column visited k-th.
        damping_used: Damping that the factorisation succeeded with, as a fraction of the mean live diagonal.
        attempts: Factorisations that took; 1 when the damping asked for was enough.
        dead: bool [columns], in the columns' own order: never excited by the calibration data.
    """

    lower: Tensor
    diagonal: Tensor
    order: Tensor
    damping_used: float
    attempts: int
    dead: Tensor

    @cached_property
    def live(self) -> Tensor:
        """int64: the columns that are not dead, in their own order."""
        return (~self.dead).nonzero().flatten()

    @cached_property
    def importance(self) -> Tensor:
        """M_jj^2 of each column in the columns' own order, [columns], float64; a dead column's is the live mean."""
        squares = torch.empty_like(self.diagonal)
        squares[self.order] = self.diagonal**2
        return torch.where(self.dead, squares[self.live].mean(), squares) if len(self.live) else squares

    def added_to(self, diagonal: Tensor) -> Tensor:
        """What damping and the substitute for dead columns add to the Hessian's diagonal, [columns], in its dtype."""
        return _live_mean(diagonal, self.live) * (self.damping_used + self.dead.to(diagonal.dtype))


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


def factorize(
    hessian: Tensor, *, damping: float, order: Order, group_width: int, dtype: torch.dtype = torch.float64
) -> Factor:
    """Damp the Hessian and factor it in float64, in the place of one copy of it: 8 columns^2 bytes.

    Dead columns (H_jj = 0) get the mean of the live diagonal: their weights are rounded to nearest, since nothing
    couples to them, and count like average ones when scales are searched. When the factorisation fails, or its
    smallest pivot is rounding noise, damping is raised tenfold up to `LARGEST_DAMPING`.

    Args:
        hessian: [columns, columns], symmetric, floating.
        damping: Fraction of the mean live diagonal to add to the diagonal.
        order: Order in which columns are visited.
        group_width: Columns per group, for the order "group".
        dtype: What M is given in: float64, or float32 for weights that are swept in it, in the same place.

    Raises:
        NonFiniteError: If H holds NaN or Inf: inputs were not finite, and damping cannot help.
        FactorizationError: If the largest damping is not enough: H is not a Gram matrix.

    >>> h = torch.tensor([[4.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    >>> m = factorize(h, damping=0.0, order="natural", group_width=2).lower
    >>> torch.allclose(m.T @ m, h), round(float(m[1, 0] / m[1, 1]), 4)
    (True, 0.6667)
    """
    # Whatever is not finite shows in the extremes; both are read at once.
    if not all(map(math.isfinite, torch.stack(hessian.aminmax()).tolist())):
        channel = int((~torch.isfinite(hessian)).nonzero()[0][0])
        raise NonFiniteError(f"the Hessian is not finite at channel {channel}: an input was NaN or Inf")
    diagonal = hessian.diagonal().double()
    dead = diagonal == 0
    live_mean = _live_mean(diagonal, (~dead).nonzero().flatten())
    visit = column_order(diagonal, order, group_width)
    backwards = visit.flip(0)
    undamped = (diagonal + dead.double() * live_mean)[backwards]
    wanted, attempts = damping, 0
    while True:
        attempts += 1
        lower = _cholesky(_gathered(hessian, backwards), undamped + wanted * live_mean)
        if lower is not None:
            pivots = lower.diagonal().clone()
            return Factor(_narrowed(lower, dtype), pivots, visit, wanted, attempts, dead)
        if wanted >= LARGEST_DAMPING:
            raise FactorizationError(
                f"the Hessian of {len(hessian)} inputs cannot be factored even with damping {wanted:g}: it is not a "
                "sum of squares; check how its statistics were made"
            )
        wanted = min(max(10 * wanted, _FIRST_RETRY), LARGEST_DAMPING)


def _live_mean(diagonal: Tensor, live: Tensor) -> float:
    """Mean of the diagonal's live elements; 1 if there are none."""
    return float(diagonal[live].mean()) if len(live) else 1.0


def _gathered(hessian: Tensor, visit: Tensor) -> Tensor:
    """The Hessian's rows and columns in another order, float64; made in chunks of rows, so that it is all there is."""
    gathered = torch.empty(hessian.shape, dtype=torch.float64, device=hessian.device)
    height = max(1, _CHUNK // len(visit))
    for start in range(0, len(visit), height):
        rows = slice(start, start + height)
        gathered[rows] = hessian.index_select(0, visit[rows]).index_select(1, visit)
    return gathered


def _cholesky(reversed_hessian: Tensor, diagonal: Tensor) -> Tensor | None:
    """M, in the place of the Hessian with rows and columns reversed; None if that fails or rests on rounding noise.

    Args:
        reversed_hessian: [columns, columns], symmetric, float64; overwritten.
        diagonal: What its diagonal is to be: the damped one.
    """
    reversed_hessian.diagonal().copy_(diagonal)
    # LAPACK counts along columns: the transposed view of a symmetric matrix is the matrix as it wants it, and its own
    # output. With U^T U the reversed matrix, M is U with rows and columns reversed: all of its memory backwards.
    upper = reversed_hessian.T
    info = torch.empty((), dtype=torch.int32, device=upper.device)
    torch.linalg.cholesky_ex(upper, upper=True, out=(upper, info))
    noise = torch.finfo(upper.dtype).eps * len(upper) * diagonal.max()
    if bool((info != 0) | ((upper.diagonal() ** 2).min() <= noise)):
        return None
    _turn_around(reversed_hessian.view(-1))
    return upper


def _turn_around(values: Tensor) -> None:
    """Reverse a vector in its place."""
    for start in range(0, len(values) // 2, _CHUNK):
        stop = min(start + _CHUNK, len(values) // 2)
        first, last = values[start:stop], values[len(values) - stop : len(values) - start]
        kept = first.flip(0)
        first.copy_(last.flip(0))
        last.copy_(kept)


def _narrowed(lower: Tensor, dtype: torch.dtype) -> Tensor:
    """M in another dtype, in the place of M itself: in the front half of its memory, where that is float32.

    On the host, the pages of the other half are the system's again.

    Args:
        lower: [columns, columns], float64, all of its memory and column by column; not to be used any more.
        dtype: float64 or float32.
    """
    if dtype == lower.dtype:
        return lower
    values = lower.T.view(-1)
    narrow = values.view(dtype)
    for start in range(0, len(values), _CHUNK):
        chunk = values[start : start + _CHUNK].to(dtype)
        narrow[start : start + len(chunk)] = chunk
    if values.device == HOST.device:
        let_go(narrow.data_ptr() + len(values) * narrow.itemsize, len(values) * (values.itemsize - narrow.itemsize))
    return narrow[: len(values)].view(lower.shape).T


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

    >>> inputs = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, -7.0]])
    >>> alike = inputs.T @ inputs
    >>> effective_rank(factorize(alike, damping=1e-3, order="natural", group_width=3), alike)
    2
    """
    mean = _live_mean(hessian.diagonal().double(), factor.live)
    own = factor.importance[factor.live] - mean * factor.damping_used
    return int((own > _NOTICEABLE * mean).sum())
