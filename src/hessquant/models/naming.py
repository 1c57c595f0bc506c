"""Which checkpoint tensor ends in which parameter, and where in it.

transformers' own conversion mapping knows: it renames, and stacks the matrices of experts into one parameter. The
mapping is linear in rows, so its reverse is run on numbered rows to see where each checkpoint matrix lies; that costs
nothing, since the numbers stand for rows of one column.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
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
    """A parameter that is multiplied matrix by matrix, or is one matrix.

    Attributes:
        pieces: Matrices in it.
        rows: Outputs of each.
        transposed: Whether each is stored [columns, rows].
        stacked: Whether it has a dimension for its matrices.
    """

    pieces: int
    rows: int
    transposed: bool
    stacked: bool


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
        self._renamings = [entry for entry in self.conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in self.conversions if isinstance(entry, WeightConverter)]
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        self._aliases = {name: names for names in aliases.values() for name in names}

    def keys(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Checkpoint tensors by the state-dict key that they end in (the first, where one tensor makes several)."""
        state, prefix = self._model.state_dict(), self._model.base_model_prefix
        found: dict[str, list[str]] = {}
        # In the order in which transformers loads them: some renamings act only after they have seen a certain name.
        for name in sorted(names, key=dot_natural_key):
            key, _ = rename_source_key(name, self._renamings, self._converters, prefix, state)
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
        found: dict[str, Placed] = {}
        converted = {}
        for name, stack in stacks.items():
            own = next((keys[alias] for alias in self._aliases[name] if alias in keys), [] if keys else [name])
            if len(own) == 1 and not self.is_converted(own[0]):
                found |= _as_stored(own[0], name, stack, stack.transposed)
            else:
                converted[name] = stack
        for name, rows in self._numbered(converted).items():
            place = _place(rows, converted)
            if place is None:
                continue
            if rows.ndim == 2 and name in names:
                found[name] = Placed(place, rows.numel(), rows.shape[0] == 1, part_of="")
            elif rows.ndim == 3:
                own = keys.get(place.parameter, [])
                tensor = own[0] if len(own) == 1 else name
                found |= _as_stored(tensor, place.parameter, converted[place.parameter], rows.shape[1] == 1)
        return found

    def is_converted(self, tensor: str) -> bool:
        """Whether loading does more with a tensor than rename it."""
        _, pattern = rename_source_key(tensor, self._renamings, self._converters)
        return pattern is not None

    def _numbered(self, stacks: Mapping[str, Stack]) -> dict[str, Tensor]:
        """Row numbers, over all stacks one after another, in the layout and under the names of the checkpoint."""
        state = {}
        start = 0
        for name, stack in stacks.items():
            shape = (1, stack.rows) if stack.transposed else (stack.rows, 1)
            numbers = torch.arange(start, start + stack.pieces * stack.rows)
            state[name] = numbers.view(stack.pieces, *shape) if stack.stacked else numbers.view(shape)
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


def _as_stored(tensor: str, parameter: str, stack: Stack, transposed: bool) -> dict[str, Placed]:
    """A matrix, or all matrices of a stack, that the checkpoint holds as one tensor."""
    place = Place(parameter, transposed=stack.transposed, stacked=stack.stacked)
    if not stack.stacked:
        return {tensor: Placed(place, stack.rows, transposed, part_of="")}
    return {
        stacked_name(tensor, piece): Placed(replace(place, piece=piece), stack.rows, transposed, part_of=tensor)
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
            return Place(name, piece, first, step, stack.transposed, stack.stacked) if inside else None
        start += stack.pieces * stack.rows
    return None
