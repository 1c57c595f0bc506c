"""The products of a forward pass, matrix by matrix under the checkpoint's names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from hessquant.models.experts import in_order, numbers, pattern, unreached
from hessquant.models.flow import Chooser
from hessquant.models.locations import LocatedMatrix, Stack, locate
from hessquant.models.naming import Naming
from hessquant.models.recorder import Recording
from hessquant.models.watch import Product
from hessquant.records import Location


@dataclass(frozen=True, kw_only=True)
class ProbedProduct(LocatedMatrix):
    """The products of one matrix in the forward pass.

    Attributes:
        columns: Inputs.
        multiplied_whole: Whether every product is with the whole matrix, on the same side.
        input_id: Number of the input tensor; equal for matrices multiplied with the very same tensor.
        calls: Products of the matrix in one forward pass.
        may_be_skipped: Whether tokens may be routed past it.
        chooses: What it is if its outputs do no more than choose; None if they do more.
        feeds_attention: Whether causal attention's queries, keys or values are made with it.
        fault: Why its products cannot be followed; empty if they can, or `multiplied_whole` says all.
    """

    columns: int
    multiplied_whole: bool
    input_id: tuple[int, int]
    calls: int = 1
    may_be_skipped: bool = False
    chooses: Chooser | None = None
    feeds_attention: bool = False
    fault: str = ""


def probed_products(
    recording: Recording, model: PreTrainedModel, naming: Naming, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[ProbedProduct, ...]:
    """Every multiplied matrix under its name in the checkpoint, and those that other tokens would be.

    Args:
        recording: What the pass showed.
        model: The model that was run.
        naming: How the checkpoint's names map to those of the model.
        shapes: Shape of every tensor of the checkpoint.
    """
    multiplied = _multiplied(recording)
    stacks = {name: stack for name, each in multiplied.items() if (stack := each.stack(recording)) is not None}
    matrices: dict[str, list[LocatedMatrix]] = {}
    for matrix in locate(model, naming, stacks, shapes):
        matrices.setdefault(matrix.parameter, []).append(matrix)
    followed = {
        location.parameter for together in matrices.values() for matrix in together for location in matrix.locations
    }
    products: list[ProbedProduct] = []
    for name, each in multiplied.items():
        for matrix in sorted(matrices.get(name, ()), key=lambda matrix: _position(matrix.locations[0])):
            products.append(_followed(matrix, multiplied, recording))
        if name not in followed:
            products.append(_unfollowed(each))
    return tuple(products)


@dataclass(frozen=True)
class _Multiplied:
    """A parameter that was multiplied, or would be with other tokens.

    Attributes:
        name: Its name.
        example: The parameter whose products stand for its own: itself, or one like it that was reached.
        products: Those.
        place: Its place in the order of first use.
        input_number: A number for what it is multiplied with.
        calls: How often the matrix in it is multiplied that is multiplied most often.
        may_be_skipped: Whether tokens may be routed past it.
        fault: Why its products cannot be followed, but for what is multiplied; empty if they can.
    """

    name: str
    example: str
    products: Sequence[Product]
    place: int
    input_number: int
    calls: int
    may_be_skipped: bool
    fault: str

    def stack(self, recording: Recording) -> Stack | None:
        """Its matrices; None if they cannot be followed, or products are not all with whole ones on the same side."""
        first, stacked = self.products[0], len(recording.shapes[self.name]) == 3
        alike = {(each.rows, each.columns, each.transposed, each.pieces) for each in self.products}
        if self.fault or len(alike) > 1 or first.pieces < 1 or (first.pieces > 1 and not stacked):
            return None
        return Stack(first.pieces, first.rows, first.transposed, stacked, recording.halves.get(self.example))


def _multiplied(recording: Recording) -> dict[str, _Multiplied]:
    """The parameters that were multiplied, and those that other tokens would reach, in the order of first use."""
    siblings = unreached(list(recording.products), recording.shapes)
    skippable = {pattern(name) for name in siblings}
    # Siblings share the products of one of them, and the matrices of a stack are thousands.
    most_calls = {
        name: max(Counter(product.piece for product in products).values())
        for name, products in recording.products.items()
    }
    input_numbers: dict[tuple[int, ...], int] = {}
    multiplied = {}
    for place, name in enumerate(in_order(list(recording.products), siblings)):
        example = siblings.get(name, name)
        products, inputs = recording.products[example], recording.inputs[example]
        # Of a stack, the first call is with one of its matrices; of a plain matrix, all calls are its own.
        identity = (*inputs[: 1 if products[0].pieces > 1 else None], *(numbers(name) if name in siblings else ()))
        fault = _fault(recording, example, most_calls[example])
        multiplied[name] = _Multiplied(
            name,
            example,
            products,
            place,
            input_numbers.setdefault(identity, len(input_numbers)),
            most_calls[example],
            may_be_skipped=pattern(name) in skippable,
            fault=fault,
        )
    return multiplied


def _fault(recording: Recording, parameter: str, calls: int) -> str:
    owner = parameter.rpartition(".")[0]
    if len(recording.shapes[parameter]) == 3 and recording.calls[owner] > calls:
        return f"held by {owner}, which is called {recording.calls[owner]} times for a part of it each"
    return next((product.fault for product in recording.products[parameter] if product.fault), "")


def _followed(matrix: LocatedMatrix, multiplied: Mapping[str, _Multiplied], recording: Recording) -> ProbedProduct:
    """A matrix of the checkpoint; its rows may be in several matrices of the model if these share their input."""
    # In the order of the forward pass, so that the first of them is where inputs are first seen.
    locations = tuple(sorted(matrix.locations, key=lambda location: multiplied[location.parameter].place))
    first, parameters = multiplied[locations[0].parameter], [location.parameter for location in locations]
    inputs = {(multiplied[location.parameter].input_number, location.piece) for location in locations}
    return ProbedProduct(
        **vars(matrix) | {"locations": locations},
        columns=first.products[0].columns,
        multiplied_whole=len(inputs) == 1,
        input_id=min(inputs),
        calls=first.calls,
        may_be_skipped=first.may_be_skipped,
        chooses=next((recording.choosers[name] for name in parameters if name in recording.choosers), None),
        feeds_attention=not recording.feed_attention.isdisjoint(parameters),
    )


def _unfollowed(parameter: _Multiplied) -> ProbedProduct:
    """A parameter that is not multiplied whole, or whose tensors in the checkpoint cannot be followed."""
    first = parameter.products[0]
    return ProbedProduct(
        parameter.name,
        (Location(parameter.name, first.rows, transposed=first.transposed),),
        first.rows,
        first.transposed,
        columns=first.columns,
        multiplied_whole=False,
        input_id=(parameter.input_number, 0),
        calls=len(parameter.products),
        fault=parameter.fault,
    )


def _position(location: Location) -> tuple[int, int]:
    return location.piece, location.first_row
