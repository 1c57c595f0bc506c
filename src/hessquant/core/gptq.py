"""GPTQ as one left-looking sweep over the columns, without an inverse.

With H = M^T M, M lower triangular, and E = W - Q of the columns already fixed, column j's target is

    t_j = w_j + (1 / M_jj) * sum_{k<j} M_jk e_k,    q_j = round_to_grid(t_j),    e_j = w_j - q_j.

The original weights stay as they are. In blocks of columns, the sum over earlier blocks is one matrix product, and the
rest is a small triangular loop that a kernel runs. Same integers as GPTQ with the Cholesky factor of the inverse
(arXiv 2210.17323, algorithm 1), at a quarter of the factorisation's cost.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core.factor import Factor
from hessquant.core.finite import first_non_finite
from hessquant.core.grid import (
    Grid,
    QuantizedWeight,
    SearchKernel,
    SweepKernel,
    count_degenerate,
    encode,
    evened,
    min_max,
    scale_dtype,
    scale_factors,
)
from hessquant.core.objective import expected_sweep_loss, loss_per_row, order_free_floor
from hessquant.core.refine import descend
from hessquant.core.working import WorkingHessian
from hessquant.errors import NonFiniteError
from hessquant.records import GridSpec


class Kernels(NamedTuple):
    """The two inner loops, for one device and size."""

    sweep_block: SweepKernel
    search_scales: SearchKernel


@dataclass(frozen=True)
class Solution:
    """A solved weight and what is known about it. Losses are tr(E H E^T) with the Hessian as given, undamped.

    Attributes:
        weight: Codes, scales and zeros.
        loss: Loss of `weight`.
        rtn_loss: Loss of round-to-nearest on the min-max grid.
        output_energy: tr(W H W^T).
        expected_loss: `objective.expected_sweep_loss`.
        floor: `objective.order_free_floor`.
        fallback_rows: Rows where round-to-nearest was better and was kept.
        zero_groups: Groups of zeros.
        tiny_groups: Groups whose scale had to be raised to the smallest that can be stored.
    """

    weight: QuantizedWeight
    loss: float
    rtn_loss: float
    output_energy: float
    expected_loss: float
    floor: float
    fallback_rows: int
    zero_groups: int
    tiny_groups: int


@dataclass(frozen=True)
class SolvedRows:
    """Rows of a weight, solved; of a batch with a dimension more in front.

    Attributes:
        weight: Codes, scales and zeros.
        swept: Scales, evened out, and zeros that the sweep had, also of rows that fell back.
        figures: float64 [4, ..., rows]: of each row its loss, round-to-nearest's and the energy of its output, all
            three by the unit, and whether it fell back.
        unit: `WorkingHessian.unit`.
    """

    weight: QuantizedWeight
    swept: Grid
    figures: Tensor
    unit: float


def solve(
    weight: Tensor, hessian: Tensor, factor: Factor, spec: GridSpec, config: Config, kernels: Kernels
) -> Solution:
    """`solve_batch` of one weight [rows, columns]."""
    _, (solution,) = solve_batch(weight, hessian, factor, spec, config, kernels)
    return solution


def solve_batch(
    weight: Tensor, hessian: Tensor, factor: Factor, spec: GridSpec, config: Config, kernels: Kernels
) -> tuple[QuantizedWeight, list[Solution]]:
    """Quantize weights by the sweep and its refinement; row by row, keep round-to-nearest where it is better.

    Args:
        weight: [..., rows, columns], as many as there are Hessians; computed in float64 if it is float64, else in
            float32.
        hessian: [..., columns, columns], undamped; of a batch (`core.batch`), with kernels that take one.
        factor: Its factor; one factor serves every weight that sees the same inputs.
        spec: The grid.
        config: `scales`, `scale_search`, `refinement_rounds` and `block_size` are read.
        kernels: The inner loops.

    Returns:
        All weights, [..., rows, columns]; and what is known of each, with a view of its own.

    Raises:
        NonFiniteError: If a weight is NaN or Inf; the message names its row and column. Or if the losses overflow.
        GridError: If the group size does not divide the columns, or a scale overflows its dtype.
    """
    weight = checked(weight)
    return concluded(weight, solve_rows(weight, hessian, factor, spec, config, kernels), factor)


def checked(weight: Tensor) -> Tensor:
    """A weight in the dtype that it is solved in.

    Raises:
        NonFiniteError: If it holds NaN or Inf; the message names row and column.
    """
    place = first_non_finite(weight)
    if place is not None:
        raise NonFiniteError(f"weight at row {place[-2]}, column {place[-1]} is {float(weight[place])}", place)
    return weight if weight.dtype == torch.float64 else weight.float()


def solve_rows(
    weight: Tensor, hessian: Tensor, factor: Factor, spec: GridSpec, config: Config, kernels: Kernels
) -> SolvedRows:
    """Quantize rows, of which none depends on another: all of a weight's, or some.

    Args:
        weight: `checked`, [..., rows, columns].
        hessian: As the others, as `solve_batch` takes it.
        factor: Likewise.
        spec: Likewise.
        config: Likewise.
        kernels: Likewise.
    """
    working = WorkingHessian.of(hessian, weight.dtype)
    swept = _swept(weight, working, factor, spec, config, kernels)
    swept_loss = loss_per_row(weight - swept.dequantize(weight.dtype), working)
    nearest_grid = min_max(weight, spec)
    nearest = QuantizedWeight(encode(weight, nearest_grid), nearest_grid)
    nearest_loss = loss_per_row(weight - nearest.dequantize(weight.dtype), working)
    # With clamping the sweep can lose; "not better" also covers a row that overflowed.
    worse = ~(swept_loss <= nearest_loss)
    per_row = (torch.where(worse, nearest_loss, swept_loss), nearest_loss, loss_per_row(weight, working), worse)
    figures = torch.stack([of.double() for of in per_row])
    return SolvedRows(_take_rows(swept, nearest, worse), evened(swept), figures, working.unit)


def concluded(weight: Tensor, rows: SolvedRows, factor: Factor) -> tuple[QuantizedWeight, list[Solution]]:
    """What `solve_batch` gives, of all rows of its weights.

    Args:
        weight: All rows, `checked`.
        rows: All of them, solved.
        factor: What they were solved with.

    Raises:
        NonFiniteError: If the losses overflow.
    """
    # Read at once: each reading waits for all that was asked of an accelerator before.
    expected = expected_sweep_loss(rows.swept, factor), order_free_floor(rows.swept, factor)
    sums = [of.sum(-1) for of in rows.figures]
    told = torch.stack([*sums, *expected, *(of.double() for of in count_degenerate(weight, rows.swept.spec))])
    numbers = told.view(len(told), -1).T.tolist()
    for loss, *_ in numbers:
        if not math.isfinite(loss):
            raise NonFiniteError(f"the loss is {loss}: weights of up to {float(weight.abs().max()):.3g} overflow")
    return rows.weight, [_solution(*of_one, rows.unit) for of_one in zip(rows.weight.members(), numbers, strict=True)]


def _solution(weight: QuantizedWeight, numbers: list[float], unit: float) -> Solution:
    """What is known of one weight, in the order of `solve_batch`."""
    loss, rtn_loss, output_energy, fallback_rows, expected_loss, floor, zero_groups, tiny_groups = numbers
    return Solution(
        weight=weight,
        loss=unit * loss,
        rtn_loss=unit * rtn_loss,
        output_energy=unit * output_energy,
        expected_loss=expected_loss,
        floor=floor,
        fallback_rows=int(fallback_rows),
        zero_groups=int(zero_groups),
        tiny_groups=int(tiny_groups),
    )


def _swept(
    weight: Tensor, hessian: WorkingHessian, factor: Factor, spec: GridSpec, config: Config, kernels: Kernels
) -> QuantizedWeight:
    """The weight after the sweep and its refinement."""
    if config.scales == "static":
        grid = fit_grid(weight, relative_importance(factor, weight.dtype), spec, config, kernels)
        codes = sweep(weight, factor, grid, block_size=config.block_size, kernel=kernels.sweep_block)
        swept = QuantizedWeight(codes, grid)
    else:
        swept = dynamic_sweep(weight, factor, spec, config, kernels)
    if config.refinement_rounds:
        damped = hessian.damped(factor)
        for _ in range(config.refinement_rounds):
            swept = descend(weight, swept, damped, block_size=config.block_size, kernel=kernels.sweep_block)
    return swept


def fit_grid(weight: Tensor, importance: Tensor, spec: GridSpec, config: Config, kernels: Kernels) -> Grid:
    """Scales and zeros for weights as they are: searched against the importance of [..., columns], or min-max."""
    if not config.scale_search:
        return min_max(weight, spec)
    scales, zeros = kernels.search_scales(weight.mT.contiguous(), importance, spec, scale_factors(spec))
    return Grid(spec, scales.mT.contiguous(), zeros.mT.contiguous())


def relative_importance(factor: Factor, dtype: torch.dtype) -> Tensor:
    """M_jj^2 over their mean, in the columns' own order: float32 holds them at any scale of the Hessian."""
    return (factor.importance / factor.importance.mean(-1, keepdim=True)).to(dtype)


