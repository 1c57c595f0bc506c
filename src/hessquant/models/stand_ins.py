"""A model run without its blocks: whoever stands in for them sees what the model passes to each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hessquant.errors import CaptureError
from hessquant.models.watch import tensors_in, works_in_place

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


class _Relay(TorchFunctionMode):
    """While entered, notes whether anything is made of a tensor, or it is written to.

    Attributes:
        tensor: The tensor; None as long as there is none.
        used_by: The first function that did.
    """

    tensor: Tensor | None = None
    used_by: str = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function; one that only asks for a shape, or gives the tensor back as it is, makes nothing of it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(tensor is self.tensor for tensor in tensors_in(args, kwargs)):
            made = any(tensor is not self.tensor for tensor in tensors_in((result,)))
            if made or works_in_place(func):
                self.used_by = self.used_by or getattr(func, "__name__", str(func))
        return result


def record_calls(
    model: nn.Module,
    blocks: Sequence[str],
    returns_tuple: Sequence[bool],
    run: Callable[[], object],
    *,
    to_the_end: bool = False,
) -> list[tuple[Tensor, BlockArguments]]:
    """Run a model as far as its last block, with stand-ins that hand the hidden state on, and note what each is passed.

    Args:
        model: The model.
        blocks: Module names of its blocks, in order.
        returns_tuple: Whether each block returns a tuple.
        run: Runs the model.
        to_the_end: Run what comes after the last block too, and see that what any other returns goes to the next one,
            and nowhere else.

    Returns:
        Hidden state and other arguments of each block's call.

    Raises:
        CaptureError: If the blocks are not called one after another, each once and with the hidden state of the one
            before, so that the calls cannot be replayed block by block.
    """
    calls: list[tuple[Tensor, BlockArguments]] = []
    relay = _Relay()

    def note(index: int, hidden: Tensor, arguments: BlockArguments) -> Tensor:
        if index != len(calls):
            raise CaptureError(f"{blocks[index]} is not called in the order of the blocks, or more than once")
        if relay.tensor is None:
            # The model may use what it passes to the first block: what that returns has to be told from it.
            relay.tensor = hidden.clone() if to_the_end else hidden
        elif hidden is not relay.tensor:
            # Stand-ins are the identity: whatever else arrives was made between blocks, where nothing replays it.
            raise CaptureError(f"the model changes the hidden state between blocks, before {blocks[index]}")
        calls.append((hidden, arguments))
        if len(calls) < len(blocks):
            return relay.tensor
        if not to_the_end:
            raise _LastReached
        return calls[0][0]

    with stand_ins(model, blocks, returns_tuple, note), suppress(_LastReached), relay if to_the_end else nullcontext():
        run()
    if len(calls) < len(blocks):
        raise CaptureError(f"the forward pass does not reach {blocks[len(calls)]}")
    if relay.used_by:
        raise CaptureError(f"what blocks return goes elsewhere than to the next block ({relay.used_by})")
    return calls
