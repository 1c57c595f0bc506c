"""Several passes per block, each ending at the weight it is for.

Slower than `forward_once`, but nothing is held between the weights of a block. Gives the same codes.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hessquant.calibration.collect import Collector, SameInputs, SolveStop, Stop, collect_until
from hessquant.calibration.prelude import BatchState
from hessquant.models.watch import Product, Watch


def run_block_in_passes(
    block: nn.Module,
    index: int,
    batches: Sequence[BatchState],
    stops: tuple[Stop, ...],
    parameters: Mapping[str, Tensor],
    solve: SolveStop,
) -> int:
    """Take all batches through one block: one early-stopping pass per stop, and a last one for the outputs.

    Arguments and errors are those of `forward_once.run_block_once`.

    Returns:
        Forward passes begun per window: the number of stops and one.
    """
    collector = Collector(stops)
    for stop in stops:
        for batch in batches:
            run = partial(batch.arguments[index].call, block, batch.hidden)
            collect_until(stop, collector, batch, parameters, run)
        solve(stop.members, collector.take(stop))
    for batch in batches:
        same_inputs = SameInputs()

        def check(product: Product, same_inputs: SameInputs = same_inputs) -> None:
            if product.name in collector.stop_of:
                same_inputs.check(collector.stop_of[product.name], product)

        with torch.no_grad(), Watch(parameters, check):
            batch.advance(index, block)
    return len(stops) + 1


@torch.no_grad()
def replay_block(block: nn.Module, index: int, batches: Sequence[BatchState]) -> None:
    """Take all batches through a block that is quantized already."""
    for batch in batches:
        batch.advance(index, block)
