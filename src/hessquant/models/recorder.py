"""What one forward pass shows of a model: its products, what its modules return, and how often they are called."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from hessquant.models.attention import FeedsAttention
from hessquant.models.flow import Chooser, Flow
from hessquant.models.naming import Located, Naming, Stack
from hessquant.models.routing import has_choice
from hessquant.models.siblings import in_order, pattern, unreached
from hessquant.models.siblings import numbers as siblings_numbers
from hessquant.models.watch import Product, Together, Watch
from hessquant.records import Location


@dataclass(frozen=True)
class ProbedProduct:
    """The products of one matrix in the forward pass.

    Attributes:
        name: The matrix's name in the checkpoint; that of its parameter where the checkpoint has none for it.
        locations: Where its rows are in the model.
        rows: Outputs.
        columns: Inputs.
        transposed: Whether the checkpoint stores it [columns, rows].
        part_of: Tensor of the checkpoint that holds it with others; empty if it has one of its own.
        part_rows: The first of its rows there, in the matrix of its expert, and their distance.
        may_be_skipped: Whether tokens may be routed past it.
        chooses: What it is if its outputs do no more than choose; None if they do more.
        whole: Whether every product is with the whole matrix, on the same side.
        input_id: Number of the input tensor; equal for matrices multiplied with the very same tensor.
        calls: Products of the matrix in one forward pass.
        feeds_attention: Whether causal attention's queries, keys or values are made with it.
        fault: Why its products cannot be followed; empty if they can, or `whole` says all.
    """

    name: str
    locations: tuple[Location, ...]
    rows: int
    columns: int
    transposed: bool
    whole: bool
    input_id: tuple[int, int]
    calls: int = 1
    part_of: str = ""
    part_rows: tuple[int, int] = (0, 1)
    may_be_skipped: bool = False
    chooses: Chooser | None = None
    feeds_attention: bool = False
    fault: str = ""

    @property
    def parameter(self) -> str:
        """The parameter that holds its first rows."""
        return self.locations[0].parameter

    @property
    def module(self) -> str:
        """The module that runs it together with other experts' matrices; empty for a plain matrix."""
        return self.locations[0].module


_FORGOTTEN = torch.empty(0)


