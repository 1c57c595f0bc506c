"""What of a GGUF base gives way to a checkpoint's quantized weights, and that the rest of it is the same model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from hessquant.checkpoint.gguf_base import GgufBase, rows_of
from hessquant.checkpoint.gguf_contents import PLAIN
from hessquant.checkpoint.gguf_kept import same_rows
from hessquant.checkpoint.gguf_rows import LEAVE, Found, Group, Rows, find_weight
from hessquant.checkpoint.unpacked import UnpackedCheckpoint
from hessquant.errors import PlanError
from hessquant.formats.gguf_blocks import BLOCK, BLOCK_TYPES, block_type
from hessquant.results import Progress

_Place = tuple[int, int | None]
"""Inputs of a matrix, and the number of the block that it is in."""


@dataclass(frozen=True)
class RowMap:
    """What of a base gives way to quantized weights.

    Attributes:
        found: Where the rows of each weight are.
        kinds: The type of blocks of each tensor that they replace.
        padding: Rows of each such tensor that belong to no weight; they are zero.
    """

    found: Mapping[str, tuple[Found, ...]]
    kinds: Mapping[str, GGMLQuantizationType]
    padding: Mapping[str, Tensor]


def map_rows(base: GgufBase, checkpoint: UnpackedCheckpoint, progress: Progress) -> RowMap:
    """Find the rows of every quantized weight in a base.

    Args:
        base: The file.
        checkpoint: The quantized checkpoint, with the weights that were left in 16 bit.
        progress: Told of one stage, "match", with a step per quantized weight.

    Raises:
        PlanError: If a weight is not there as a whole, its rows cannot be told from others, a tensor has rows of it and
            others that are not quantized, or a matrix that was left in 16 bit is another there; names it.
    """
    progress.stage("match", len(checkpoint))
    search = _Search(base, checkpoint)
    for block, groups in _by_block(base).items():
        for columns, group in groups.items():
            rows = Rows(base, group)
            for name in search.missing_at(columns, block):
                search.look(name, rows)
                if name in search.found:
                    progress.advance(name)
            search.compare_kept(columns, block, rows)
    for name in _look_everywhere(search, base):
        progress.advance(name)
    return RowMap(search.found, search.kinds(), search.padding())


def _by_block(base: GgufBase) -> dict[int | None, dict[int, Group]]:
    """Shapes of the base's matrices by name, those of a block and as many columns together."""
    blocks: dict[int | None, dict[int, dict[str, tuple[int, ...]]]] = {}
    for name, block, shape in base.matrices():
        if shape[-1] >= BLOCK:
            blocks.setdefault(block, {}).setdefault(shape[-1], {})[name] = shape
    return {block: dict(groups) for block, groups in blocks.items()}


def _look_everywhere(search: "_Search", base: GgufBase) -> Iterator[str]:
    """Weights that are not in the block with their number, in whatever block has them; gives their names."""
    left = search.missing()
    for groups in _by_block(base).values() if left else ():
        for columns, group in groups.items():
            asked = [name for name in left if search.checkpoint.packed[name].columns == columns]
            if asked:
                rows = Rows(base, group)
                for name in asked:
                    search.look(name, rows)
    for name in left:
        if name not in search.found:
            raise PlanError(
                f"{name} is not in {base.name}: the base is of another model, or does not hold it (a part that sees "
                f"images has a file of its own), or in another form; {LEAVE}"
            )
        yield name


