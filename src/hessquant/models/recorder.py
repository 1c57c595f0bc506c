"""What one forward pass shows of a model: its products, what its modules return, and how often they are called."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hessquant.models.experts import chosen_per_token
from hessquant.models.flow import Chooser, FeedsAttention, Flow, Halves
from hessquant.models.watch import Product, Together, Watch

_FORGOTTEN = torch.empty(0)


@dataclass(frozen=True)
class Recording:
    """What a forward pass showed; finished when `record` returns it.

    Attributes:
        shapes: Shape of every parameter by its first name.
        products: The products of each parameter that was multiplied, in the order of first use; without their inputs.
        inputs: Per product a number for its input, equal for the very same tensor.
        calls: How often each module was called.
        returns_tuple: Whether a module's output is a tuple, by module name.
        widths: Last dimension of what a module returned first.
        users: Modules that were running when a parameter was multiplied.
        routed: Of each module that was called with a choice of experts, how many were chosen per token.
        choosers: Parameters that only choose.
        halves: Parameters whose outputs are divided in two, and how.
        feed_attention: Parameters of which causal attention's queries, keys and values were made.
    """

    shapes: Mapping[str, tuple[int, ...]]
    products: dict[str, list[Product]] = field(default_factory=dict)
    inputs: dict[str, list[int]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    returns_tuple: dict[str, bool] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    users: dict[str, set[str]] = field(default_factory=dict)
    routed: dict[str, int] = field(default_factory=dict)
    choosers: Mapping[str, Chooser] = field(default_factory=dict)
    halves: Mapping[str, Halves] = field(default_factory=dict)
    feed_attention: frozenset[str] = frozenset()

    def reaches(self, module: str) -> bool:
        """Whether a matrix of a module is multiplied."""
        return any(name.startswith(f"{module}.") for name in self.products)

    def order_fault(self, blocks: Sequence[str]) -> str:
        """Why these blocks do not come one after another, each with weights of its own; empty if they do."""
        for block in blocks:
            if self.calls[block] != 1:
                return f"{block} is called {self.calls[block]} times in one forward pass"
        for parameter, modules in self.users.items():
            if len(modules.intersection(blocks)) > 1:
                return f"{parameter} is used by several blocks"
        return ""

    def tuples_of(self, blocks: Sequence[str]) -> tuple[bool, ...]:
        """Whether each block returns a tuple."""
        return tuple(self.returns_tuple.get(block, False) for block in blocks)

    def hidden_size(self, blocks: Sequence[str]) -> int:
        """Width of what the blocks return."""
        return next((self.widths[block] for block in blocks if block in self.widths), 0)


def record(model: nn.Module, run: Callable[[], object]) -> Recording:
    """Run a model and note what that shows.

    Args:
        model: The model.
        run: Runs it once.
    """
    recorder = _Recorder(model)
    hooks = [hook for name, module in model.named_modules() for hook in recorder.hooks(name, module)]
    try:
        with recorder.flow, recorder.watch:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    flow, attention = recorder.flow, recorder.attention
    return replace(
        recorder.noted, choosers=flow.choosers, halves=flow.halves, feed_attention=frozenset(attention.names)
    )


class _Recorder:
    """Notes what a model's modules return and, while `flow` and `watch` are entered, its products."""

    def __init__(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        self.noted = Recording({name: tuple(parameter.shape) for name, parameter in parameters.items()})
        self.flow, self.attention = Flow(), FeedsAttention()
        self.watch = Together(Watch(parameters, self._observe), self.attention)
        self._sources, self._sources_seen = WeakIdKeyDictionary(), 0
        self._running: list[str] = []

    def hooks(self, name: str, module: nn.Module) -> Sequence[torch.utils.hooks.RemovableHandle]:
        """Be told of a module's calls."""
        return (
            module.register_forward_pre_hook(lambda _, *arguments: self._enter(name, *arguments), with_kwargs=True),
            module.register_forward_hook(lambda _, _inputs, output: self._leave(name, output)),
        )

    def _enter(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._running.append(name)
        self.attention.enter()
        self.noted.calls[name] += 1
        if chosen := chosen_per_token(args, kwargs):
            self.noted.routed[name] = chosen

    def _leave(self, name: str, output: object) -> None:
        self._running.remove(name)
        self.attention.leave()
        self.noted.returns_tuple[name] = isinstance(output, tuple)
        hidden = output[0] if isinstance(output, tuple) and output else output
        if isinstance(hidden, Tensor) and hidden.ndim:
            self.noted.widths.setdefault(name, hidden.shape[-1])

    def _observe(self, product: Product) -> None:
        # The input itself is not kept: with images, those of a whole pass are gigabytes.
        number: int = self._sources.setdefault(product.source, self._sources_seen)  # type: ignore[no-untyped-call]
        self._sources_seen += 1
        name, noted = product.name, self.noted
        owner = name.rpartition(".")[0]
        if not product.fault and len(noted.shapes[name]) == 3 and owner not in self._running:
            # All of a stack is collected by running its module once more.
            product = replace(product, fault=f"held by {owner}, which does not multiply it itself")
        noted.products.setdefault(name, []).append(replace(product, inputs=_FORGOTTEN, source=_FORGOTTEN))
        noted.inputs.setdefault(name, []).append(number)
        noted.users.setdefault(name, set()).update(self._running)
        self.attention.multiply(name)
        self.flow.multiply(name, product.rows)
