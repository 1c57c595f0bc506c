"""Which checkpoint tensor ends in which parameter, and where in it.

transformers' own conversion mapping knows: it renames, and stacks the matrices of experts into one parameter. The
mapping is linear in rows, so its reverse is run on numbered rows to see where each checkpoint matrix lies; that costs
nothing, since the numbers stand for rows of one column.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hessquant.models.expert_names import expert_matrices
from hessquant.models.flow import Halves
from hessquant.models.library import LIBRARY_ERRORS, quiet
from hessquant.models.siblings import block_of
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
class Located:
    """A matrix as the checkpoint has it.

    Attributes:
        locations: Where its rows are in the model.
        rows: Outputs.
        transposed: Whether the checkpoint stores it [columns, rows].
        part_of: Tensor of the checkpoint that holds it with others; empty if it has one of its own.
        part_rows: The first of its rows there, in the matrix of its expert, and their distance.
    """

    locations: tuple[Location, ...]
    rows: int
    transposed: bool
    part_of: str
    part_rows: tuple[int, int] = (0, 1)


class Naming:
    """How a checkpoint's names map to those of a model.

    Attributes:
        conversions: transformers' conversion mapping for the model.
        keys: Checkpoint tensors by the state-dict key that they end in (the first, where one tensor makes several).

    Args:
        model: The model; its parameters need no values.
        names: Names of the checkpoint's tensors.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        self.conversions: list[Any] = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in self.conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in self.conversions if isinstance(entry, WeightConverter)]
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        self._aliases = {name: alike for alike in aliases.values() for name in alike}
        self.keys = self._keys(names)

    def _keys(self, names: Iterable[str]) -> dict[str, list[str]]:
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        found: dict[str, list[str]] = {}
        # In the order in which transformers loads them: some renamings act only after they have seen a certain name.
        for name in sorted(names, key=dot_natural_key):
            key, _ = rename_source_key(name, self._renamings, self._converters, prefix, state)
            if key not in state and name in state:
                key, _ = rename_source_key(name, [], [], prefix, state)
            found.setdefault(key, []).append(name)
        return found

    def locate(self, stacks: Mapping[str, Stack], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Located]:
        """The matrices of the model's parameters by their names in the checkpoint.

        A stack that the checkpoint holds as one tensor is taken apart under names of its own (`expert_names`). What is
        not made of whole rows has no location.

        Args:
            stacks: The parameters that are multiplied.
            shapes: Shape of every tensor of the checkpoint.
        """
        keys, found = self.keys, dict[str, Located]()
        converted = {}
        for name, stack in stacks.items():
            own = next((keys[alias] for alias in self._aliases[name] if alias in keys), [] if keys else [name])
            if len(own) == 1 and not self.is_converted(own[0]):
                found |= _as_stored(own[0], name, stack)
            else:
                converted[name] = stack
        names = set[str]()
        for batch in self._batches(converted):
            rows = _RowNumbers(batch)
            reverted = self._reverted(rows.numbered())
            if not names.isdisjoint(reverted):  # a tensor made of what is in several batches
                rows = _RowNumbers(converted)
                return found | self._located(rows, self._reverted(rows.numbered()), stacks, shapes)
            names |= reverted.keys()
            found |= self._located(rows, reverted, stacks, shapes)
        return found

    def _batches(self, stacks: Mapping[str, Stack]) -> list[dict[str, Stack]]:
        """Whole blocks at a time, as far as one renaming does not depend on another: all rows of a model are too many.

        Nor is each block on its own, since each batch costs a look at the conversions.
        """
        if any(hasattr(entry, "_active") for entry in self._renamings):
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

    def _located(
        self,
        rows: "_RowNumbers",
        reverted: Mapping[str, Tensor],
        stacks: Mapping[str, Stack],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, Located]:
        keys, found = self.keys, dict[str, Located]()
        for name, values in reverted.items():
            numbers: Numbers = values.numpy()
            if numbers.ndim == 2 and name in shapes:
                found |= rows.located(name, numbers, part_of="")
            elif numbers.ndim == 3:
                parameters = rows.parameters(numbers)
                own = [tensor for parameter in parameters for tensor in keys.get(parameter, [])]
                tensor = own[0] if len(own) == 1 else name
                (parameter, *_) = parameters
                stack = stacks[parameter]
                if self._keeps(tensor, shapes.get(tensor), self._model.get_parameter(parameter).shape):
                    found |= _as_stored(tensor, parameter, stack)
                    continue
                for piece, of_piece in enumerate(numbers):
                    for name, part in expert_matrices(tensor, parameter, piece, stack.rows, stack.halves).items():
                        chosen = of_piece[part] if of_piece.shape[1] == 1 else of_piece[:, part]
                        found |= {
                            title: replace(located, part_rows=(part.start, part.step))
                            for title, located in rows.located(name, chosen, part_of=tensor).items()
                        }
        return found

    def is_converted(self, tensor: str) -> bool:
        """Whether loading does more with a tensor than rename it."""
        _, pattern = rename_source_key(tensor, self._renamings, self._converters)
        return pattern is not None

    def _keeps(self, tensor: str, stored: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
        """Whether loading transposes a tensor only if its shape is not the parameter's, and it is, or is not known."""
        _, pattern = rename_source_key(tensor, self._renamings, self._converters)
        converter = next((entry for entry in self._converters if pattern in entry.source_patterns), None)
        if converter is None or not all(isinstance(op, Transpose) and op.check_dims for op in converter.operations):
            return False
        return stored in (None, tuple(shape))

    def _reverted(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the model's parameters would be in the checkpoint."""
        if not state:
            return {}
        with quiet():
            try:
                return dict(revert_weight_conversion(self._model, dict(state)))
            except LIBRARY_ERRORS:  # a conversion with no way back: its matrices have no location
                return {}


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

    def located(self, name: str, numbers: Numbers, part_of: str) -> dict[str, Located]:
        """The matrix that has these rows, under its name; nothing if it is not made of whole rows."""
        if 1 not in numbers.shape or numbers.size < 2:
            return {}
        flat = numbers.ravel()
        locations = self._strided(flat) or self._runs(flat)
        if not 0 < len(locations) <= _MOST_RUNS:
            return {}
        return {name: Located(locations, len(flat), numbers.shape[0] == 1, part_of)}

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


def _as_stored(tensor: str, parameter: str, stack: Stack) -> dict[str, Located]:
    """A matrix, or all matrices of a stack, that the checkpoint holds as one tensor, just as the model does."""
    if not stack.stacked:
        location = Location(parameter, stack.rows, 0, stack.transposed, stack.stacked)
        return {tensor: Located((location,), stack.rows, stack.transposed, part_of="")}
    found = {}
    for piece in range(stack.pieces):
        for name, part in expert_matrices(tensor, parameter, piece, stack.rows, stack.halves).items():
            rows = len(range(stack.rows)[part])
            location = Location(parameter, rows, piece, stack.transposed, stack.stacked, part.start, part.step)
            found[name] = Located((location,), rows, stack.transposed, tensor, (part.start, part.step))
    return found
