"""Where a checkpoint's matrices are in the model's parameters, row by row.

transformers' conversion mapping renames, and stacks the matrices of experts into one parameter. It is linear in rows,
so its reverse is run on numbered rows to see where each checkpoint matrix lies; that costs nothing, since the numbers
stand for rows of one column.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import Transpose, revert_weight_conversion

from hessquant.models.experts import expert_matrices
from hessquant.models.flow import Halves
from hessquant.models.library import LIBRARY_ERRORS, quiet
from hessquant.models.naming import Naming
from hessquant.models.structure import block_of
from hessquant.records import Location

_MOST_RUNS = 1024
"""Of more runs of rows than heads have, no matrix is made; each costs a copy whenever the matrix is looked at."""

_MOST_ROWS = 1 << 22
"""Rows whose numbers are in memory at once, and those of one more block."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stack:
    """A parameter that is multiplied matrix by matrix, or is one matrix.

    Attributes:
        pieces: Matrices in it.
        rows: Outputs of each.
        transposed: Whether each is stored [columns, rows].
        stacked: Whether it has a dimension for its matrices.
        halves: How the outputs of each are divided in two; None if they are not.
    """

    pieces: int
    rows: int
    transposed: bool
    stacked: bool
    halves: Halves | None = None


@dataclass(frozen=True)
class LocatedMatrix:
    """A matrix as the checkpoint has it.

    Attributes:
        name: Its name in the checkpoint; that of its parameter where the checkpoint has none for it.
        locations: Where its rows are in the model.
        rows: Outputs.
        transposed: Whether the checkpoint stores it [columns, rows].
        part_of: Tensor of the checkpoint that holds it with others; empty if it has one of its own.
        part_rows: The first of its rows there, in the matrix of its expert, and their distance.
    """

    name: str
    locations: tuple[Location, ...]
    rows: int
    transposed: bool
    part_of: str = ""
    part_rows: tuple[int, int] = (0, 1)

    @property
    def parameter(self) -> str:
        """The parameter that holds its first rows."""
        return self.locations[0].parameter

    @property
    def module(self) -> str:
        """The module that runs it together with other experts' matrices; empty for a plain matrix."""
        return self.locations[0].module


def locate(
    model: PreTrainedModel, naming: Naming, stacks: Mapping[str, Stack], shapes: Mapping[str, tuple[int, ...]]
) -> list[LocatedMatrix]:
    """The matrices of the model's parameters under their names in the checkpoint, of each name the last.

    A stack that the checkpoint holds as one tensor is taken apart under names of its own (`expert_matrices`). What is
    not made of whole rows has no location.

    Args:
        model: The model; its parameters need no values.
        naming: How the checkpoint's names map to those of the model.
        stacks: The parameters that are multiplied.
        shapes: Shape of every tensor of the checkpoint.
    """
    matrices = _Locating(model, naming, stacks, shapes).matrices()
    return list({matrix.name: matrix for matrix in matrices}.values())


@dataclass(frozen=True)
class _Locating:
    """`locate`, with its arguments."""

    model: PreTrainedModel
    naming: Naming
    stacks: Mapping[str, Stack]
    shapes: Mapping[str, tuple[int, ...]]

    def matrices(self) -> Iterator[LocatedMatrix]:
        converted = {}
        for parameter, stack in self.stacks.items():
            tensors = self.naming.made_of(parameter)
            if len(tensors) == 1 and self.naming.converter_of(tensors[0]) is None:
                yield from _as_stored(tensors[0], parameter, stack)
            else:
                converted[parameter] = stack
        reverted_before = set[str]()
        for batch in self._batches(converted):
            rows = _RowNumbers(batch)
            reverted = self._reverted(rows.numbered())
            if not reverted_before.isdisjoint(reverted):  # a tensor made of what is in several batches
                rows = _RowNumbers(converted)
                yield from self._located(rows, self._reverted(rows.numbered()))
                return
            reverted_before |= reverted.keys()
            yield from self._located(rows, reverted)

    def _batches(self, stacks: Mapping[str, Stack]) -> list[dict[str, Stack]]:
        """Whole blocks at a time, as far as one renaming does not depend on another: all rows of a model are too many.

        Nor is each block on its own, since each batch costs a look at the conversions.
        """
        if any(hasattr(entry, "_active") for entry in self.naming.renamings):
            return [dict(stacks)]
        blocks: dict[str, dict[str, Stack]] = {}
        for name, stack in stacks.items():
            blocks.setdefault(block_of(name), {})[name] = stack
        batches, held = [dict[str, Stack]()], 0
        for block in blocks.values():
            if held > _MOST_ROWS:
                batches, held = [*batches, {}], 0
            batches[-1] |= block
            held += sum(stack.pieces * stack.rows for stack in block.values())
        return batches

    def _reverted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model's parameters would be in the checkpoint."""
        if not state:
            return {}
        with quiet():
            try:
                return dict(revert_weight_conversion(self.model, state))
            except LIBRARY_ERRORS:  # a conversion with no way back: its matrices have no location
                return {}

    def _located(self, rows: "_RowNumbers", reverted: Mapping[str, Tensor]) -> Iterator[LocatedMatrix]:
        for name, values in reverted.items():
            numbers: Numbers = values.numpy()
            if numbers.ndim == 2 and name in self.shapes:
                matrix = rows.located(name, numbers)
                if matrix is not None:
                    yield matrix
            elif numbers.ndim == 3:
                yield from self._of_stack(rows, name, numbers)

    def _of_stack(self, rows: "_RowNumbers", name: str, numbers: Numbers) -> Iterator[LocatedMatrix]:
        """The matrices of a stack that the checkpoint holds as one tensor."""
        parameters = rows.parameters(numbers)
        tensors = [tensor for parameter in parameters for tensor in self.naming.keys.get(parameter, [])]
        tensor = tensors[0] if len(tensors) == 1 else name
        parameter = parameters[0]
        stack = self.stacks[parameter]
        if self._keeps(tensor, parameter):
            yield from _as_stored(tensor, parameter, stack)
            return
        for piece, of_piece in enumerate(numbers):
            for title, part in expert_matrices(tensor, parameter, piece, stack.rows, stack.halves).items():
                matrix = rows.located(title, of_piece[part] if of_piece.shape[1] == 1 else of_piece[:, part])
                if matrix is not None:
                    yield replace(matrix, part_of=tensor, part_rows=(part.start, part.step))

    def _keeps(self, tensor: str, parameter: str) -> bool:
        """Whether loading transposes a tensor only if its shape is not the parameter's, and it is, or is not known."""
        converter = self.naming.converter_of(tensor)
        if converter is None or not all(isinstance(op, Transpose) and op.check_dims for op in converter.operations):
            return False
        return self.shapes.get(tensor) in (None, tuple(self.model.get_parameter(parameter).shape))


