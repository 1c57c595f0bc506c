"""Statistics of inputs -> quantized weights, written back into the model as they are solved."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hessquant.capture.stops import Stop
from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.experts import pooled, shrink
from hessquant.core.factor import Factor, effective_rank, factorize
from hessquant.core.gptq import Solution
from hessquant.core.grid import QuantizedWeight, with_global_scale
from hessquant.core.hessian import HessianStatistics, hessian
from hessquant.errors import FactorizationError, GridError, NonFiniteError
from hessquant.formats.fused import sets_among
from hessquant.kernels.dispatch import kernels_for
from hessquant.place import HOST
from hessquant.records import GridSpec, Location, Target
from hessquant.results import LayerRecord


@dataclass(frozen=True)
class _Inputs:
    """What is known of the inputs that some targets share.

    Attributes:
        leader: The target that they are named after.
        hessian: Their mean Hessian, [columns, columns].
        tokens: Tokens that it saw, apart from the pool's.
        pooled_share: Weight of all experts' common Hessian in it.
    """

    leader: str
    hessian: Tensor
    tokens: int
    pooled_share: float = 0.0


class TargetSolver:
    """Quantizes the targets of a segment, one stop at a time, and puts the quantized values into the model.

    Attributes:
        quantized: Quantized weights by target name, in the order they were solved; on the host.
        records: One record per quantized weight, in the same order.

    Args:
        targets: What may be asked for.
        parameters: The model's parameters by name; those that hold the targets are overwritten.
        config: Settings.
        on_layer: Told of every weight.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        parameters: Mapping[str, Tensor],
        config: Config,
        on_layer: Callable[[LayerRecord], None],
    ) -> None:
        self._targets = {target.name: target for target in targets}
        self._parameters, self._config, self._on_layer = parameters, config, on_layer
        self._fused, self._largest = _fused_with(self._targets), dict[str, float]()
        self.quantized: dict[str, QuantizedWeight] = {}
        self.records: list[LayerRecord] = []

    def quantize(self, stop: Stop, statistics: dict[str, HessianStatistics]) -> None:
        """Quantize a stop's members: by their own inputs and, as far as an expert's are few, by those of all.

        Args:
            stop: What to quantize.
            statistics: Of each group's inputs, by its leader; of an expert that no token was routed to there are none.
                They are given up: each is taken out, and its sum let go, once the mean Hessian is made of it.

        Raises:
            NonFiniteError: If a weight or a Hessian is not finite.
            FactorizationError: If a Hessian cannot be factored.
            GridError: If a weight does not fit its grid.
        """
        if stop.module or not statistics:
            self._quantize_experts([group.members for group in stop.groups], statistics)
            return
        (group,) = stop.groups
        seen = statistics.pop(group.leader)
        inputs = _Inputs(group.leader, hessian(seen), seen.token_count)
        del seen
        self._quantize_alike(group.members, inputs)

    def _quantize_experts(self, groups: Sequence[tuple[str, ...]], statistics: dict[str, HessianStatistics]) -> None:
        stacks: dict[str, list[tuple[str, ...]]] = {}
        for members in groups:
            stacks.setdefault(self._targets[members[0]].locations[0].parameter, []).append(members)
        for of_one_stack in stacks.values():
            first = self._targets[of_one_stack[0][0]]
            reached = (statistics[leader] for leader, *_ in of_one_stack if leader in statistics)
            pool = pooled(tuple(reached), first.columns, self._parameters[first.locations[0].parameter])
            for members in of_one_stack:
                own = statistics.pop(members[0], None)
                mean, share = shrink(own, pool)
                inputs = _Inputs(members[0], mean, 0 if own is None else own.token_count, share)
                del own, mean
                self._quantize_alike(members, inputs)

    def _quantize_alike(self, members: Sequence[str], inputs: _Inputs) -> None:
        """Quantize the targets that share some inputs; one factor serves all that are ordered alike."""
        name = inputs.leader
        try:
            for width, ordered_alike in self._by_width(members, len(inputs.hessian)).items():
                factor = factorize(
                    inputs.hessian,
                    damping=self._config.damping,
                    order=self._config.order,
                    group_width=width,
                    dtype=torch.promote_types(inputs.hessian.dtype, torch.float32),
                )
                rank = effective_rank(factor, inputs.hessian)
                for name in ordered_alike:
                    self._quantize_one(self._targets[name], inputs, factor, rank)
        except (FactorizationError, GridError, NonFiniteError) as error:
            raise type(error)(f"{name}: {error}") from error

    def _by_width(self, members: Sequence[str], columns: int) -> dict[int, list[str]]:
        """Members by the group width that their column order depends on; one list where it depends on none."""
        by_width: dict[int, list[str]] = {}
        for name in members:
            ordered_by = name if self._config.order == "group" else members[0]
            by_width.setdefault(self._targets[ordered_by].grid.width(columns), []).append(name)
        return by_width

    def _quantize_one(self, target: Target, inputs: _Inputs, factor: Factor, rank: int) -> None:
        started = time.perf_counter()
        weight = matrix_at(self._parameters, target)
        kernels = kernels_for(weight.device, weight.numel())
        solution = gptq.solve(weight, inputs.hessian, factor, self._grid(target), self._config, kernels)
        put_back(solution.weight, target, self._parameters)
        self.quantized[target.name] = solution.weight.to(HOST.device)
        seconds = time.perf_counter() - started
        record = _record(target, inputs, factor, rank, solution, self._config.damping, seconds)
        self.records.append(record)
        self._on_layer(record)

    def _grid(self, target: Target) -> GridSpec:
        """A target's grid, with its global scale where it has one.

        Servers make one matrix of the weights of a fused set, for which they have one global scale; so it is that of
        the largest weight of all. It is taken when the first of them is quantized.
        """
        if not target.grid.has_global_scale:
            return target.grid
        if target.name not in self._largest:
            members = self._fused.get(target.name, [target.name])
            largest = max(float(matrix_at(self._parameters, self._targets[name]).abs().max()) for name in members)
            self._largest.update(dict.fromkeys(members, largest))
        return with_global_scale(target.grid, self._largest[target.name])


