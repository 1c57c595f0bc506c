"""One forward pass per block, with true-sequential semantics.

Each batch runs the block as a coroutine of its own. At a stop not solved yet, a batch adds its inputs to the stop's
statistics and waits until all batches have come as far; then the stop's weights are quantized in place and all go on
with the quantized ones. So one pass collects, gives later weights the inputs that earlier quantized weights made, and
yields the next block's hidden states.

The coroutines are greenlets, since the block is not ours to make async: one operating-system thread, so one OpenMP pool
and one malloc arena (`docs/decisions/0003-greenlets.md`).
"""

from collections.abc import Mapping, Sequence

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from hessquant.calibration.collect import Collector, SameInputs, SolveStop, solve_looped
from hessquant.calibration.prelude import BatchRun
from hessquant.calibration.stops import Stop
from hessquant.models.watch import Product, Watch


class _Walker:
    """One batch in the block. `step` lets it run to its next stop or to its end, while the caller waits.

    A walker is suspended only inside the watch's observer. There torch has taken the watch off its stack of function
    modes, so a suspended walker leaves that stack as it found it.
    """

    def __init__(
        self, block: nn.Module, index: int, batch: BatchRun, parameters: Mapping[str, Tensor], collector: Collector
    ) -> None:
        self._block, self._index, self._batch = block, index, batch
        self._parameters, self._collector = parameters, collector
        self._same_inputs = SameInputs()
        self._caller = getcurrent()
        self._coroutine = greenlet(self._run)
        self.waits_at: Stop | None = None

    def step(self) -> None:
        """Let the batch run to its next stop or its end; raises whatever the block raises."""
        self.waits_at = None
        self._coroutine.switch()

    def cancel(self) -> None:
        """End the batch where it waits."""
        self._coroutine.throw()

    def _run(self) -> None:
        batch = self._batch
        with Watch(self._parameters, self._observe):
            batch.advance(self._index, self._block)

    def _observe(self, product: Product) -> None:
        stop = self._collector.stop_at(product)
        if stop is None:
            return
        self._same_inputs.check(stop, product)
        if stop.leader in self._collector.solved:
            return
        self._collector.collect(stop, product, self._batch, self._parameters)
        self.waits_at = stop
        self._caller.switch()


@torch.no_grad()
def run_block_once(
    block: nn.Module,
    index: int,
    batches: Sequence[BatchRun],
    collector: Collector,
    parameters: Mapping[str, Tensor],
    solve: SolveStop,
) -> int:
    """Take all batches through one block, quantizing its weights on the way.

    Args:
        block: The block; its parameters are changed in place by `solve`.
        index: Its place among the blocks.
        batches: Their hidden states are replaced by the block's outputs.
        collector: Has the block's stops, in the order that the forward pass reaches them.
        parameters: The block's parameters by name.
        solve: Quantizes a stop's members in place.

    Returns:
        Forward passes of the block per window: 1, and 1 more if it comes back to some of its matrices.

    Raises:
        CaptureError: If a stop is never reached, or its members do not share inputs.
        NonFiniteError: If an input is NaN or Inf.
    """
    passes = solve_looped(collector, batches, parameters, lambda batch: batch.run(index, block), solve)
    walkers = [_Walker(block, index, batch, parameters, collector) for batch in batches]
    try:
        # A batch may skip a stop, but none comes back to an earlier one: once every batch waits or has ended, the
        # earliest stop waited at is complete.
        for walker in walkers:
            walker.step()
        for stop in collector.stops:
            if stop.is_looped:
                continue
            solve(stop, collector.take(stop))
            for walker in walkers:
                if walker.waits_at is stop:
                    walker.step()
    finally:
        for walker in walkers:
            walker.cancel()
    return passes + 1
