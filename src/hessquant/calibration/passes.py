"""Several passes per block, each ending at the weight it is for.

Slower than `forward_once`, but nothing is held between the weights of a block. Gives the same codes.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from hessquant.calibration.collect import Collector, SameInputs, SolveStop, collect_until, solve_looped
from hessquant.calibration.prelude import BatchRun
from hessquant.models.watch import Product, Watch


def run_block_in_passes(
    block: nn.Module,
    index: int,
    batches: Sequence[BatchRun],
    collector: Collector,
    parameters: Mapping[str, Tensor],
    solve: SolveStop,
) -> int:
    """Take all batches through one block: one early-stopping pass per stop, and a last one for the outputs.

    Arguments and errors are those of `forward_once.run_block_once`.

    Returns:
        Forward passes begun per window: the number of stops and one.
    """
    passes = solve_looped(collector, batches, parameters, lambda batch: batch.run(index, block), solve)
    for stop in collector.stops:
        if stop.is_looped:
            continue
        for batch in batches:
            collect_until(stop, collector, batch, parameters, partial(batch.run, index, block))
        solve(stop, collector.take(stop))
        passes += 1
    for batch in batches:
        same_inputs = SameInputs()

        def check(product: Product, same_inputs: SameInputs = same_inputs) -> None:
            stop = collector.stop_at(product)
            if stop is not None:
                same_inputs.check(stop, product)

        with torch.no_grad(), Watch(parameters, check):
            batch.advance(index, block)
    return passes + 1


@torch.no_grad()
def replay_block(block: nn.Module, index: int, batches: Sequence[BatchRun]) -> None:
    """Take all batches through a block that is quantized already."""
    for batch in batches:
        batch.advance(index, block)
