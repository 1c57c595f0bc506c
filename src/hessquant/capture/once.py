"""One forward pass per segment, with true-sequential semantics.

Each batch runs the segment as a coroutine of its own. At a stop not solved yet, a batch adds its inputs to the stop's
statistics and waits until all batches have come as far; then the stop's weights are quantized in place and all go on
with the quantized ones. So one pass collects, gives later weights the inputs that earlier quantized weights made, and
yields the next segment's hidden states.

The coroutines are greenlets, since the model is not ours to make async: one operating-system thread, so one OpenMP pool
and one malloc arena (`docs/decisions/0003-greenlets.md`).
"""

from collections.abc import Sequence
from typing import Generic

import torch
from greenlet import getcurrent, greenlet

from hessquant.capture.collect import Collector, QuantizeStop, SameInputs, quantize_looped
from hessquant.capture.segments import B, Segment
from hessquant.capture.stops import Stop
from hessquant.models.watch import Product


class _Walker(Generic[B]):
    """One batch in the segment. `step` lets it run to its next stop or to its end, while the caller waits.

    A walker is suspended only inside the watch's observer. There torch has taken the watch off its stack of function
    modes, so a suspended walker leaves that stack as it found it.
    """

    def __init__(self, segment: Segment[B], batch: B, collector: Collector) -> None:
        self._segment, self._batch, self._collector = segment, batch, collector
        self._same_inputs = SameInputs()
        self._caller = getcurrent()
        self._coroutine = greenlet(self._run)
        self.waits_at: Stop | None = None

    def step(self) -> None:
        """Let the batch run to its next stop or its end; raises whatever the model raises."""
        self.waits_at = None
        self._coroutine.switch()

    def cancel(self) -> None:
        """End the batch where it waits."""
        self._coroutine.throw()

    def _run(self) -> None:
        with self._collector.watch(self._observe):
            self._segment.advance(self._batch)

    def _observe(self, product: Product) -> None:
        stop = self._collector.stop_at(product)
        if stop is None:
            return
        self._same_inputs.check(stop, product)
        if stop.leader in self._collector.quantized:
            return
        self._collector.collect(stop, product, self._batch)
        self.waits_at = stop
        self._caller.switch()


@torch.no_grad()
def run_once(segment: Segment[B], batches: Sequence[B], collector: Collector, quantize: QuantizeStop) -> int:
    """Take all batches through a segment, quantizing its weights on the way.

    Args:
        segment: The segment; its parameters are changed in place by `quantize`.
        batches: Each is made ready for the next segment.
        collector: Has the segment's stops, in the order that the forward pass reaches them.
        quantize: Quantizes a stop's members in place.

    Returns:
        Forward passes of the segment per window: 1, and 1 more if it comes back to some of its matrices.

    Raises:
        CaptureError: If a stop is never reached, or its members do not share inputs.
        NonFiniteError: If an input is NaN or Inf.
    """
    passes = quantize_looped(segment, batches, collector, quantize)
    walkers = [_Walker(segment, batch, collector) for batch in batches]
    try:
        # A batch may skip a stop, but none comes back to an earlier one: once every batch waits or has ended, the
        # earliest stop waited at is complete.
        for walker in walkers:
            walker.step()
        for stop in collector.stops:
            if stop.is_looped:
                continue
            quantize(stop, collector.take(stop))
            for walker in walkers:
                if walker.waits_at is stop:
                    walker.step()
    finally:
        for walker in walkers:
            walker.cancel()
    return passes + 1
