"""From the last block to the head: its inputs are collected and it is quantized. No logits are computed."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from hessquant.calibration.batches import Batch
from hessquant.calibration.collect import Collector, SolveStop, collect_until
from hessquant.calibration.prelude import BatchState
from hessquant.models.library import run_model
from hessquant.models.stand_ins import BlockArguments, stand_ins


def run_head(
    model: nn.Module,
    blocks: Sequence[str],
    returns_tuple: Sequence[bool],
    batches: Sequence[Batch],
    states: Sequence[BatchState],
    collector: Collector,
    parameters: Mapping[str, Tensor],
    solve: SolveStop,
) -> None:
    """Quantize the head.

    Args:
        model: What is outside its blocks is in memory.
        blocks: Module names of its blocks.
        returns_tuple: Whether each block returns a tuple.
        batches: Model inputs.
        states: The same batches, as the last block left them.
        collector: Has the head's stop.
        parameters: The model's parameters by name.
        solve: Quantizes it in place.

    Raises:
        CaptureError: If the head is never reached.
        NonFiniteError: If an input is NaN or Inf.
    """
    (stop,) = collector.stops
    for batch, state in zip(batches, states, strict=True):

        def leave_blocks(index: int, hidden: Tensor, _: BlockArguments, state: BatchState = state) -> Tensor:
            return state.hidden if index == len(blocks) - 1 else hidden

        with stand_ins(model, blocks, returns_tuple, leave_blocks):
            collect_until(stop, collector, state, parameters, partial(run_model, model, batch.inputs))
    solve(stop, collector.take(stop))
