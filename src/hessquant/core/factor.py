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

_CHUNK, BATCH_CHUNK = 1 << 20, 1 << 24
"""Elements that are gathered or turned around at once: all that a factorisation holds besides its one matrix, or the
matrices of a batch. Each chunk of a batch is a few calls, which are what takes time where there are batches."""


@dataclass(frozen=True)
class Factor:
    """H + lambda I = M^T M, columns in visiting order; of a batch (`core.batch`), one M and one order per member.

    Attributes:
        lower: M, [..., columns, columns], float64 or float32, lower triangular, positive diagonal. 8 columns^2 bytes
            in either dtype.
        diagonal: M's diagonal in float64, whatever `lower` is in, [..., columns].
        order: int64 [..., columns]: `order[k]` is the column visited k-th.
        damping_used: Damping that the factorisation succeeded with, as a fraction of the mean live diagonal.
        attempts: Factorisations that took; 1 when the damping asked for was enough.
        dead: bool [columns], in the columns' own order: never excited by the calibration data. All of a batch agree.
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
        """M_jj^2 of each column in the columns' own order, [..., columns], float64; a dead one's is the live mean."""
        squares = torch.empty_like(self.diagonal).scatter_(-1, self.order, self.diagonal**2)
        return torch.where(self.dead, _live_mean(squares, self.live), squares) if len(self.live) else squares

    def added_to(self, diagonal: Tensor) -> Tensor:
        """What damping and the substitute for dead columns add to a diagonal [..., columns], in its dtype."""
        return _live_mean(diagonal, self.live) * (self.damping_used + self.dead.to(diagonal.dtype))


def column_order(diagonal: Tensor, order: Order, group_width: int) -> Tensor:
    """Columns in the order the sweep visits them.

    "activation": descending H_jj, groups staying contiguous channels with scales fixed before the sweep. "group": whole
    groups by descending mean H_jj, and within a group by descending H_jj. "natural": 0, 1, 2, ...

    Args:
        diagonal: H_jj, [..., columns].
        order: Which order.
        group_width: Columns per group; divides the columns.

    Returns:
        int64 [..., columns], permutations; ties keep their natural order.

    >>> column_order(torch.tensor([1.0, 3.0, 2.0, 9.0]), "activation", 2).tolist()
    [3, 1, 2, 0]
    >>> column_order(torch.tensor([1.0, 3.0, 2.0, 9.0]), "group", 2).tolist()
    [3, 2, 1, 0]
    """
    if order == "natural":
        return torch.arange(diagonal.shape[-1], device=diagonal.device).expand(diagonal.shape)
    if order == "activation":
        return torch.argsort(diagonal, descending=True, stable=True)
    groups = diagonal.reshape(*diagonal.shape[:-1], -1, group_width)
    by_mean = torch.argsort(groups.mean(-1), descending=True, stable=True).unsqueeze(-1)
    within = torch.argsort(groups, descending=True, stable=True)
    return (by_mean * group_width + within.take_along_dim(by_mean, -2)).flatten(-2)


def factorize(
    hessian: Tensor, *, damping: float, order: Order, group_width: int, dtype: torch.dtype = torch.float64
) -> Factor:
    """Damp the Hessian and factor it in float64, in the place of one copy of it: 8 columns^2 bytes.

    Dead columns (H_jj = 0) get the mean of the live diagonal: their weights are rounded to nearest, since nothing
    couples to them, and count like average ones when scales are searched. When the factorisation fails, or its
    smallest pivot is rounding noise, damping is raised tenfold up to `LARGEST_DAMPING`. Not so for a batch: its members
    have one damping, and those that need more are to be factored one by one.

    Args:
        hessian: [columns, columns], symmetric, floating; or a batch of such (`core.batch`).
        damping: Fraction of the mean live diagonal to add to the diagonal.
        order: Order in which columns are visited.
        group_width: Columns per group, for the order "group".
        dtype: What M is given in: float64, or float32 for weights that are swept in it, in the same place.

    Raises:
        NonFiniteError: If H holds NaN or Inf: inputs were not finite, and damping cannot help.
        FactorizationError: If the largest damping is not enough: H is not a Gram matrix. Of a batch, if the damping
            asked for is not enough for some members, which it has.

    >>> h = torch.tensor([[4.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    >>> m = factorize(h, damping=0.0, order="natural", group_width=2).lower
    >>> torch.allclose(m.T @ m, h), round(float(m[1, 0] / m[1, 1]), 4)
    (True, 0.6667)
    """
    # Whatever is not finite shows in the extremes; both are read at once.
    if not all(map(math.isfinite, torch.stack(hessian.aminmax()).tolist())):
        channel = int((~torch.isfinite(hessian)).nonzero()[0][-2])
        raise NonFiniteError(f"the Hessian is not finite at channel {channel}: an input was NaN or Inf")
    diagonal = hessian.diagonal(dim1=-2, dim2=-1).double()
    dead = diagonal.view(-1, diagonal.shape[-1])[0] == 0
    live_mean = _live_mean(diagonal, (~dead).nonzero().flatten())
    visit = column_order(diagonal, order, group_width)
    backwards = visit.flip(-1)
    undamped = (diagonal + dead.double() * live_mean).gather(-1, backwards)
    wanted, attempts = damping, 0
    while True:
        attempts += 1
        matrix = _gathered(hessian, backwards)
        failed = _cholesky(matrix, undamped + wanted * live_mean)
        if not failed:
            _turn_around(matrix.flatten(-2), _at_once(matrix))
            pivots = matrix.diagonal(dim1=-2, dim2=-1).clone()
            return Factor(_narrowed(matrix.mT, dtype), pivots, visit, wanted, attempts, dead)
        del matrix
        if hessian.ndim > 2:
            raise FactorizationError(f"damping {wanted:g} is not enough for {len(failed)} of a batch", failed)
        if wanted >= LARGEST_DAMPING:
            raise FactorizationError(
                f"the Hessian of {len(hessian)} inputs cannot be factored even with damping {wanted:g}: it is not a "
                "sum of squares; check how its statistics were made"
            )
        wanted = min(max(10 * wanted, _FIRST_RETRY), LARGEST_DAMPING)


def _live_mean(diagonal: Tensor, live: Tensor) -> Tensor:
    """Mean of the live elements of diagonals [..., columns], [..., 1]; 1 if there are none."""
    if not len(live):
        return diagonal.new_ones(*diagonal.shape[:-1], 1)
    return diagonal.index_select(-1, live).mean(-1, keepdim=True)


def _at_once(matrices: Tensor) -> int:
    """Elements of each matrix that are in a chunk."""
    return _CHUNK if matrices.ndim == 2 else BATCH_CHUNK // len(matrices)


def _gathered(hessian: Tensor, visit: Tensor) -> Tensor:
    """The Hessian's rows and columns in another order, float64; made in chunks of rows, so that it is all there is."""
    gathered = torch.empty(hessian.shape, dtype=torch.float64, device=hessian.device)
    columns = visit.shape[-1]
    height = max(1, _at_once(hessian) // columns)
    for start in range(0, columns, height):
        rows = visit[..., start : start + height]
        if visit.ndim == 1:
            gathered[start : start + height] = hessian.index_select(0, rows).index_select(1, visit)
        else:
            chosen = hessian.take_along_dim(rows.unsqueeze(-1), -2)
            gathered[:, start : start + height] = chosen.take_along_dim(visit.unsqueeze(-2), -1)
    return gathered


def _cholesky(reversed_hessian: Tensor, diagonal: Tensor) -> tuple[int, ...]:
    """Factor the Hessian with rows and columns reversed, in its place: U of U^T U, column by column.

    Args:
        reversed_hessian: [..., columns, columns], symmetric, float64; overwritten.
        diagonal: What its diagonal is to be: the damped one.

    Returns:
        Members for which that fails or rests on rounding noise; a matrix by itself is member 0.
    """
    reversed_hessian.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
    # LAPACK counts along columns: the transposed view of a symmetric matrix is the matrix as it wants it, and its own
    # output. With U^T U the reversed matrix, M is U with rows and columns reversed: all of its memory backwards.
    upper = reversed_hessian.mT
    info = torch.empty(upper.shape[:-2], dtype=torch.int32, device=upper.device)
    torch.linalg.cholesky_ex(upper, upper=True, out=(upper, info))
    noise = torch.finfo(upper.dtype).eps * upper.shape[-1] * diagonal.amax(-1)
    failed = (info != 0) | ((upper.diagonal(dim1=-2, dim2=-1) ** 2).amin(-1) <= noise)
    return tuple(member for member, bad in enumerate(failed.view(-1).tolist()) if bad)


def _turn_around(values: Tensor, at_once: int) -> None:
    """Reverse vectors [..., length] in their place."""
    length = values.shape[-1]
    for start in range(0, length // 2, at_once):
        stop = min(start + at_once, length // 2)
        first, last = values[..., start:stop], values[..., length - stop : length - start]
        kept = first.flip(-1)
        first.copy_(last.flip(-1))
        last.copy_(kept)


def _narrowed(lower: Tensor, dtype: torch.dtype) -> Tensor:
    """M in another dtype, in the place of M itself: in the front half of all its memory, where that is float32.

    On the host, the pages of the other half are the system's again.

    Args:
        lower: [..., columns, columns], float64, all of its memory and column by column; not to be used any more.
        dtype: float64 or float32.
    """
    if dtype == lower.dtype:
        return lower
    values = lower.mT.view(-1)
    narrow = values.view(dtype)
    at_once = _CHUNK if lower.ndim == 2 else BATCH_CHUNK
    for start in range(0, len(values), at_once):
        chunk = values[start : start + at_once].to(dtype)
        narrow[start : start + len(chunk)] = chunk
    if values.device == HOST.device:
        let_go(narrow.data_ptr() + len(values) * narrow.itemsize, len(values) * (values.itemsize - narrow.itemsize))
    return narrow[: len(values)].view(lower.shape).mT


def effective_rank(factor: Factor, hessian: Tensor) -> Tensor:
    """Inputs whose variance is not explained by those visited after them.

    M_jj^2 is the variance of input j that those after it leave unexplained, and the damping. Where inputs have been few
    different vectors, most of it is damping alone. It costs nothing once the factor is there
    (`docs/decisions/0017-variety.md`).

    Args:
        factor: Of the damped Hessian.
        hessian: [..., columns, columns], undamped.

    Returns:
        0 to columns, for each member of a batch. A dead column does not count.

    >>> inputs = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, -7.0]])
    >>> alike = inputs.T @ inputs
    >>> int(effective_rank(factorize(alike, damping=1e-3, order="natural", group_width=3), alike))
    2
    """
    mean = _live_mean(hessian.diagonal(dim1=-2, dim2=-1).double(), factor.live)
    own = factor.importance.index_select(-1, factor.live) - mean * factor.damping_used
    return (own > _NOTICEABLE * mean).sum(-1)