def _in_order(columns: Tensor, picked: Tensor) -> Tensor:
    """Columns [..., columns, rows] in the order that `_picked_by` gives, in one piece."""
    return _by_column(columns.contiguous()).index_select(0, picked.flatten()).view(columns.shape)


def _by_column(columns: Tensor) -> Tensor:
    """A view of [..., columns, rows] where a column of whichever member is picked by one number."""
    return columns.view(-1, columns.shape[-1])


def _picked_by(order: Tensor) -> Tensor:
    """The numbers of columns [..., columns] among those of all members, one member after another."""
    if order.ndim == 1:
        return order
    return order + order.shape[-1] * torch.arange(len(order), device=order.device).unsqueeze(-1)


def sweep(weight: Tensor, factor: Factor, grid: Grid, *, block_size: int, kernel: SweepKernel) -> Tensor:
    """Codes of a weight on a fixed grid.

    Args:
        weight: [..., rows, columns], float32 or float64; the sweep runs in this dtype.
        factor: Factor of the damped Hessian.
        grid: Scales and zeros, groups being contiguous columns whatever the order.
        block_size: Columns per lazy block; does not change the result.
        kernel: The loop within a block.

    Returns:
        uint8 [..., rows, columns], in the columns' own order.
    """
    lower, picked = factor.lower.to(weight.dtype), _picked_by(factor.order)
    visited = _in_order(weight.mT, picked)
    group = factor.order // grid.spec.width(weight.shape[-1])
    scales = grid.scales.mT.to(weight.dtype).contiguous()
    zeros = grid.zeros.mT.to(weight.dtype).contiguous()
    errors = torch.zeros_like(visited)
    codes = torch.empty(visited.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, weight.shape[-1], block_size):
        block = slice(start, start + block_size)
        carried = lower[..., block, :start] @ errors[..., :start, :]
        within = lower[..., block, block].contiguous()
        found, errors[..., block, :] = kernel(
            visited[..., block, :], within, carried, scales, zeros, group[..., block], grid.spec
        )
        _by_column(codes)[picked[..., block].flatten()] = _by_column(found)
    return codes.mT.contiguous()


