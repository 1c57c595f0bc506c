"""What both ways of running a block share: the stops, and adding an input to a stop's statistics."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hessquant.calibration.prelude import BatchState
from hessquant.core import hessian
from hessquant.core.hessian import HessianStatistics
from hessquant.errors import CaptureError, NonFiniteError
from hessquant.models.watch import Product, Watch


@dataclass(frozen=True)
class Stop:
    """Weights that see the same inputs, and so share one Hessian.

    Attributes:
        members: Parameter names; the first is the one the forward pass reaches first.
    """

    members: tuple[str, ...]

    @property
    def leader(self) -> str:
        """The member at which the inputs are collected."""
        return self.members[0]


SolveStop = Callable[[tuple[str, ...], HessianStatistics], None]
"""Quantize a stop's members (parameter names) in place, given the statistics of their inputs."""


class Collector:
    """Statistics per stop of one block, from the batches that have reached it."""

    def __init__(self, stops: tuple[Stop, ...]) -> None:
        self.stops = stops
        self.stop_of = {member: stop for stop in stops for member in stop.members}
        self.solved: set[str] = set()
        self._statistics: dict[str, HessianStatistics] = {}

    def add(self, stop: Stop, product: Product, batch: BatchState) -> None:
        """Add one product's inputs to a stop's statistics.

        Raises:
            NonFiniteError: If an input is NaN or Inf; names the weight, the window and the channel.
        """
        rows = product.inputs.reshape(-1, product.inputs.shape[-1])
        statistics = self._statistics.get(stop.leader) or HessianStatistics.empty(
            rows.shape[1], torch.float64 if rows.dtype == torch.float64 else torch.float32
        )
        try:
            self._statistics[stop.leader] = hessian.add(statistics, rows, out=statistics.sum)
        except NonFiniteError as error:
            raise _named(error, stop.leader, rows, batch) from error

    def take(self, stop: Stop) -> HessianStatistics:
        """Give up a stop's statistics, and count it as solved.

        Raises:
            CaptureError: If no batch has reached it.
        """
        if stop.leader not in self._statistics:
            raise CaptureError(f"no calibration token reached {stop.leader}; the forward pass did not go as planned")
        self.solved.add(stop.leader)
        return self._statistics.pop(stop.leader)


class _Reached(Exception):
    """The stop has been reached; the rest is not needed."""


def collect_until(
    stop: Stop, collector: Collector, batch: BatchState, parameters: Mapping[str, Tensor], run: Callable[[], object]
) -> None:
    """Run as far as a stop, and add the inputs of one batch there."""

    def observe(product: Product) -> None:
        if product.name == stop.leader:
            collector.add(stop, product, batch)
            raise _Reached

    with suppress(_Reached), torch.no_grad(), Watch(parameters, observe):
        run()


class SameInputs:
    """Checks, within one batch, that the members of a stop really see one input tensor."""

    def __init__(self) -> None:
        self._sources: dict[str, Tensor] = {}
        self._followers: dict[str, set[str]] = {}

    def check(self, stop: Stop, product: Product) -> None:
        """Remember the leader's input until the last follower has come; compare each follower's with it.

        Raises:
            CaptureError: If a follower sees another tensor than its leader.
        """
        if product.name == stop.leader:
            followers = set(stop.members) - {stop.leader}
            if followers:
                self._sources[stop.leader], self._followers[stop.leader] = product.source, followers
            return
        if self._sources.get(stop.leader) is not product.source:
            raise CaptureError(
                f"{product.name} was planned to see the same inputs as {stop.leader}, but does not in this batch"
            )
        self._followers[stop.leader].discard(product.name)
        if not self._followers[stop.leader]:
            # An input is large; none is kept alive for longer than it must be.
            del self._sources[stop.leader], self._followers[stop.leader]


def _named(error: NonFiniteError, name: str, rows: Tensor, batch: BatchState) -> NonFiniteError:
    token, channel = error.place or (0, 0)
    per_window = len(rows) // len(batch.windows)
    if len(rows) == batch.hidden.shape[:-1].numel():
        where = f"window {batch.windows[token // per_window]}, token {token % per_window}"
    else:
        where = f"one of windows {batch.windows[0]} to {batch.windows[-1]}"
    return NonFiniteError(
        f"{name}: the input is {float(rows[token, channel])} in calibration {where}, channel {channel}; "
        "look at that window's text or at the layers before; more damping does not help",
        (token, channel),
    )
