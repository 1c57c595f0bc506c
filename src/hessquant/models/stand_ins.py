"""A model run without its blocks: whoever stands in for them sees what the model passes to each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hessquant.errors import CaptureError

_HIDDEN = "hidden_states"


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


class _LastReached(Exception):
    """The last block has been reached; the rest is not needed."""


def record_calls(
    model: nn.Module, blocks: Sequence[str], returns_tuple: Sequence[bool], run: Callable[[], object]
) -> list[tuple[Tensor, BlockArguments]]:
    """Run a model as far as its last block, with stand-ins that hand the hidden state on, and note what each is passed.

    Args:
        model: The model.
        blocks: Module names of its blocks, in order.
        returns_tuple: Whether each block returns a tuple.
        run: Runs the model.

    Returns:
        Hidden state and other arguments of each block's call.

    Raises:
        CaptureError: If the blocks are not called one after another, each once and with the hidden state of the one
            before, so that the calls cannot be replayed block by block.
    """
    calls: list[tuple[Tensor, BlockArguments]] = []

    def note(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
        if index != len(calls):
            raise CaptureError(f"{blocks[index]} is not called in the order of the blocks, or more than once")
        # Stand-ins are the identity: whatever else arrives was made between blocks, where nothing replays it.
        if calls and hidden is not calls[0][0]:
            raise CaptureError(f"the model changes the hidden state between blocks, before {blocks[index]}")
        calls.append((hidden, arguments))
        if len(calls) == len(blocks):
            raise _LastReached
        return hidden

    with stand_ins(model, blocks, returns_tuple, note), suppress(_LastReached):
        run()
    if len(calls) < len(blocks):
        raise CaptureError(f"the forward pass does not reach {blocks[len(calls)]}")
    return calls