class Recorder:
    """Notes what a model's modules return and, while `watch` is entered, its products.

    Attributes:
        returns_tuple: Whether a module's output is a tuple, by module name.
        routed: Modules that were called with a choice of experts.
        flow: Where outputs go: the parameters that only choose, and those whose outputs are divided in two.
        feeds_attention: The parameters of which causal attention's queries, keys and values were made.
    """

    def __init__(self, model: nn.Module) -> None:
        self.returns_tuple: dict[str, bool] = {}
        self.routed: set[str] = set()
        self._calls: Counter[str] = Counter()
        self._widths: dict[str, int] = {}
        self._blocks_of: dict[str, list[str]] = {}
        self._parameters = dict(model.named_parameters())
        self._seen: dict[str, list[Product]] = {}
        self._inputs: dict[str, list[int]] = {}
        self._sources, self._sources_seen = WeakIdKeyDictionary(), 0
        self._running: list[str] = []
        self._siblings: dict[str, str] = {}
        self._open_patterns: set[str] = set()
        self._order: dict[str, int] = {}
        self._counts: dict[int, int] = {}
        self.feeds_attention = FeedsAttention()
        self.flow = Flow()
        self._choosers: dict[str, Chooser] = {}
        self.watch = Together(Watch(self._parameters, self._observe), self.feeds_attention.watch)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: self._enter(name, args, kwargs), with_kwargs=True
            )
            module.register_forward_hook(lambda _, _inputs, output, name=name: self._leave(name, output))

    def reaches(self, module: str) -> bool:
        """Whether a matrix of a module is multiplied."""
        return any(name.startswith(f"{module}.") for name in self._seen)

    def order_fault(self, blocks: Sequence[str]) -> str:
        """Why these blocks do not come one after another, each with weights of its own; empty if they do."""
        for block in blocks:
            if self._calls[block] != 1:
                return f"{block} is called {self._calls[block]} times in one forward pass"
        known = set(blocks)
        for name, modules in self._blocks_of.items():
            if len(known.intersection(modules)) > 1:
                return f"{name} is used by several blocks"
        return ""

    def hidden_size(self, blocks: Sequence[str]) -> int:
        """Width of what the blocks return."""
        return next((self._widths[block] for block in blocks if block in self._widths), 0)

    def _enter(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        self._running.append(name)
        self.feeds_attention.enter()
        self._calls[name] += 1
        if has_choice(args, kwargs):
            self.routed.add(name)

    def _leave(self, name: str, output: object) -> None:
        self._running.remove(name)
        self.feeds_attention.leave()
        self.returns_tuple[name] = isinstance(output, tuple)
        hidden = output[0] if isinstance(output, tuple) and output else output
        if isinstance(hidden, Tensor) and hidden.ndim:
            self._widths.setdefault(name, hidden.shape[-1])

    def _observe(self, product: Product) -> None:
        # The input itself is not kept: with images, those of a whole pass are gigabytes.
        number: int = self._sources.setdefault(product.source, self._sources_seen)  # type: ignore[no-untyped-call]
        self._sources_seen += 1
        owner = product.name.rpartition(".")[0]
        if not product.fault and self._parameters[product.name].ndim == 3 and owner not in self._running:
            # All of a stack is collected by running its module once more.
            product = replace(product, fault=f"held by {owner}, which does not multiply it itself")
        self._seen.setdefault(product.name, []).append(replace(product, inputs=_FORGOTTEN, source=_FORGOTTEN))
        self._inputs.setdefault(product.name, []).append(number)
        self.feeds_attention.multiply(product.name)
        self.flow.multiply(product.name, product.rows)
        self._blocks_of.setdefault(product.name, []).extend(self._running)

    def products(self, naming: Naming, shapes: Mapping[str, tuple[int, ...]]) -> tuple[ProbedProduct, ...]:
        """Every multiplied matrix under its name in the checkpoint, and those that other tokens would be."""
        siblings = unreached(list(self._seen), {name: tuple(p.shape) for name, p in self._parameters.items()})
        order = in_order(list(self._seen), siblings)
        self._order = {name: index for index, name in enumerate(order)}
        self._siblings, self._open_patterns = siblings, set(map(pattern, siblings))
        self._seen = {name: self._seen[siblings.get(name, name)] for name in order}
        self._choosers = self.flow.choosers
        stacks = {
            name: Stack(
                calls[0].pieces,
                calls[0].rows,
                calls[0].transposed,
                self._parameters[name].ndim == 3,
                self.flow.halves.get(siblings.get(name, name)),
            )
            for name, calls in self._seen.items()
            if self._is_whole(calls)
            and (self._parameters[name].ndim == 3 or calls[0].pieces == 1)
            and not self._fault(name, calls)
        }
        located: dict[str, list[tuple[str, Located]]] = {}
        for name, entry in naming.locate(stacks, shapes).items():
            located.setdefault(entry.locations[0].parameter, []).append((name, entry))
        numbers = self._input_numbers()
        followed = {
            location.parameter for found in located.values() for _, entry in found for location in entry.locations
        }
        products: list[ProbedProduct] = []
        for name, calls in self._seen.items():
            for title, entry in sorted(located.get(name, ()), key=lambda item: _position(item[1])):
                products.append(self._located(title, entry, numbers))
            if name not in followed:
                products.append(self._plain(name, calls, numbers[name]))
        return tuple(products)

    def _input_numbers(self) -> dict[str, int]:
        """A number for what each parameter is multiplied with."""
        identities: dict[tuple[int, ...], int] = {}
        numbers = {}
        for name, calls in self._seen.items():
            # Of a stack, the first call is with one of its matrices; of a plain matrix, all calls are its own.
            known = self._inputs[self._siblings.get(name, name)]
            inputs = tuple(known[:1] if calls[0].pieces > 1 else known)
            if name in self._siblings:
                inputs += siblings_numbers(name)
            numbers[name] = identities.setdefault(inputs, len(identities))
        return numbers

    def _located(self, name: str, entry: Located, numbers: Mapping[str, int]) -> ProbedProduct:
        """A matrix of the checkpoint; its rows may be in several matrices of the model if these share their input."""
        # In the order of the forward pass, so that the first of them is where inputs are first seen.
        locations = tuple(sorted(entry.locations, key=lambda location: self._order[location.parameter]))
        calls = self._seen[locations[0].parameter]
        inputs = {(numbers[location.parameter], location.piece) for location in entry.locations}
        return ProbedProduct(
            name,
            locations,
            entry.rows,
            calls[0].columns,
            entry.transposed,
            len(inputs) == 1,
            min(inputs),
            self._most_calls(locations[0].parameter),
            entry.part_of,
            entry.part_rows,
            feeds_attention=any(location.parameter in self.feeds_attention.names for location in locations),
            chooses=next((self._choosers[at.parameter] for at in locations if at.parameter in self._choosers), None),
            may_be_skipped=pattern(locations[0].parameter) in self._open_patterns,
        )

    def _most_calls(self, parameter: str) -> int:
        """How often the matrix of a parameter is multiplied that is multiplied most often."""
        # Siblings share the list of calls of one of them, and the matrices of a stack are thousands.
        calls = self._seen[parameter]
        if id(calls) not in self._counts:
            self._counts[id(calls)] = max(Counter(call.piece for call in calls).values())
        return self._counts[id(calls)]

    def _plain(self, parameter: str, calls: list[Product], number: int) -> ProbedProduct:
        """A parameter that is not multiplied whole, or whose tensors in the checkpoint cannot be followed."""
        first = calls[0]
        location = Location(parameter, first.rows, transposed=first.transposed)
        return ProbedProduct(
            parameter,
            (location,),
            first.rows,
            first.columns,
            first.transposed,
            False,
            (number, 0),
            len(calls),
            fault=self._fault(parameter, calls),
        )

    def _fault(self, name: str, calls: list[Product]) -> str:
        """Why a parameter's products cannot be followed, but for what is multiplied; empty if they can."""
        owner = self._siblings.get(name, name).rpartition(".")[0]
        if self._parameters[name].ndim == 3 and self._calls[owner] > self._most_calls(name):
            return f"held by {owner}, which is called {self._calls[owner]} times for a part of it each"
        return next((call.fault for call in calls if call.fault), "")

    def _is_whole(self, calls: list[Product]) -> bool:
        """Whether every product is with matrices of one shape that make up the parameter, on the same side."""
        shape = {(call.rows, call.columns, call.transposed, call.pieces) for call in calls}
        return len(shape) == 1 and calls[0].pieces > 0


def _position(entry: Located) -> tuple[int, int]:
    return entry.locations[0].piece, entry.locations[0].first_row