def dynamic_sweep(weight: Tensor, factor: Factor, spec: GridSpec, config: Config, kernels: Kernels) -> QuantizedWeight:
    """The sweep with each group's scales fitted when it is reached, to the weights as compensated by then.

    The order must visit groups one after another ("natural" or "group"). At the start of group g GPTQ's weights are
    W_g + S M_gg^{-T}, with S the sum over earlier columns.
    """
    lower, width, columns = factor.lower.to(weight.dtype), spec.width(weight.shape[-1]), weight.shape[-1]
    picked, picked_groups = _picked_by(factor.order), _picked_by(factor.order[..., ::width] // width)
    visited = _in_order(weight.mT, picked)
    importance = relative_importance(factor, weight.dtype).gather(-1, factor.order)
    one_group = replace(spec, group_size=-1)
    errors = torch.zeros_like(visited)
    codes = torch.empty(visited.shape, dtype=torch.uint8, device=weight.device)
    shape = *visited.shape[:-2], columns // width, visited.shape[-1]
    scales = torch.empty(shape, dtype=scale_dtype(spec), device=weight.device)
    zeros = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, columns, width):
        members = slice(start, start + width)
        carried = lower[..., members, :start] @ errors[..., :start, :]
        shift = torch.linalg.solve_triangular(lower[..., members, members], carried, upper=False)
        seen = visited[..., members, :] + shift
        grid = fit_grid(seen.mT, importance[..., members], one_group, config, kernels)
        group = picked_groups[..., start // width]
        _by_column(scales)[group], _by_column(zeros)[group] = grid.scales[..., 0], grid.zeros[..., 0]
        of_group = grid.scales.mT.to(weight.dtype), grid.zeros.mT.to(weight.dtype)
        for first in range(start, start + width, config.block_size):
            block, before = slice(first, min(first + config.block_size, start + width)), slice(start, first)
            local = carried[..., first - start : block.stop - start, :]
            local = local + lower[..., block, before] @ errors[..., before, :]
            within = lower[..., block, block].contiguous()
            found, errors[..., block, :] = kernels.sweep_block(
                visited[..., block, :], within, local, *of_group, torch.zeros_like(picked[..., block]), spec
            )
            _by_column(codes)[picked[..., block].flatten()] = _by_column(found)
    return QuantizedWeight(codes.mT.contiguous(), Grid(spec, scales.mT.contiguous(), zeros.mT.contiguous()))


def _take_rows(first: QuantizedWeight, second: QuantizedWeight, where: Tensor) -> QuantizedWeight:
    """`first` with the rows marked in `where` taken from `second`."""
    rows = where.unsqueeze(-1)
    grid = Grid(
        first.grid.spec,
        torch.where(rows, second.grid.scales, first.grid.scales),
        torch.where(rows, second.grid.zeros, first.grid.zeros),
    )
    return QuantizedWeight(torch.where(rows, second.codes, first.codes), grid)
