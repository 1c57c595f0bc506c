"""Statistics of inputs -> quantized weights, written back into the model as they are solved."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from hessquant.capture.stops import Stop
from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.batch import alike
from hessquant.core.experts import pooled, shrink
from hessquant.core.factor import Factor, effective_rank, factorize
from hessquant.core.grid import QuantizedWeight, with_global_scale
from hessquant.core.hessian import HessianStatistics, hessian
from hessquant.errors import FactorizationError, GridError, NonFiniteError
from hessquant.formats.fused import fused_with
from hessquant.kernels.dispatch import kernels_for
from hessquant.place import HOST, Place
from hessquant.planning.work import at_once
from hessquant.ranks import ALONE, Ranks
from hessquant.records import GridSpec, Target
from hessquant.results import LayerRecord
from hessquant.run.dividing import solve_divided
from hessquant.run.weights import matrix_at, put_back, write_values

_Quantized = tuple[QuantizedWeight, LayerRecord]
"""A weight on the host, and what is told of it."""

_Part = tuple[list[Target], QuantizedWeight, list[LayerRecord]]
"""Targets that were solved together, one or a batch; their weights where they were solved; what is told of each."""


@dataclass(frozen=True)
class _Inputs:
    """What is known of the inputs that some targets share.

    Attributes:
        members: Those targets; the inputs are named after the first.
        tokens: Tokens that their Hessian saw, apart from the pool's.
        pooled_share: Weight of all experts' common Hessian in it.
    """

    members: tuple[str, ...]
    tokens: int
    pooled_share: float = 0.0


class TargetSolver:
    """Quantizes the targets of a segment, one stop at a time, and puts the quantized values into the model.

    Attributes:
        quantized: Quantized weights by target name, in the order of the stops' members; on the host, of the first
            process, which stores them.
        records: One record per quantized weight, in the same order.

    Args:
        targets: What may be asked for.
        parameters: The model's parameters by name; those that hold the targets are overwritten.
        config: Settings.
        on_layer: Told of every weight.
        ranks: The processes that solve together; of a weight each has some rows, of experts each has some.
    """

    def __init__(
        self,
        targets: Iterable[Target],
        parameters: Mapping[str, Tensor],
        config: Config,
        on_layer: Callable[[LayerRecord], None],
        ranks: Ranks = ALONE,
    ) -> None:
        self._targets = {target.name: target for target in targets}
        self._parameters, self._config, self._on_layer, self._ranks = parameters, config, on_layer, ranks
        self._fused, self._largest = fused_with(self._targets), dict[str, float]()
        self.quantized: dict[str, QuantizedWeight] = {}
        self.records: list[LayerRecord] = []

    def quantize(self, stop: Stop, statistics: dict[str, HessianStatistics]) -> None:
        """Quantize a stop's members: by their own inputs and, as far as an expert's are few, by those of all.

        Args:
            stop: What to quantize.
            statistics: Of each group's inputs, by its leader; of an expert that no token was routed to there are none.
                Sums of experts are those of this process's tokens (`capture.across`).
                They are given up: each is taken out, and its sum let go, once the mean Hessian is made of it.

        Raises:
            NonFiniteError: If a weight or a Hessian is not finite.
            FactorizationError: If a Hessian cannot be factored.
            GridError: If a weight does not fit its grid.
        """
        if stop.module or not statistics:
            self._quantize_experts([group.members for group in stop.groups], statistics)
        else:
            (group,) = stop.groups
            seen = statistics.pop(group.leader)
            mean, inputs = hessian(seen), _Inputs(group.members, seen.token_count)
            del seen
            self._quantize_alone(inputs, mean, self._ranks)
        if not self._ranks.is_first:
            self.quantized.clear()

    def quantize_unseen(self, target: Target) -> None:
        """Quantize a target of whose inputs nothing is known: with the identity as Hessian, as `core.experts` does.

        Raises:
            NonFiniteError: If the weight is not finite.
            GridError: If it does not fit its grid.
        """
        parameter = self._parameters[target.locations[0].parameter]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        identity = torch.eye(target.columns, dtype=dtype, device=parameter.device)
        self._quantize_alone(_Inputs((target.name,), 0), identity, ALONE)

    def _quantize_experts(self, groups: Sequence[tuple[str, ...]], statistics: dict[str, HessianStatistics]) -> None:
        stacks: dict[str, list[tuple[str, ...]]] = {}
        for members in groups:
            stacks.setdefault(self._targets[members[0]].locations[0].parameter, []).append(members)
        for of_one_stack in stacks.values():
            first = self._targets[of_one_stack[0][0]]
            parameter = self._parameters[first.locations[0].parameter]
            reached = (statistics[leader] for leader, *_ in of_one_stack if leader in statistics)
            common = hessian(self._summed(pooled(tuple(reached), first.columns, parameter)))
            place = Place(parameter.device, parameter.dtype)
            together = min(at_once(self._targets[name], self._config, place) for name in chain(*of_one_stack))
            own, before = self._taken(of_one_stack, statistics), len(self.records)
            for start in range(0, len(own), together):
                self._quantize_piece(own[start : start + together], statistics, common)
            if self._ranks.count > 1:
                self._exchange(of_one_stack, self.records[before:])

    def _summed(self, pool: HessianStatistics) -> HessianStatistics:
        """All experts' statistics, of the tokens of all processes."""
        if self._ranks.count == 1:
            return pool
        # Of one expert alone, it is that expert's.
        total = pool.sum.clone()
        self._ranks.sum(total)
        return replace(pool, sum=total)

    def _taken(
        self, groups: Sequence[tuple[str, ...]], statistics: dict[str, HessianStatistics]
    ) -> Sequence[tuple[str, ...]]:
        """The experts that this process solves; their statistics are those of all processes' tokens, the others go."""
        for owner in range(self._ranks.count):
            for leader, *_ in groups[self._ranks.part_of(len(groups), owner)]:
                if leader in statistics:
                    self._ranks.sum_at(owner, statistics[leader].sum)
                    if owner != self._ranks.rank:
                        del statistics[leader]
        return self._ranks.share(groups)

    def _exchange(self, groups: Sequence[tuple[str, ...]], solved: Sequence[LayerRecord]) -> None:
        """Have the experts that the others have solved, and give them those that were solved here."""
        records = {record.name: record for record in solved}
        for owner in range(self._ranks.count):
            for members in groups[self._ranks.part_of(len(groups), owner)]:
                mine = [name for name in records if name in members]
                told = self._ranks.tell([(self.quantized[name].alone(), records[name]) for name in mine], by=owner)
                if owner == self._ranks.rank:
                    continue
                for weight, record in told:
                    put_back(weight, self._targets[record.name], self._parameters)
                self._keep(told)

    def _quantize_piece(
        self, groups: Sequence[tuple[str, ...]], statistics: dict[str, HessianStatistics], common: Tensor
    ) -> None:
        """Quantize some experts: in batches of those that are alike, and the others one by one."""
        seen = [statistics.pop(members[0], None) for members in groups]
        hessians, shares = shrink(seen, common)
        tokens = [0 if own is None else own.token_count for own in seen]
        del seen
        experts = [_Inputs(*known) for known in zip(groups, tokens, shares, strict=True)]
        solved: dict[int, list[_Quantized]] = {}
        for batch in self._batches(experts, hessians) if len(experts) > 1 else ():
            solved |= self._solved_together(batch, experts, hessians)
        for at, inputs in enumerate(experts):
            if at in solved:
                self._keep(solved.pop(at))
            else:
                self._quantize_alone(inputs, hessians[at], ALONE)

    def _batches(self, experts: Sequence[_Inputs], hessians: Tensor) -> Iterator[list[int]]:
        """Experts that are alike: in their Hessians, and in their weights' shapes and grids."""
        for batch in alike(hessians):
            by_kind: dict[object, list[int]] = {}
            for at in batch:
                targets = [self._targets[name] for name in experts[at].members]
                by_kind.setdefault(tuple((target.rows, self._grid(target)) for target in targets), []).append(at)
            yield from by_kind.values()

    def _solved_together(
        self, batch: list[int], experts: Sequence[_Inputs], hessians: Tensor
    ) -> dict[int, list[_Quantized]]:
        """The experts of a batch that could be solved as one, by their numbers; their weights are put back."""
        while len(batch) > 1:
            try:
                chosen = hessians if len(batch) == len(experts) else hessians[batch]
                parts = list(self._solve([experts[at] for at in batch], chosen, ALONE))
                return dict(zip(batch, map(list, zip(*map(self._put_back, parts), strict=True)), strict=True))
            except FactorizationError as error:
                apart = {batch[member] for member in error.members}
            except (GridError, NonFiniteError):
                # Whose weight it is, and what is to be done, is said where that one is solved by itself.
                apart = set(batch)
            batch = [at for at in batch if at not in apart]
        return {}

    def _quantize_alone(self, inputs: _Inputs, hessian: Tensor, ranks: Ranks) -> None:
        """Quantize the targets that share some inputs, telling of each as it is done."""
        for part in self._solve([inputs], hessian, ranks):
            self._keep(self._put_back(part))

    def _solve(self, inputs: Sequence[_Inputs], hessian: Tensor, ranks: Ranks) -> Iterator[_Part]:
        """Solve the targets that share some inputs, or those of several such inputs as a batch.

        One factor serves all that are ordered alike.

        Args:
            inputs: One, or several whose targets are alike.
            hessian: [columns, columns], or [inputs, columns, columns].
            ranks: The processes that solve them together.
        """
        leader = inputs[0].members[0]
        for width, positions in self._by_width(inputs[0].members, hessian.shape[-1]).items():
            with _naming(leader):
                factor = factorize(
                    hessian,
                    damping=self._config.damping,
                    order=self._config.order,
                    group_width=width,
                    dtype=torch.promote_types(hessian.dtype, torch.float32),
                )
            effective = effective_rank(factor, hessian).view(-1).tolist()
            for position in positions:
                started = time.perf_counter()
                targets = [self._targets[of_one.members[position]] for of_one in inputs]
                weights = [matrix_at(self._parameters, target) for target in targets]
                weight = weights[0] if hessian.ndim == 2 else torch.stack(weights)
                grid, kernels = self._grid(targets[0]), kernels_for(weight.device, weights[0].numel())
                with _naming(targets[0].name):
                    whole, solutions = solve_divided(weight, hessian, factor, grid, self._config, kernels, ranks)
                seconds = (time.perf_counter() - started) / len(targets)
                known = zip(targets, inputs, effective, solutions, strict=True)
                yield targets, whole, [_record(*of_one, factor, self._config.damping, seconds) for of_one in known]

    def _by_width(self, members: Sequence[str], columns: int) -> dict[int, list[int]]:
        """Positions of members by the group width that their order depends on; one list where it depends on none."""
        by_width: dict[int, list[int]] = {}
        for position, name in enumerate(members):
            ordered_by = name if self._config.order == "group" else members[0]
            by_width.setdefault(self._targets[ordered_by].grid.width(columns), []).append(position)
        return by_width

    def _put_back(self, part: _Part) -> list[_Quantized]:
        """Overwrite weights in the model, and have them on the host."""
        targets, whole, records = part
        values = whole.dequantize()
        for target, of_one in zip(targets, values.view(-1, *values.shape[-2:]), strict=True):
            write_values(of_one, target, self._parameters)
        return list(zip(whole.to(HOST.device).members(), records, strict=True))

    def _keep(self, solved: Iterable[_Quantized]) -> None:
        for weight, record in solved:
            self.quantized[record.name] = weight
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
            members = self._fused[target.name]
            largest = max(float(matrix_at(self._parameters, self._targets[name]).abs().max()) for name in members)
            self._largest.update(dict.fromkeys(members, largest))
        return with_global_scale(target.grid, self._largest[target.name])


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Inside, what fails says whose weight it is."""
    try:
        yield
    except (FactorizationError, GridError, NonFiniteError) as error:
        error.args = (f"{name}: {error}",)
        raise


def _record(
    target: Target, inputs: _Inputs, rank: int, solution: gptq.Solution, factor: Factor, damping: float, seconds: float
) -> LayerRecord:
    return LayerRecord(
        name=target.name,
        rows=target.rows,
        columns=target.columns,
        bits=target.grid.bits,
        group_size=target.grid.group_size,
        tokens=inputs.tokens,
        shares_hessian_with=inputs.members[0],
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
        built=target.built,
        # Damping makes it an estimate from above; of these tokens alone there is no more than one each.
        effective_rank=rank if inputs.pooled_share else min(rank, inputs.tokens),
    )
