"""Which checkpoint tensor ends in which parameter, and where in it.

transformers' own conversion mapping knows: it renames, and stacks the matrices of experts into one parameter. The
mapping is linear in rows, so its reverse is run on numbered rows to see where each checkpoint matrix lies; that costs
nothing, since the numbers stand for rows of one column.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hessquant.models.library import LIBRARY_ERRORS, quiet
from hessquant.records import Place


@dataclass(frozen=True)
class Stack:
    """A parameter that is multiplied matrix by matrix.

    Attributes:
        pieces: Matrices in it.
        rows: Outputs of each.
        transposed: Whether each is stored [columns, rows].
    """

    pieces: int
    rows: int
    transposed: bool


@dataclass(frozen=True)
class Placed:
    """A matrix of a stack, as the checkpoint has it.

    Attributes:
        place: Where it is in the model.
        rows: Outputs.
        transposed: Whether the checkpoint stores it [columns, rows].
        part_of: Tensor of the checkpoint that holds it with others; empty if it has one of its own.
    """

    place: Place
    rows: int
    transposed: bool
    part_of: str


class Naming:
    """How a checkpoint's names map to those of a model.

    Attributes:
        conversions: transformers' conversion mapping for the model.

    Args:
        model: The model; its parameters need no values.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.conversions: list[Any] = get_model_conversion_mapping(model)

    def keys(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Checkpoint tensors by the state-dict key that they end in (the first, where one tensor makes several)."""
        renamings = [entry for entry in self.conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self.conversions if isinstance(entry, WeightConverter)]
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        found: dict[str, list[str]] = {}
        # In the order in which transformers loads them: some renamings act only after they have seen a certain name.
        for name in sorted(names, key=dot_natural_key):
            key, _ = rename_source_key(name, renamings, converters, prefix, state)
            if key not in state and name in state:
                key, _ = rename_source_key(name, [], [], prefix, state)
            found.setdefault(key, []).append(name)
        return found

    def places(self, stacks: Mapping[str, Stack], names: Collection[str]) -> dict[str, Placed]:
        """The matrices of stacks by their names in the checkpoint.

        A stack that the checkpoint holds as one tensor is taken apart under names of its own (`stacked_name`). What is
        not in whole, evenly spaced rows of one matrix has no place.
        """
        keys = self.keys(names)
        converted = {name: stack for name, stack in stacks.items() if keys.get(name) != [name]}
        found: dict[str, Placed] = {}
        for name in stacks.keys() - converted.keys():
            found |= _taken_apart(name, name, stacks[name], stacks[name].transposed)
        for name, rows in self._numbered(converted).items():
            place = _place(rows, converted)
            if place is not None and rows.ndim == 2 and name in names:
                found[name] = Placed(place, rows.numel(), rows.shape[0] == 1, part_of="")
            elif place is not None and rows.ndim == 3:
                own = keys.get(place.parameter, [])
                tensor = own[0] if len(own) == 1 else name
                found |= _taken_apart(tensor, place.parameter, converted[place.parameter], rows.shape[1] == 1)
        return found

    def _numbered(self, stacks: Mapping[str, Stack]) -> dict[str, Tensor]:
        """Row numbers, over all stacks one after another, in the layout and under the names of the checkpoint."""
        state = {}
        start = 0
        for name, stack in stacks.items():
            shape = (stack.pieces, 1, stack.rows) if stack.transposed else (stack.pieces, stack.rows, 1)
            state[name] = torch.arange(start, start + stack.pieces * stack.rows).view(shape)
            start += stack.pieces * stack.rows
        if not state:
            return {}
        with quiet():
            try:
                return dict(revert_weight_conversion(self._model, state))
            except LIBRARY_ERRORS:  # a conversion with no way back: its matrices have no place
                return {}


def stacked_name(parameter: str, piece: int) -> str:
    """Name of one matrix of a stack that a checkpoint holds as one tensor.

    >>> stacked_name("mlp.experts.down_proj", 3), stacked_name("moe.input_linear.weight", 3)
    ('mlp.experts.3.down_proj.weight', 'moe.input_linear.3.weight')
    """
    module, _, leaf = parameter.rpartition(".")
    return f"{module}.{piece}.weight" if leaf == "weight" else f"{module}.{piece}.{leaf}.weight"


def _taken_apart(tensor: str, parameter: str, stack: Stack, transposed: bool) -> dict[str, Placed]:
    """The matrices of a stack that the checkpoint holds as one tensor."""
    return {
        stacked_name(tensor, piece): Placed(
            Place(parameter, piece, transposed=stack.transposed, stacked=True), stack.rows, transposed, part_of=tensor
        )
        for piece in range(stack.pieces)
    }


def _place(rows: Tensor, stacks: Mapping[str, Stack]) -> Place | None:
    """Where the numbered rows of one matrix, or of a whole stack, begin; None if they are not evenly spaced."""
    if rows.ndim not in (2, 3) or 1 not in rows.shape[-2:] or rows.numel() == 1:
        return None
    flat = rows.flatten().tolist()
    step = flat[1] - flat[0]
    if step < 1 or flat != list(range(flat[0], flat[0] + step * len(flat), step)):
        return None
    start = 0
    for name, stack in stacks.items():
        piece, first = divmod(flat[0] - start, stack.rows)
        if piece < stack.pieces:
            inside = rows.ndim == 3 or first + step * (len(flat) - 1) < stack.rows
            return Place(name, piece, first, step, stack.transposed, stacked=True) if inside else None
        start += stack.pieces * stack.rows
    return None
