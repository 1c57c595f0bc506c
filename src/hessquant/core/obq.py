"""The textbook algorithms, literal and in float64: references for small layers, and the oracles of the tests.

`gptq_reference` is GPTQ (arXiv 2210.17323) with an explicit inverse, Schur complement updates and a loop over columns;
`obq` is Optimal Brain Quantization (arXiv 2208.11580, algorithm 3), one weight at a time, row by row. Both cost a
matrix update per weight or column: use `hessquant.solve` for real layers.
"""

from typing import Literal

import torch
from torch import Tensor

from hessquant.core.grid import Grid, decode, encode
from hessquant.errors import NonFiniteError

SelectionRule = Literal["smallest-error", "natural", "largest-sensitivity"]


def damped(hessian: Tensor, damping: float) -> Tensor:
    """H + damping * mean(diag H) I in float64, dead columns' diagonal set to the mean live one.

    >>> damped(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), 0.5).tolist()
    [[3.0, 0.0], [0.0, 3.0]]
    """
    result = hessian.double().clone()
    diagonal = result.diagonal()
    dead = diagonal == 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    diagonal[dead] = mean
    diagonal += damping * mean
    return result


def gptq_reference(
    weight: Tensor, hessian: Tensor, grid: Grid, *, order: Tensor | None = None, damping: float = 0.01
) -> Tensor:
    """GPTQ, column by column, with an explicit inverse.

    After column q is rounded with error e (value minus grid value), the columns still free move by
    delta = -(e / [H^-1]_qq) [H^-1]_{q,:}, and the inverse loses q by its Schur complement.

    Args:
        weight: [rows, columns], floating.
        hessian: [columns, columns], undamped.
        grid: Fixed scales and zeros.
        order: int64 [columns], the order of the columns; natural when None.
        damping: Fraction of the mean diagonal to add.

    Returns:
        Codes, uint8 [rows, columns].

    Raises:
        NonFiniteError: If the Hessian is not finite.
    """
    work = weight.double()
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    inverse = _inverse(hessian, damping)
    for column in range(weight.shape[1]) if order is None else order:
        q = int(column)
        rounded = encode(work, grid)
        errors = work - decode(rounded, grid, work.dtype)
        codes[:, q] = rounded[:, q]
        work = work - torch.outer(errors[:, q] / inverse[q, q], inverse[q])
        inverse = _without(inverse, q)
    return codes


def obq(
    weight: Tensor,
    hessian: Tensor,
    grid: Grid,
    *,
    rule: SelectionRule = "smallest-error",
    damping: float = 0.01,
    outliers_first: bool = False,
) -> Tensor:
    """OBQ: per row, round the weight that the rule selects, compensate in all that are left, repeat.

    On real layers the greedy "smallest-error" order is usually worse than a fixed one: it leaves the weights that are
    hard to round for the end, when nothing is left to compensate with.

    Args:
        weight: [rows, columns], floating.
        hessian: [columns, columns], undamped.
        grid: Fixed scales and zeros.
        rule: "smallest-error" takes the least e^2 / [H^-1]_qq; "largest-sensitivity" the least [H^-1]_qq, the weight
            whose rounding costs most; "natural" the lowest index.
        damping: Fraction of the mean diagonal to add.
        outliers_first: Round a weight at once when its error exceeds half a step, that is, when it has left the range
            (section 5 of the paper).

    Returns:
        Codes, uint8 [rows, columns].

    Raises:
        NonFiniteError: If the Hessian is not finite.

    >>> from hessquant.core.grid import GridSpec
    >>> spec = GridSpec(bits=3, group_size=-1)
    >>> grid = Grid(spec, torch.tensor([[0.5]]), torch.tensor([[4]], dtype=torch.uint8))
    >>> h = torch.tensor([[4.0, 2.0], [2.0, 3.0]])
    >>> obq(torch.tensor([[0.62, 0.30]]), h, grid, rule="natural", damping=0.0).tolist()
    [[5, 5]]
    """
    full_inverse = _inverse(hessian, damping)
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    widest = 2.0 if grid.spec.is_float else 1.0
    steps = widest * grid.scales.double().repeat_interleave(grid.spec.width(weight.shape[1]), 1)
    for row in range(len(weight)):
        work, inverse, free = weight[row].double(), full_inverse, list(range(weight.shape[1]))
        of_row = Grid(grid.spec, grid.scales[row].unsqueeze(0), grid.zeros[row].unsqueeze(0))
        while free:
            rounded = encode(work.unsqueeze(0), of_row)
            errors = work - decode(rounded, of_row, work.dtype)[0]
            limits = steps[row, free] if outliers_first else None
            q = free.pop(_select(errors[free], inverse.diagonal()[free], rule, limits))
            codes[row, q] = rounded[0, q]
            work = work - errors[q] / inverse[q, q] * inverse[q]
            inverse = _without(inverse, q)
    return codes


def _select(errors: Tensor, variances: Tensor, rule: SelectionRule, steps: Tensor | None) -> int:
    """Position, among the free weights, of the one to round next; `steps` turns the outlier rule on."""
    if steps is not None:
        excess = errors.abs() / steps
        # A hair over one half, so that ties of rounding are not taken for outliers.
        if float(excess.max()) > 0.5 * (1 + 1e-9):
            return int(excess.argmax())
    if rule == "natural":
        return 0
    if rule == "largest-sensitivity":
        return int(variances.argmin())
    return int((errors**2 / variances).argmin())


def _inverse(hessian: Tensor, damping: float) -> Tensor:
    if not bool(torch.isfinite(hessian).all()):
        raise NonFiniteError("the Hessian is not finite: an input was NaN or Inf")
    inverse: Tensor = torch.linalg.inv(damped(hessian, damping))
    return inverse


def _without(inverse: Tensor, q: int) -> Tensor:
    """Inverse of H without row and column q, kept at full size: those become zeros, but for rounding.

    That is the Schur complement.
    """
    return inverse - torch.outer(inverse[:, q], inverse[q]) / inverse[q, q]