def _block_of(name: str) -> int | None:
    """The first number in a name; of weights in blocks, it is the block's."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _by_place(matrices: Iterable[tuple[str, int]]) -> Mapping[_Place, list[str]]:
    """Names of matrices, given with their inputs, by these and the number of the block."""
    places: dict[_Place, list[str]] = {}
    for name, columns in matrices:
        places.setdefault((columns, _block_of(name)), []).append(name)
    return places


@dataclass
class _Search:
    """The weights that were found so far.

    Attributes:
        base: Where they are looked for.
        checkpoint: Whose they are.
        found: Where the rows of each are.
        owners: The weight that each row of a tensor of the base is of, as its number in `names`; -1 = none.
        names: Weights that were found.
    """

    base: GgufBase
    checkpoint: UnpackedCheckpoint
    found: dict[str, tuple[Found, ...]] = field(default_factory=dict)
    owners: dict[str, Tensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    @cached_property
    def _weights(self) -> Mapping[_Place, list[str]]:
        return _by_place((name, self.checkpoint.packed[name].columns) for name in self.checkpoint)

    @cached_property
    def _kept(self) -> Mapping[_Place, list[str]]:
        """Matrices that were left in 16 bit."""
        plain = (info for name, info in self.checkpoint.tensors.items() if name not in self.checkpoint.packed)
        return _by_place(
            (info.name, info.shape[-1])
            for info in plain
            if info.dtype in PLAIN and prod(info.shape) > 0 and len(info.shape) > 1
        )

    def missing(self) -> list[str]:
        """Weights that were not found yet."""
        return [name for name in self.checkpoint if name not in self.found]

    def missing_at(self, columns: int, block: int | None) -> list[str]:
        """Those of them with so many inputs and that number of a block."""
        return [name for name in self._weights.get((columns, block), ()) if name not in self.found]

    def look(self, name: str, rows: Rows) -> None:
        """Look for a weight among some rows of the base."""
        found = find_weight(name, self.checkpoint.decode(name), rows)
        if found is None:
            return
        if name in self.found:
            first, second = self.found[name][0].tensor, found[0].tensor
            raise PlanError(f"{name} is in {self.base.name} twice, in {first} and in {second}; {LEAVE}")
        for one in found:
            lines = rows_of(self.base.tensors[one.tensor])
            owners = self.owners.setdefault(one.tensor, torch.full((len(lines),), -1))
            self._refuse_owned(owners[one.theirs], name, one.tensor)
            owners[one.theirs] = len(self.names)
        self.names.append(name)
        self.found[name] = found

    def _refuse_owned(self, owners: Tensor, name: str, tensor: str) -> None:
        if int(owners.max()) >= 0:
            raise PlanError(
                f"{name} and {self.names[int(owners.max())]} are one matrix in {self.base.name}, {tensor}; leave both "
                "in 16 bit (quantize with --exclude, or without --include)"
            )

    def compare_kept(self, columns: int, block: int | None, rows: Rows) -> None:
        """Refuse a base that holds a matrix that was left in 16 bit with other values, or as one with a weight."""
        for name in self._kept.get((columns, block), ()):
            values = self.checkpoint.read(name)
            for matrix in values.flatten(0, -3) if values.ndim > 2 else [values]:
                for tensor, numbers in same_rows(name, matrix, rows):
                    if tensor in self.owners:
                        self._refuse_owned(self.owners[tensor][numbers], name, tensor)

    def kinds(self) -> dict[str, GGMLQuantizationType]:
        """The narrowest type that holds all weights that have rows in each tensor."""
        kinds: dict[str, GGMLQuantizationType] = {}
        for name, parts in self.found.items():
            own = block_type(self.checkpoint.packed[name].grid)
            for part in parts:
                kinds[part.tensor] = max(own, kinds.get(part.tensor, own), key=BLOCK_TYPES.__getitem__)
        return kinds

    def padding(self) -> dict[str, Tensor]:
        """Rows of each tensor that are of no weight.

        Raises:
            PlanError: If one is not zero.
        """
        padding = {}
        for tensor, owners in self.owners.items():
            padding[tensor] = (owners < 0).nonzero().flatten()
            lines = rows_of(self.base.tensors[tensor])
            if any(lines[row].any() for row in padding[tensor].tolist()):
                raise PlanError(
                    f"{tensor} of {self.base.name} holds {self.names[int(owners.max())]}, which is quantized, and rows "
                    "of others, which are not; quantize all that it holds, or none of it"
                )
        return padding
