"""How much the model's predictions feel each weight: one forward pass, and one backward, block by block.

Forward, the hidden state that enters each block is kept. Then the head gives logits, labels are drawn from them, and
the gradient of their likelihood goes back through the blocks, the last one first, each in memory for its turn and run
anew. Meanwhile inputs are summed up, so that each weight of a block is priced before the block is let go.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from hessquant.calibration.batches import Batch
from hessquant.capture.activations import ActivationStore
from hessquant.capture.collect import Collector
from hessquant.capture.prelude import BatchState, record_arguments
from hessquant.capture.segments import Block, Head, segments_of
from hessquant.capture.stops import Stop, stops_of
from hessquant.config import Config
from hessquant.core.experts import pooled
from hessquant.core.factor import Factor, factorize
from hessquant.core.gptq import fit_grid, relative_importance
from hessquant.core.grid import QuantizedWeight, encode
from hessquant.core.hessian import HessianStatistics, hessian
from hessquant.core.sensitivity import Curvature, predicted_divergence
from hessquant.errors import CaptureError
from hessquant.kernels.dispatch import kernels_for
from hessquant.models.stream import StreamedModel
from hessquant.models.watch import Product
from hessquant.place import HOST
from hessquant.planning.bit_allocation import Prices
from hessquant.records import GridSpec, Plan, Target
from hessquant.results import Progress
from hessquant.run.weights import matrix_at


def price_weights(
    streamed: StreamedModel,
    plan: Plan,
    batches: Sequence[Batch],
    grids: Mapping[str, Sequence[GridSpec]],
    config: Config,
    activations: ActivationStore,
    progress: Progress,
) -> Prices:
    """Foretell what each weight costs on each grid.

    Args:
        streamed: A model with logits, whose blocks can be run one by one.
        plan: Of it.
        batches: Calibration inputs, a window each.
        grids: The grids to try, by the names of weights; of others nothing is told.
        config: Settings; the damping, the order and the search of scales, and the seed of labels.
        activations: Keeps the hidden states that enter each block.
        progress: Told of each block, forward and back.

    Raises:
        CaptureError: If the model fails on a window, or hidden states find no room.
        FailedError: If weights cannot be read, or a Hessian cannot be factored.
    """
    targets = [target for target in plan.targets if target.name in grids]
    *blocks, head = cast(list[Block | Head], segments_of(streamed, plan, targets, to_logits=True))
    progress.stage("sensitivity", 2 * len(blocks) + 1)
    states, entering = _through(streamed, plan, cast(Sequence[Block], blocks), batches, activations, progress)
    labels = torch.Generator(streamed.place.device).manual_seed(config.seed)
    gradients: list[Tensor] | None = None
    prices: dict[str, Mapping[GridSpec, float]] = {}
    for segment in (head, *reversed(blocks)):
        hidden = entering.pop()

        pricing = _Pricing(streamed, segment, grids, config)
        gradients = pricing.go_back(states, hidden, gradients, labels)
        prices.update(pricing.prices)
        progress.advance(f"{segment.name or 'head'}, backward")
    return prices


def _through(
    streamed: StreamedModel,
    plan: Plan,
    blocks: Sequence[Block],
    batches: Sequence[Batch],
    activations: ActivationStore,
    progress: Progress,
) -> tuple[list[BatchState], list[list[Tensor]]]:
    """Take all windows through all blocks; gives the hidden states that enter each of them, and those that leave."""
    with streamed.in_memory(streamed.prelude_keys(plan.blocks)):
        states = record_arguments(streamed.model, plan.blocks, plan.returns_tuple, batches, activations.keep)
    entering = []
    for block in blocks:
        entering.append([activations.keep(state.hidden) for state in states])
        with streamed.in_memory(block.keys), torch.no_grad():
            for state in states:
                block.advance(state)
        progress.advance(f"{block.name}, forward")
    return states, [*entering, [state.hidden for state in states]]


def _back_from_logits(logits: Tensor, labels: torch.Generator) -> None:
    """Draw a label for each position of a window [1, positions, vocabulary], and begin with their likelihood."""
    with torch.no_grad():
        gradient = logits.detach()[0].float().softmax(-1)
        drawn = torch.multinomial(gradient, 1, generator=labels)
        gradient.scatter_add_(-1, drawn, gradient.new_full(drawn.shape, -1.0))
    torch.autograd.backward(logits, gradient[None].to(logits.dtype))


class _Pricing:
    """One segment on the way back.

    Attributes:
        prices: What each of its weights costs on each grid, once all windows have gone back through it.
    """

    def __init__(
        self, streamed: StreamedModel, segment: Block | Head, grids: Mapping[str, Sequence[GridSpec]], config: Config
    ) -> None:
        self._streamed, self._segment, self._grids, self._config = streamed, segment, grids, config
        self.prices: dict[str, Mapping[GridSpec, float]] = {}

    def go_back(
        self,
        states: Sequence[BatchState],
        entering: Sequence[Tensor],
        leaving: Sequence[Tensor] | None,
        labels: torch.Generator,
    ) -> list[Tensor]:
        """Run the segment on each window, and go back through it; gives the gradients of what entered it.

        Args:
            states: The windows.
            entering: The hidden state that entered, of each.
            leaving: The gradient of the one that left, of each; None of the head, which gives logits.
            labels: Draws the labels then.
        """
        segment, device = self._segment, self._streamed.place.device
        gradients = []
        with self._streamed.in_memory(segment.keys) as parameters:
            watched = {location.parameter: parameters[location.parameter] for location in _locations(segment.targets)}
            for parameter in watched.values():
                parameter.requires_grad_(True)
            collector = Collector(stops_of(segment.targets), parameters)
            curvatures = {each.name: Curvature.of_shape(each.rows, each.columns, device) for each in segment.targets}
            for at, state in enumerate(states):
                hidden = entering[at].to(device).detach().clone().requires_grad_(True)
                with torch.enable_grad(), collector.watch(_adding(collector, state)):
                    output: Any = segment.run(replace(state, hidden=hidden))
                if leaving is None:
                    _back_from_logits(output.logits, labels)
                else:
                    torch.autograd.backward(output, leaving[at])
                del output
                gradients.append(_finite(cast(Tensor, hidden.grad), segment.name, state))
                self._add(curvatures, watched, state.tokens)
            with torch.no_grad():
                for stop in collector.stops:
                    self._price(stop, collector.take(stop), parameters, curvatures)
        return gradients

    def _add(self, curvatures: Mapping[str, Curvature], watched: Mapping[str, Tensor], tokens: int) -> None:
        """Add a window's gradients; a weight that no token reached has none."""
        reached = {name: each.grad for name, each in watched.items() if each.grad is not None}
        for target in self._segment.targets:
            curvature = curvatures[target.name]
            if all(location.parameter in reached for location in target.locations):
                curvature.add(matrix_at(reached, target), tokens)
            else:
                curvature.tokens += tokens
        for parameter in watched.values():
            parameter.grad = None

    def _price(
        self,
        stop: Stop,
        statistics: dict[str, HessianStatistics],
        parameters: Mapping[str, Tensor],
        curvatures: Mapping[str, Curvature],
    ) -> None:
        """Price a stop's weights; the experts of a stack all by the inputs of all of them."""
        by_name = {target.name: target for target in self._segment.targets}
        kinds: dict[str, list[Target]] = {}
        for group in stop.groups:
            members = [by_name[name] for name in group.members]
            kinds.setdefault(members[0].locations[0].parameter, []).extend(members)
        for members in kinds.values():
            first = members[0]
            own = [statistics.pop(target.name) for target in members if target.name in statistics]
            mean = hessian(pooled(own, first.columns, parameters[first.locations[0].parameter]))
            factors: dict[int, Factor] = {}
            for target in members:
                weight = matrix_at(parameters, target).float()
                self.prices[target.name] = {
                    grid: self._of(weight, grid, self._factor(mean, grid, factors), mean, curvatures[target.name])
                    for grid in self._grids[target.name]
                }

    def _factor(self, mean: Tensor, grid: GridSpec, known: dict[int, Factor]) -> Factor:
        """The factor of a Hessian, made once for all grids that order columns alike."""
        config = self._config
        width = grid.width(len(mean)) if config.order == "group" else len(mean)
        if width not in known:
            known[width] = factorize(
                mean,
                damping=config.damping,
                order=config.order,
                group_width=width,
                dtype=torch.promote_types(mean.dtype, HOST.dtype),
            )
        return known[width]

    def _of(self, weight: Tensor, spec: GridSpec, factor: Factor, mean: Tensor, curvature: Curvature) -> float:
        kernels = kernels_for(weight.device, weight.numel())
        grid = fit_grid(weight, relative_importance(factor, weight.dtype), spec, self._config, kernels)
        rounded = QuantizedWeight(encode(weight, grid), grid)
        return predicted_divergence(weight, rounded, factor, mean.diagonal(), curvature)


def _locations(targets: Iterable[Target]) -> Iterable[Any]:
    return (location for target in targets for location in target.locations)


def _adding(collector: Collector, state: BatchState) -> Callable[[Product], None]:
    """What adds the inputs of every product with a weight that is priced."""

    def add(product: Product) -> None:
        if collector.stop_at(product) is not None:
            with torch.no_grad():
                collector.add(product, state)

    return add


def _finite(gradient: Tensor, name: str, state: BatchState) -> Tensor:
    if not bool(torch.isfinite(gradient).all()):
        raise CaptureError(
            f"{name or 'the head'}: the gradient of calibration window {state.windows[0]} is not finite; set the bits "
            "by --override instead of --target-bits"
        )
    return gradient
