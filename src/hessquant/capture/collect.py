"""What both ways of running a segment share: adding inputs to the statistics of their stops."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent
from torch import Tensor, nn

from hessquant.capture.across import seen_by_all
from hessquant.capture.prelude import Tokens
from hessquant.capture.segments import B, Segment
from hessquant.capture.stops import InputGroup, Key, Stop
from hessquant.core.gram import WeightedTokens
from hessquant.core.hessian import HessianAccumulator, HessianStatistics, first_token_weights, settle
from hessquant.errors import CaptureError, NonFiniteError
from hessquant.models.experts import through_every_expert
from hessquant.models.watch import Product, Watch
from hessquant.ranks import ALONE, Ranks

QuantizeStop = Callable[[Stop, dict[str, HessianStatistics]], None]
"""Quantizes a stop's members in place, given the statistics of each group's inputs by its leader. They are given up: a
group's are taken out once its mean Hessian is made, since both do not fit where one is large."""


class Collector:
    """Statistics of the stops of one segment, from the batches that have reached them.

    Attributes:
        stops: All stops of the segment, in the order that the forward pass reaches them.
        quantized: Leaders of those that are quantized.

    Args:
        stops: The stops.
        parameters: The segment's parameters by name; what is multiplied with them is seen.
        every_expert: Whether experts see every token while inputs are collected, and not only those routed to them.
        ranks: The processes that collect, each from batches of its own.
    """

    def __init__(
        self,
        stops: tuple[Stop, ...],
        parameters: Mapping[str, Tensor],
        *,
        every_expert: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        self.stops, self._ranks = stops, ranks
        self._parameters = parameters
        self.quantized: set[str] = set()
        self._every_expert = every_expert
        self._stop_of: dict[str, Stop] = {}
        self._group_of: dict[Key, InputGroup] = {}
        for stop in stops:
            for group in stop.groups:
                for parameter, piece in group.keys:
                    self._stop_of[parameter] = stop
                    self._group_of[parameter, piece] = group
        self._accumulators: dict[str, HessianAccumulator] = {}
        self._added: dict[str, list[_Rows]] = {}
        self._module_calls: dict[tuple[object, str], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._modules: dict[str, nn.Module] = {}

    def watch(self, observer: Callable[[Product], None]) -> Watch:
        """Shows every product with one of the segment's parameters, while it is entered."""
        return Watch(self._parameters, observer)

    def stop_at(self, product: Product) -> Stop | None:
        """The stop that a product belongs to, quantized or not.

        Raises:
            CaptureError: If it is not with a whole matrix, which the plan did not see.
        """
        stop = self._stop_of.get(product.name)
        if stop is not None and not product.pieces:
            raise CaptureError(f"{product.name} was planned to be multiplied whole, but is not in this batch")
        return stop

    @contextmanager
    def noting_calls(self, module: nn.Module, name: str) -> Iterator[None]:
        """Inside, what modules with stacked experts are called with is noted, so that they can be run once more.

        Args:
            module: What is run.
            name: Its name; empty for the model.
        """
        hooks = []
        for stop in self.stops:
            if stop.module:
                owner = self._modules[stop.module] = module.get_submodule(stop.module.removeprefix(f"{name}."))

                def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], at: str = stop.module) -> None:
                    self._module_calls[getcurrent(), at] = args, kwargs

                hooks.append(owner.register_forward_pre_hook(note, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._module_calls.clear()

    def collect(self, stop: Stop, product: Product, batch: Tokens) -> None:
        """Add the inputs of one batch at a stop that it has just reached.

        Raises:
            NonFiniteError: If an input is NaN or Inf; names the weight, the window and the channel.
        """
        if not stop.module:
            self.add(product, batch)
            return
        args, kwargs = self._module_calls.pop((getcurrent(), stop.module))
        if self._every_expert:
            args, kwargs = through_every_expert(stop.module, args, kwargs, product.pieces)

        def observe(other: Product) -> None:
            if self.stop_at(other) is stop:
                self.add(other, batch)

        # Run once to collect for all its experts; what it returns is of no use, its weights are about to change.
        with torch.no_grad(), self.watch(observe):
            self._modules[stop.module].forward(*args, **kwargs)

    def add(self, product: Product, batch: Tokens) -> None:
        """Add one product's inputs to the statistics of its group, if it is the group's first matrix.

        Raises:
            NonFiniteError: If an input is NaN or Inf; on an accelerator, `take` raises it.
        """
        pieces = range(len(product.inputs)) if product.piece is None else (product.piece,)
        keys = {piece: (product.name, piece) for piece in pieces}
        led = {piece: self._group_of[key] for piece, key in keys.items() if key in self._group_of}
        led = {piece: group for piece, group in led.items() if group.keys[0] == keys[piece]}
        for piece, inputs, rows in _pieces(product) if led else ():
            if piece not in led:
                continue
            group = led[piece]
            accumulator = self._accumulators.setdefault(group.leader, HessianAccumulator())
            self._added.setdefault(group.leader, []).append(_Rows(len(rows), batch.windows, batch.tokens))
            with self._naming(group.leader):
                accumulator.add(rows, weights_for(inputs, batch) if group.weighted else None)

    def take(self, stop: Stop) -> dict[str, HessianStatistics]:
        """Give up a stop's statistics by the leader of each group, and count it as quantized.

        Several processes call this together; what each has then is `across.seen_by_all`.

        Raises:
            CaptureError: If no batch has reached it.
            NonFiniteError: If an input was NaN or Inf; names the weight, the window and the channel.
        """
        leaders = [group.leader for group in stop.groups]
        reached: dict[str, HessianStatistics] = {}
        settle([self._accumulators[leader] for leader in leaders if leader in self._accumulators])
        for leader in leaders:
            with self._naming(leader):
                statistics = self._accumulators.pop(leader).take() if leader in self._accumulators else None
            self._added.pop(leader, None)
            if statistics is not None:
                reached[leader] = statistics
        reached = seen_by_all(stop, reached, self._parameters, self._ranks)
        if not stop.may_be_skipped and (not reached or (len(reached) < len(leaders) and not stop.module)):
            raise CaptureError(f"no calibration token reached {stop.leader}; the forward pass did not go as planned")
        self.quantized.add(stop.leader)
        return reached

    @contextmanager
    def _naming(self, leader: str) -> Iterator[None]:
        """Inside, an input that is not finite is named by its window."""
        try:
            yield
        except NonFiniteError as error:
            raise _named(error, leader, self._added[leader]) from error


@dataclass(frozen=True)
class _Rows:
    """What is to be known of a batch's inputs once they are added, should one of them not be finite.

    Attributes:
        rows: How many they are.
        windows: Index of each of the batch's windows among all.
        tokens: Tokens in the batch.
    """

    rows: int
    windows: tuple[int, ...]
    tokens: int


class _Reached(Exception):
    """The stop has been reached; the rest is not needed."""


def collect_until(stop: Stop, collector: Collector, batch: Tokens, run: Callable[[], object]) -> None:
    """Run as far as a stop, and add the inputs of one batch there."""

    def observe(product: Product) -> None:
        if collector.stop_at(product) is stop:
            collector.collect(stop, product, batch)
            raise _Reached

    with suppress(_Reached), torch.no_grad(), collector.watch(observe):
        run()


def quantize_looped(segment: Segment[B], batches: Sequence[B], collector: Collector, quantize: QuantizeStop) -> int:
    """Quantize the matrices that a forward pass comes back to, from the inputs of all their calls.

    No pass may wait at such a matrix, so one pass collects, before any weight of the segment is changed.

    Returns:
        Forward passes per window that it took.
    """
    looped = [stop for stop in collector.stops if stop.is_looped]
    for batch in batches if looped else ():

        def observe(product: Product, batch: B = batch) -> None:
            stop = collector.stop_at(product)
            if stop is not None and stop.is_looped:
                collector.add(product, batch)

        with torch.no_grad(), collector.watch(observe):
            segment.run(batch)
    for stop in looped:
        quantize(stop, collector.take(stop))
    return 1 if looped else 0


class SameInputs:
    """Checks, within one batch, that the members of a group really see one input tensor."""

    def __init__(self) -> None:
        self._sources: dict[str, Tensor] = {}
        self._followers: dict[str, set[Key]] = {}

    def check(self, stop: Stop, product: Product) -> None:
        """Remember the leader's input until the last follower has come; compare each follower's with it.

        Raises:
            CaptureError: If a follower sees another tensor than its leader.
        """
        if stop.module or stop.is_looped:
            return
        (group,) = stop.groups
        if product.name == group.keys[0][0]:
            followers = set(group.keys[1:])
            if followers:
                self._sources[stop.leader], self._followers[stop.leader] = product.source, followers
            return
        if self._sources.get(stop.leader) is not product.source:
            raise CaptureError(
                f"{product.name} was planned to see the same inputs as {group.keys[0][0]}, but does not in this batch"
            )
        self._followers[stop.leader].discard((product.name, 0))
        if not self._followers[stop.leader]:
            # An input is large; none is kept alive for longer than it must be.
            del self._sources[stop.leader], self._followers[stop.leader]


def weights_for(inputs: Tensor, batch: Tokens) -> WeightedTokens | None:
    """What tokens count in the Hessian of weights that feed attention, for the tokens that `inputs` hold.

    Args:
        inputs: What a weight is multiplied with: [windows, length, columns], or the same flattened to two dimensions.
        batch: The batch that they are of; its windows are all of one length.

    Returns:
        None = all alike, where it is not known which token a row belongs to.
    """
    windows = len(batch.windows)
    if inputs.ndim == 3 and len(inputs) == windows:
        return first_token_weights(inputs.shape[1])
    if inputs.ndim == 2 and len(inputs) == batch.tokens:
        return first_token_weights(batch.tokens // windows)
    # Tokens were chosen, repeated or ordered otherwise.
    return None


def _pieces(product: Product) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Inputs of each matrix that a product multiplies: as they are, and the rows that count, [tokens, columns].

    Where all matrices of a stack are multiplied at once, tokens of other experts are rows of zeros. Which are not, an
    accelerator is asked for all matrices at once.
    """
    columns = product.inputs.shape[-1]
    if product.piece is not None:
        yield product.piece, product.inputs, product.inputs.reshape(-1, columns)
        return
    rows = product.inputs.reshape(len(product.inputs), -1, columns)
    routed = rows.any(dim=2)
    tokens = torch.split(routed.nonzero()[:, 1], routed.sum(1).tolist())
    for piece, inputs in enumerate(product.inputs):
        yield piece, inputs, rows[piece].index_select(0, tokens[piece])


def _named(error: NonFiniteError, name: str, added: Sequence[_Rows]) -> NonFiniteError:
    token, channel = error.place or (0, 0)
    batch = 0
    while token >= added[batch].rows:
        token -= added[batch].rows
        batch += 1
    rows, windows = added[batch].rows, added[batch].windows
    per_window = rows // len(windows)
    if rows == added[batch].tokens:
        where = f"window {windows[token // per_window]}, token {token % per_window}"
    else:
        where = f"one of windows {windows[0]} to {windows[-1]}"
    return NonFiniteError(
        f"{name}: the input is {error.value} in calibration {where}, channel {channel}; "
        "look at that window's text or at the layers before; more damping does not help",
        (token, channel),
        error.value,
    )
