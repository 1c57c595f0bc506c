"""What the model passes to its blocks: recorded once, replayed block by block.

The model runs with stand-ins for its blocks. A stand-in notes its arguments and hands the hidden state on unchanged, so
everything that is not the hidden state (masks, rotary tables, whatever a layer type needs) is recorded exactly as the
model passes it, per block; the last stand-in ends the pass, so that the head does not run.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hessquant.calibration.batches import Batch
from hessquant.errors import CaptureError

_HIDDEN = "hidden_states"
_CANDIDATES = 8


@dataclass(frozen=True)
class BlockArguments:
    """Arguments of one block for one batch, without the hidden state.

    Attributes:
        args: Positional arguments after the hidden state.
        kwargs: Keyword arguments.
        by_keyword: Whether the hidden state is passed as a keyword.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_keyword: bool

    def call(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Run the block and give the hidden state it returns."""
        if self.by_keyword:
            output = block(*self.args, **{_HIDDEN: hidden}, **self.kwargs)
        else:
            output = block(hidden, *self.args, **self.kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            raise CaptureError(f"block {type(block).__name__} returned {type(first).__name__}, not a hidden state")
        return first


@dataclass
class BatchState:
    """One batch on its way through the model.

    Attributes:
        hidden: Hidden state that enters the next block, [windows, length, hidden]; overwritten block by block.
        arguments: The other arguments, per block.
        windows: Index of each window among all.
    """

    hidden: Tensor
    arguments: tuple[BlockArguments, ...]
    windows: tuple[int, ...]

    def advance(self, index: int, block: nn.Module) -> None:
        """Run one block, and put the hidden state that it returns in the place of the one that went in.

        Raises:
            CaptureError: If it returns another shape.
        """
        output = self.arguments[index].call(block, self.hidden)
        if output.shape != self.hidden.shape:
            raise CaptureError(
                f"block {index} ({type(block).__name__}) turns a hidden state {list(self.hidden.shape)} into "
                f"{list(output.shape)}"
            )
        self.hidden.copy_(output)


class _PreludeDone(Exception):
    """The last block has been reached."""


OnCall = Callable[[int, Tensor, BlockArguments], Tensor]
"""Told of a call of the block with this index; gives the hidden state that it is to return."""


class _StandIn(nn.Module):
    """Takes a block's place: whoever is told of its calls says what it returns."""

    def __init__(self, block: nn.Module, index: int, returns_tuple: bool, on_call: OnCall):
        super().__init__()
        self._block = [block]  # in a list, so that it is not registered as a submodule
        self._index, self._returns_tuple, self._on_call = index, returns_tuple, on_call

    def __getattr__(self, name: str) -> Any:
        """Attributes that the model reads off its blocks, such as a layer's attention type."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        by_keyword = _HIDDEN in kwargs
        hidden = kwargs.pop(_HIDDEN) if by_keyword else args[0] if args else None
        if not isinstance(hidden, Tensor):
            raise CaptureError(f"block {type(self._block[0]).__name__} is not called with a hidden state")
        rest = args if by_keyword else args[1:]
        result = self._on_call(self._index, hidden, BlockArguments(rest, dict(kwargs), by_keyword))
        return (result,) if self._returns_tuple else result


def record_arguments(
    model: nn.Module,
    blocks: Sequence[str],
    returns_tuple: Sequence[bool],
    batches: Sequence[Batch],
    keep: Callable[[Tensor], Tensor] = Tensor.clone,
) -> list[BatchState]:
    """Run everything before the first block on every batch, and note what each block is passed.

    Args:
        model: A causal language model, called as `model(input_ids=..., use_cache=False)`.
        blocks: Module names of its blocks, in order.
        returns_tuple: Whether each block returns a tuple.
        batches: Token ids.
        keep: Gives the copy of a hidden state that its batch will own.

    Raises:
        CaptureError: If the blocks are not called one after another, each with the hidden state of the one before.
    """
    calls: list[tuple[Tensor, BlockArguments]] = []
    states, interned = [], _Interned()

    def note(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
        calls.append((hidden, arguments))
        if index == len(blocks) - 1:
            raise _PreludeDone
        return hidden

    with stand_ins(model, blocks, returns_tuple, note), torch.no_grad():
        for batch in batches:
            calls.clear()
            with suppress(_PreludeDone):
                model(input_ids=batch.ids, use_cache=False)
            if len(calls) != len(blocks):
                raise CaptureError(
                    f"{len(calls)} of {len(blocks)} blocks were called; the model skips or repeats blocks"
                )
            # Stand-ins are the identity: whatever else arrives was made between blocks, where nothing replays it.
            for name, (hidden, _) in zip(blocks, calls, strict=True):
                if hidden is not calls[0][0]:
                    raise CaptureError(f"the model changes the hidden state between blocks, before {name}")
            arguments = tuple(interned.arguments(arguments) for _, arguments in calls)
            states.append(BatchState(keep(calls[0][0]), arguments, batch.windows))
    return states


class _Interned:
    """Makes arguments that are equal one object: masks and rotary tables are the same for every batch of a shape."""

    def __init__(self) -> None:
        self._latest: dict[tuple[torch.Size, torch.dtype], deque[Tensor]] = {}

    def arguments(self, arguments: BlockArguments) -> BlockArguments:
        """The arguments, with a tensor that was seen before in place of an equal one."""
        return BlockArguments(
            tuple(self._value(value) for value in arguments.args),
            {name: self._value(value) for name, value in arguments.kwargs.items()},
            arguments.by_keyword,
        )

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # Only a few of its kind are compared: what differs per batch must not be compared with all before.
            latest = self._latest.setdefault((value.shape, value.dtype), deque(maxlen=_CANDIDATES))
            for candidate in latest:
                if candidate is value or torch.equal(candidate, value):
                    return candidate
            latest.append(value)
        elif type(value) in (tuple, list):
            return type(value)(self._value(item) for item in value)
        return value


@contextmanager
def stand_ins(
    model: nn.Module, blocks: Sequence[str], returns_tuple: Sequence[bool], on_call: OnCall
) -> Iterator[None]:
    """Inside, the model runs without its blocks: `on_call` is asked in their place."""
    originals = {name: model.get_submodule(name) for name in blocks}
    try:
        for index, (name, block) in enumerate(originals.items()):
            model.set_submodule(name, _StandIn(block, index, returns_tuple[index], on_call))
        yield
    finally:
        for name, block in originals.items():
            model.set_submodule(name, block)
