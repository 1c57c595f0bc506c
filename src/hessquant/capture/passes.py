"""Several passes per segment, each ending at the weight it is for.

Slower than `once`, but nothing is held between the weights of a segment. Gives the same codes.
"""

from collections.abc import Sequence
from functools import partial

import torch

from hessquant.capture.collect import Collector, QuantizeStop, SameInputs, collect_until, quantize_looped
from hessquant.capture.segments import B, Segment
from hessquant.models.watch import Product


def run_in_passes(segment: Segment[B], batches: Sequence[B], collector: Collector, quantize: QuantizeStop) -> int:
    """Take all batches through a segment: one early-stopping pass per stop, and a last one for its outputs.

    Arguments and errors are those of `once.run_once`.

    Returns:
        Forward passes begun per window: the number of stops, and one if the segment has outputs.
    """
    passes = quantize_looped(segment, batches, collector, quantize)
    for stop in collector.stops:
        if stop.is_looped:
            continue
        for batch in batches:
            collect_until(stop, collector, batch, partial(segment.run, batch))
        quantize(stop, collector.take(stop))
        passes += 1
    if not segment.has_outputs:
        return passes
    for batch in batches:
        same_inputs = SameInputs()

        def check(product: Product, same_inputs: SameInputs = same_inputs) -> None:
            stop = collector.stop_at(product)
            if stop is not None:
                same_inputs.check(stop, product)

        with torch.no_grad(), collector.watch(check):
            segment.advance(batch)
    return passes + 1
