"""Statistics of inputs -> quantized weights, written back into the model as they are solved."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.experts import pooled, shrink
from hessquant.core.factor import Factor, effective_rank, factorize
from hessquant.core.gptq import Solution
from hessquant.core.grid import QuantizedWeight
from hessquant.core.hessian import HessianStatistics, hessian
from hessquant.errors import FactorizationError, GridError, NonFiniteError
from hessquant.kernels.dispatch import kernels_for
from hessquant.records import Location, Target
from hessquant.results import LayerRecord


class TargetSolver:
    """Solves targets one set of shared inputs at a time.

    Attributes:
        quantized: Solved weights by target name, in the order they were solved.
        records: One record per solved weight, in the same order.
    """

    def __init__(self, targets: Mapping[str, Target], config: Config, on_layer: Callable[[LayerRecord], None]) -> None:
        self._targets, self._config, self._on_layer = targets, config, on_layer
        self.quantized: dict[str, QuantizedWeight] = {}
        self.records: list[LayerRecord] = []

    def solve(self, parameters: Mapping[str, Tensor], members: tuple[str, ...], statistics: HessianStatistics) -> None:
        """Quantize the weights that saw these inputs, and put the quantized values into the model.

        Args:
            parameters: The model's parameters by name; those that hold the members are overwritten.
            members: Targets with the same inputs; one Hessian and one factor serve all.
            statistics: Of those inputs; their sum is overwritten by the mean, since both do not fit where one is large.

        Raises:
            NonFiniteError: If a weight or the Hessian is not finite.
            FactorizationError: If the Hessian cannot be factored.
            GridError: If a weight does not fit its grid.
        """
        mean = hessian(statistics, out=statistics.sum)
        self._solve(parameters, members, mean, statistics.token_count, 0.0)

    def solve_experts(
        self,
        parameters: Mapping[str, Tensor],
        groups: Sequence[tuple[str, ...]],
        statistics: Mapping[str, HessianStatistics],
    ) -> None:
        """Quantize the weights of all experts of a module, each by its own inputs and, as far as those are few, by all.

        Args:
            parameters: As `solve` takes them.
            groups: Members with the same inputs; the first names the statistics.
            statistics: By that name; an expert that no token was routed to has none.

        Raises:
            NonFiniteError: As `solve`.
            FactorizationError: As `solve`.
            GridError: As `solve`.
        """
        alike: dict[str, list[tuple[str, ...]]] = {}
        for members in groups:
            alike.setdefault(self._targets[members[0]].locations[0].parameter, []).append(members)
        for of_one_stack in alike.values():
            seen = [statistics[members[0]] for members in of_one_stack if members[0] in statistics]
            pool = pooled(seen, self._targets[of_one_stack[0][0]].columns)
            for members in of_one_stack:
                own = statistics.get(members[0])
                mean, share = shrink(own, pool)
                self._solve(parameters, members, mean, 0 if own is None else own.token_count, share)

    def _solve(
        self, parameters: Mapping[str, Tensor], members: tuple[str, ...], mean: Tensor, tokens: int, share: float
    ) -> None:
        name = members[0]
        try:
            for width, alike in self._by_width(members, len(mean)).items():
                factor = factorize(
                    mean,
                    damping=self._config.damping,
                    order=self._config.order,
                    group_width=width,
                    dtype=torch.float64 if mean.dtype == torch.float64 else torch.float32,
                )
                for name in alike:
                    self._solve_one(name, parameters, mean, factor, members[0], tokens, share)
        except (FactorizationError, GridError, NonFiniteError) as error:
            raise type(error)(f"{name}: {error}") from error

    def _by_width(self, members: tuple[str, ...], columns: int) -> dict[int, list[str]]:
        """Members by the group width that their column order depends on; one list where it depends on none."""
        alike: dict[int, list[str]] = {}
        for name in members:
            ordered_by = name if self._config.order == "group" else members[0]
            alike.setdefault(self._targets[ordered_by].grid.width(columns), []).append(name)
        return alike

    def _solve_one(
        self,
        name: str,
        parameters: Mapping[str, Tensor],
        mean: Tensor,
        factor: Factor,
        leader: str,
        tokens: int,
        share: float,
    ) -> None:
        started = time.perf_counter()
        target = self._targets[name]
        weight = matrix_at(parameters, target)
        kernels = kernels_for(weight.device, weight.numel())
        solution = gptq.solve(weight, mean, factor, target.grid, self._config, kernels)
        put_back(solution.weight, target, parameters)
        self.quantized[name] = solution.weight
        seconds = time.perf_counter() - started
        record = _record(target, leader, tokens, share, factor, solution, self._config.damping, seconds)
        rank = effective_rank(factor, mean)
        # Damping makes it an estimate from above; of these tokens alone there is no more than one each.
        record = replace(record, effective_rank=rank if share else min(rank, tokens))
        self.records.append(record)
        self._on_layer(record)


def matrix_at(parameters: Mapping[str, Tensor], target: Target) -> Tensor:
    """A target as it is in the model, [rows, columns]; a view of its parameter where all of it is in one location."""
    views = [_rows_at(parameters, location) for location in target.locations]
    if len(views) == 1:
        return views[0].detach()
    matrix = views[0].new_empty(target.rows, target.columns)
    for location, view in zip(target.locations, views, strict=True):
        _rows_of(matrix, location).copy_(view.detach())
    return matrix


def put_back(weight: QuantizedWeight, target: Target, parameters: Mapping[str, Tensor]) -> None:
    """Overwrite a target in the model with the values that its quantized weight stands for."""
    values = weight.dequantize()
    with torch.no_grad():
        for location in target.locations:
            _rows_at(parameters, location).copy_(_rows_of(values, location))


def _rows_at(parameters: Mapping[str, Tensor], location: Location) -> Tensor:
    """The rows of one location, as a view of their parameter."""
    matrix = parameters[location.parameter]
    if location.stacked:
        matrix = matrix[location.piece]
    upright = matrix.T if location.transposed else matrix
    return upright[location.first_row :: location.row_step][: location.rows]


def _rows_of(matrix: Tensor, location: Location) -> Tensor:
    """The same rows in the target's own matrix."""
    return matrix[location.to_row :: location.to_step][: location.rows]


def _record(
    target: Target,
    leader: str,
    tokens: int,
    share: float,
    factor: Factor,
    solution: Solution,
    damping: float,
    seconds: float,
) -> LayerRecord:
    return LayerRecord(
        name=target.name,
        rows=target.rows,
        columns=target.columns,
        bits=target.grid.bits,
        group_size=target.grid.group_size,
        tokens=tokens,
        shares_hessian_with=leader,
        pooled_share=share,
        method="rtn" if solution.fallback_rows == target.rows or not tokens else "gptq",
        loss=solution.loss,
        rtn_loss=solution.rtn_loss,
        output_energy=solution.output_energy,
        expected_loss=solution.expected_loss,
        floor=solution.floor,
        damping=damping,
        damping_used=factor.damping_used,
        factorizations=factor.attempts,
        dead_columns=int(factor.dead.sum()),
        fallback_rows=solution.fallback_rows,
        zero_groups=solution.zero_groups,
        tiny_groups=solution.tiny_groups,
        seconds=seconds,
    )
