"""What the model passes to its blocks: recorded once, replayed block by block.

The model runs with stand-ins for its blocks. A stand-in notes its arguments and hands the hidden state on unchanged, so
everything that is not the hidden state (masks, rotary tables, whatever a layer type needs) is recorded exactly as the
model passes it, per block; the last stand-in ends the pass, so that the head does not run.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hessquant.calibration.batches import Batch
from hessquant.errors import CaptureError
from hessquant.models.library import run_model
from hessquant.models.stand_ins import BlockArguments, record_calls

_CANDIDATES = 8

# Of models and of torch. Not every `Exception`: those that end a pass at a stop, and our own, go through.
_MODEL_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def run_batch(model: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch.

    Raises:
        CaptureError: If its code fails on these inputs; names the first window.
    """
    try:
        return run_model(model, batch.inputs)
    except torch.OutOfMemoryError:  # of which the window is not to blame
        raise
    except _MODEL_ERRORS as error:
        place = batch.place or f"calibration window {batch.windows[0]}"
        raise CaptureError(
            f"{place}: the model fails on {', '.join(batch.inputs)}: {type(error).__name__}: {error}; mend it or "
            "leave it out"
        ) from error


class Tokens(Protocol):
    """What a batch must tell whoever collects from it."""

    @property
    def windows(self) -> tuple[int, ...]:
        """Index of each window among all."""

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""


@dataclass
class BatchState:
    """One batch on its way through the blocks.

    Attributes:
        batch: The model's inputs.
        hidden: Hidden state that enters the next block, [windows, length, hidden]; overwritten block by block.
            It may be on the host, where the device has no room for those of all batches.
        arguments: The other arguments, per block.
    """

    batch: Batch
    hidden: Tensor
    arguments: tuple[BlockArguments, ...]

    @property
    def windows(self) -> tuple[int, ...]:
        """Index of each window among all."""
        return self.batch.windows

    @property
    def entering(self) -> Tensor:
        """The hidden state where the model runs; on the way there, if it is on the host."""
        return self.hidden.to(self.batch.device, non_blocking=True)

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return self.hidden.shape[:-1].numel()


def record_arguments(
    model: nn.Module,
    blocks: Sequence[str],
    returns_tuple: Sequence[bool],
    batches: Sequence[Batch],
    keep: Callable[[Tensor], Tensor] = Tensor.clone,
) -> list[BatchState]:
    """Run everything before the first block on every batch, and note what each block is passed.

    Args:
        model: A model, called with the inputs of a batch.
        blocks: Module names of its blocks, in order.
        returns_tuple: Whether each block returns a tuple.
        batches: Model inputs.
        keep: Gives the copy of a hidden state that its batch will own.

    Raises:
        CaptureError: If the blocks are not called one after another, each with the hidden state of the one before.
    """
    states, interned = [], _Interned()
    for batch in batches:
        with torch.no_grad():
            calls = record_calls(model, blocks, returns_tuple, partial(run_batch, model, batch))
        states.append(BatchState(batch, keep(calls[0][0]), interned.arguments(arguments for _, arguments in calls)))
    return states


class _Interned:
    """Makes arguments that are equal one object: masks and rotary tables are the same for every batch of a shape.

    Values are compared once per object, which is passed to many blocks: an accelerator is waited for each time.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[torch.Size, torch.dtype], deque[Tensor]] = {}

    def arguments(self, calls: Iterable[BlockArguments]) -> tuple[BlockArguments, ...]:
        """The arguments of a batch's blocks, with a tensor that was seen before in place of an equal one."""
        seen: dict[int, tuple[Tensor, Tensor]] = {}
        return tuple(
            BlockArguments(
                tuple(self._value(value, seen) for value in call.args),
                {name: self._value(value, seen) for name, value in call.kwargs.items()},
                call.by_keyword,
            )
            for call in calls
        )

    def _value(self, value: Any, seen: dict[int, tuple[Tensor, Tensor]]) -> Any:
        """An argument.

        Args:
            value: The argument, as the model passes it.
            seen: By the id of each tensor of this batch: the tensor, whose id is its own as long as it is here, and
                what takes its place.
        """
        if isinstance(value, Tensor):
            if id(value) not in seen:
                seen[id(value)] = value, self._equal(value)
            return seen[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(self._value(item, seen) for item in value)
        return value

    def _equal(self, value: Tensor) -> Tensor:
        # Only a few of its kind are compared: what differs per batch must not be compared with all before.
        latest = self._latest.setdefault((value.shape, value.dtype), deque(maxlen=_CANDIDATES))
        for candidate in latest:
            if candidate is value or torch.equal(candidate, value):
                return candidate
        latest.append(value)
        return value
