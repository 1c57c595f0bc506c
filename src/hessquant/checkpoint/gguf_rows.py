"""Where the rows of a quantized weight are in the GGUF file of the model that was quantized, found by their values.

llama.cpp's converter renames, joins, splits and stacks matrices and reorders rows, each architecture in its own way;
the values of a row it leaves. So no names are compared, but for the number of a block, which says where to look first.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hessquant.checkpoint.gguf_base import GgufBase
from hessquant.checkpoint.row_match import NEAR, Nearest, match, nearest, projection
from hessquant.errors import PlanError

_SAMPLES = 32
_SCALES = (0.5, 1.5)
"""Rounding shrinks or stretches rows by less than this; a converter that multiplies them does more."""

LEAVE = "leave it in 16 bit (quantize with --exclude)"
_FORM = f"the base holds it in another form: {LEAVE}"

Group = Mapping[str, tuple[int, ...]]
"""Shapes of the base's tensors of one block with as many columns, by name."""


@dataclass(frozen=True)
class Found:
    """Rows of one weight in one tensor of the base.

    Attributes:
        tensor: Its name.
        own: Their numbers in the weight, int64 [count].
        theirs: Their numbers in the tensor, all dimensions but the last counted as rows.
    """

    tensor: str
    own: Tensor
    theirs: Tensor


class Rows:
    """The rows of some tensors of a base, and their sketches.

    Attributes:
        base: Whose they are.
        sketches: float32 [count, width].
        project: float32 [columns, width].
        starts: The number of each tensor's first row, and the count of all.

    Raises:
        PlanError: If a value is not finite; names the tensor.
    """

    def __init__(self, base: GgufBase, group: Group) -> None:
        self.base, self._names, shapes = base, list(group), list(group.values())
        self.project = projection(shapes[0][-1])
        parts = []
        for name in self._names:
            parts.append(torch.cat([chunk @ self.project for chunk in base.chunks(name)]))
            if not bool(torch.isfinite(parts[-1]).all()):
                raise PlanError(f"{base.name}: {name} has values that are not finite; make the base as BF16 or F32")
        self.sketches = torch.cat(parts)
        self.starts = torch.tensor([0, *map(len, parts)]).cumsum(0)
        # One matrix of a stack is a slice of its own.
        slices = [shape[-2] for shape, part in zip(shapes, parts, strict=True) for _ in range(len(part) // shape[-2])]
        self._slices = torch.tensor([0, *slices]).cumsum(0)

    def tensor_of(self, number: int) -> str:
        """The tensor that a row is in."""
        return self._names[int(torch.searchsorted(self.starts, number, right=True)) - 1]

    def gather(self, numbers: Tensor, among: Tensor | None = None) -> Tensor:
        """Some of the rows, float32 [count, columns]; by their numbers, or by their places among other numbers."""
        numbers = numbers if among is None else among[numbers]
        values = torch.empty(len(numbers), len(self.project))
        for name, places, rows in self.by_tensor(numbers):
            values[places] = self.base.rows(name, rows)
        return values

    def by_tensor(self, numbers: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Tensors that rows are in; for each, which of them, and their numbers in it."""
        tensors = torch.searchsorted(self.starts, numbers, right=True) - 1
        for tensor in sorted(set(tensors.tolist())):
            places = (tensors == tensor).nonzero().flatten()
            yield self._names[tensor], places, numbers[places] - self.starts[tensor]

    def slices_of(self, numbers: Tensor) -> set[int]:
        """Matrices that rows are in, by number."""
        return set((torch.searchsorted(self._slices, numbers, right=True) - 1).tolist())

    def slice_around(self, number: int) -> tuple[int, int]:
        """The first row of the matrix that a row is in, and the one after its last."""
        after = int(torch.searchsorted(self._slices, number, right=True))
        return int(self._slices[after - 1]), int(self._slices[after])

    def inside(self, slices: Iterable[int]) -> Tensor:
        """Numbers of all rows of some matrices."""
        return torch.cat([torch.arange(int(self._slices[i]), int(self._slices[i + 1])) for i in sorted(slices)])

    def nearest(self, values: Tensor) -> Nearest:
        """The rows that some are nearest to."""
        return nearest(values, values @ self.project, self.sketches, self.gather)


def samples(rows: Tensor) -> Tensor:
    """Some of these rows, evenly spread."""
    return rows[torch.linspace(0, len(rows) - 1, min(_SAMPLES, len(rows))).long()]


def is_near(near: Nearest) -> Tensor:
    """Which rows are near enough to be what they are nearest to, rounded; bool [count]."""
    return near.distances <= NEAR * near.energies


def find_weight(name: str, values: Tensor, rows: Rows) -> tuple[Found, ...] | None:
    """Find the rows of a weight among those of a block; None if they are not there.

    Raises:
        PlanError: If some are, and cannot be told from others, or are scaled.
    """
    sketches, asked, slices = values @ rows.project, samples(torch.arange(len(values))), set[int]()
    while True:
        near = nearest(values[asked], sketches[asked], rows.sketches, rows.gather)
        clear = near.clear & is_near(near)
        hit = rows.slices_of(near.rows[clear]) - slices
        if not hit:
            _refuse_unclear(name, near, asked, rows, partly=bool(slices))
            return None
        slices |= hit
        among = rows.inside(slices)
        numbers, sure, scale = match(values, sketches, rows.sketches[among], partial(rows.gather, among=among))
        if bool(sure.all()):
            break
        asked = samples((~sure).nonzero().flatten())
    if not _SCALES[0] <= scale <= _SCALES[1]:
        raise PlanError(f"{name} is {rows.tensor_of(int(among[numbers[0]]))} times {scale:.3g}; {_FORM}")
    return tuple(Found(tensor, own, theirs) for tensor, own, theirs in rows.by_tensor(among[numbers]))


def _refuse_unclear(name: str, near: Nearest, asked: Tensor, rows: Rows, *, partly: bool) -> None:
    """Rows of which none leads on: fine if they are not here at all."""
    close = is_near(near).nonzero().flatten()
    if len(close):
        row, there = int(asked[close[0]]), int(near.rows[close[0]])
        raise PlanError(
            f"{name}: row {row} is as near to another row of {rows.base.name} as to the one in "
            f"{rows.tensor_of(there)}, so its place there is not certain (one matrix twice, or too few bits): "
            f"{LEAVE}"
        )
    if partly:
        raise PlanError(f"{name}: row {int(asked[0])} is nowhere in {rows.base.name}, others are; {_FORM}")
