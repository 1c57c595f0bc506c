"""A model run without its blocks: whoever stands in for them sees what the model passes to each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class BlockCalls:
    """Notes the calls of one forward pass with stand-ins, and checks that they can be replayed one after another.

    Attributes:
        calls: Hidden state and other arguments of each block.
    """

    def __init__(self, blocks: Sequence[str]) -> None:
        self._blocks = blocks
        self.calls: list[tuple[Tensor, BlockArguments]] = []

    def note(self, index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
        """Note one call; the hidden state goes on unchanged."""
        if index != len(self.calls):
            raise CaptureError(f"{self._blocks[index]} is not called in the order of the blocks, or more than once")
        # Stand-ins are the identity: whatever else arrives was made between blocks, where nothing replays it.
        if self.calls and hidden is not self.calls[0][0]:
            raise CaptureError(f"the model changes the hidden state between blocks, before {self._blocks[index]}")
        self.calls.append((hidden, arguments))
        return hidden

    @property
    def complete(self) -> bool:
        """Whether all blocks have been called."""
        return len(self.calls) == len(self._blocks)

    def check(self) -> None:
        """Refuse a pass that left blocks out.

        Raises:
            CaptureError: Naming the first.
        """
        if not self.complete:
            raise CaptureError(f"the forward pass does not reach {self._blocks[len(self.calls)]}")