class _RowNumbers:
    """Rows of matrices, numbered over all parameters one after another, to see where a conversion takes them."""

    def __init__(self, stacks: Mapping[str, Stack]) -> None:
        self._stacks = stacks
        self._names = list(stacks)
        counts = (stack.pieces * stack.rows for stack in stacks.values())
        self._starts = list(accumulate(counts, initial=0))
        # Rows at which another matrix begins.
        self._boundaries = [
            start + piece * stack.rows
            for stack, start in zip(stacks.values(), self._starts, strict=False)
            for piece in range(stack.pieces)
            if start or piece
        ]

    def numbered(self) -> dict[str, Tensor]:
        """The parameters, with one column, which holds the numbers of the rows."""
        state = {}
        for (name, stack), start, stop in zip(self._stacks.items(), self._starts, self._starts[1:], strict=False):
            shape = (1, stack.rows) if stack.transposed else (stack.rows, 1)
            numbers = torch.arange(start, stop)
            state[name] = numbers.view(stack.pieces, *shape) if stack.stacked else numbers.view(shape)
        return state

    def parameters(self, numbers: Numbers) -> list[str]:
        """Parameters that the first and the last of these rows belong to."""
        ends = (int(numbers.min()), int(numbers.max())) if numbers.size else ()
        return list(dict.fromkeys(self._names[bisect_right(self._starts, end) - 1] for end in ends))

    def located(self, name: str, numbers: Numbers) -> LocatedMatrix | None:
        """The matrix that has these rows; None if it is not made of whole rows."""
        if 1 not in numbers.shape or numbers.size < 2:
            return None
        flat = numbers.ravel()
        locations = self._strided(flat) or self._runs(flat)
        if not 0 < len(locations) <= _MOST_RUNS:
            return None
        return LocatedMatrix(name, locations, len(flat), transposed=numbers.shape[0] == 1)

    def _strided(self, flat: Numbers) -> tuple[Location, ...]:
        """As rows of one matrix, or of two in turn, evenly spaced; empty if they are not."""
        for ways in (1, 2):
            parts = [flat[first::ways] for first in range(ways)]
            locations = [self._location(part, first, ways) for first, part in enumerate(parts)]
            if all(locations):
                return tuple(location for location in locations if location is not None)
        return ()

    def _runs(self, flat: Numbers) -> tuple[Location, ...]:
        """As runs of rows that follow each other in their matrices."""
        breaks = np.flatnonzero(np.diff(flat) != 1) + 1
        inside = np.flatnonzero(np.isin(flat, self._boundaries))
        cuts = sorted({0, len(flat), *breaks.tolist(), *inside.tolist()})
        locations = [self._location(flat[start:stop], start, 1) for start, stop in pairwise(cuts)]
        return tuple(location for location in locations if location is not None) if all(locations) else ()

    def _location(self, flat: Numbers, to_row: int, to_step: int) -> Location | None:
        """Where evenly spaced rows of one matrix are; None if they are not that."""
        first, last = int(flat[0]), int(flat[-1])
        step = int(flat[1]) - first if len(flat) > 1 else 1
        if step < 1 or bool((np.diff(flat) != step).any()):
            return None
        index = bisect_right(self._starts, first) - 1
        name = self._names[index]
        stack = self._stacks[name]
        piece, row = divmod(first - self._starts[index], stack.rows)
        if row + last - first >= stack.rows:
            return None
        return Location(name, len(flat), piece, stack.transposed, stack.stacked, row, step, to_row, to_step)


def _as_stored(tensor: str, parameter: str, stack: Stack) -> Iterator[LocatedMatrix]:
    """A matrix, or all matrices of a stack, that the checkpoint holds as one tensor, just as the model does."""
    if not stack.stacked:
        location = Location(parameter, stack.rows, transposed=stack.transposed)
        yield LocatedMatrix(tensor, (location,), stack.rows, stack.transposed)
        return
    for piece in range(stack.pieces):
        for name, part in expert_matrices(tensor, parameter, piece, stack.rows, stack.halves).items():
            rows = len(range(stack.rows)[part])
            location = Location(parameter, rows, piece, stack.transposed, stack.stacked, part.start, part.step)
            yield LocatedMatrix(name, (location,), rows, stack.transposed, tensor, (part.start, part.step))