def _fused_with(names: Iterable[str]) -> dict[str, list[str]]:
    """All that some server may make one matrix of together with a target, itself among them, by its name."""
    together: dict[str, list[str]] = {}
    for _, _, modules in sets_among(name.removesuffix(".weight") for name in names):
        members = [f"{module}.weight" for module in modules]
        joined = list(dict.fromkeys(other for name in members for other in together.get(name, [name])))
        together.update(dict.fromkeys(joined, joined))
    return together


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
    values = weight.to(parameters[target.locations[0].parameter].device).dequantize()
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
    target: Target, inputs: _Inputs, factor: Factor, rank: int, solution: Solution, damping: float, seconds: float
) -> LayerRecord:
    return LayerRecord(
        name=target.name,
        rows=target.rows,
        columns=target.columns,
        bits=target.grid.bits,
        group_size=target.grid.group_size,
        tokens=inputs.tokens,
        shares_hessian_with=inputs.leader,
        pooled_share=inputs.pooled_share,
        method="rtn" if solution.fallback_rows == target.rows or not inputs.tokens else "gptq",
        loss=solution.loss,
        rtn_loss=solution.rtn_loss,
        output_energy=solution.output_energy,
        expected_loss=solution.expected_loss,
        floor=solution.floor,
        damping=damping,
        damping_used=factor.damping_used,
        factorizations=factor.attempts,
        dead_columns=target.columns - len(factor.live),
        fallback_rows=solution.fallback_rows,
        zero_groups=solution.zero_groups,
        tiny_groups=solution.tiny_groups,
        seconds=seconds,
        # Damping makes it an estimate from above; of these tokens alone there is no more than one each.
        effective_rank=rank if inputs.pooled_share else min(rank, inputs.tokens),
    )
