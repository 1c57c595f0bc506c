"""From the last block to the head: its inputs are collected and it is quantized. No logits are computed."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from hessquant.calibration.batches import Batch
from hessquant.calibration.collect import Collector, SolveStop, Stop, collect_until
from hessquant.calibration.prelude import BatchState, BlockArguments, stand_ins


def run_head(
    model: nn.Module,
    blocks: Sequence[str],
    returns_tuple: Sequence[bool],
    batches: Sequence[Batch],
    states: Sequence[BatchState],
    parameters: Mapping[str, Tensor],
    solve: SolveStop,
) -> None:
    """Quantize the head.

    Args:
        model: What is outside its blocks is in memory.
        blocks: Module names of its blocks.
        returns_tuple: Whether each block returns a tuple.
        batches: Token ids.
        states: The same batches, as the last block left them.
        parameters: The head's parameter under its name.
        solve: Quantizes it in place.

    Raises:
        CaptureError: If the head is never reached.
        NonFiniteError: If an input is NaN or Inf.
    """
    stop = Stop(tuple(parameters))
    collector = Collector((stop,))
    for batch, state in zip(batches, states, strict=True):

        def leave_blocks(index: int, hidden: Tensor, _: BlockArguments, state: BatchState = state) -> Tensor:
            return state.hidden if index == len(blocks) - 1 else hidden

        with stand_ins(model, blocks, returns_tuple, leave_blocks):
            run = partial(model, input_ids=batch.ids, use_cache=False)
            collect_until(stop, collector, state, parameters, run)
    solve(stop.members, collector.take(stop))
