"""Telling which rows of one matrix the rows of another are, where the others were rounded to a grid.

A rounded row is compared with all rows that it may be: by sketches (random projections, which keep distances) for the
few that are nearest, and these in full. It is taken for the nearest only if the second is clearly farther off.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

CLEAR = 1.5
"""How many times as far off (squared) the second nearest row must be as the nearest."""

_SKETCH = 128
_COMPARED = 4
"""Rows that are compared in full."""

_OUTLYING = 8.0
"""How many times the usual distance (squared) one may be, whatever it is next to the row's own energy."""

NEAR = 0.75
"""Squared distance to the nearest row, as a part of that one's energy, up to which it may be what was rounded."""

_BYTES = 1 << 26
"""What is held of one step."""

_PIECE = 1 << 10

Gather = Callable[[Tensor], Tensor]
"""Rows float32 [count, columns] by their numbers int64 [count]."""


@dataclass(frozen=True)
class Nearest:
    """The rows that some rows are nearest to.

    Attributes:
        rows: int64 [count], their numbers.
        clear: bool [count], whether every other is clearly farther off.
        distances: float32 [count], squared.
        seconds: float32 [count], squared distances of the second nearest.
        dots: float32 [count], products of both rows.
        energies: float32 [count], squared norms of the nearest.
    """

    rows: Tensor
    clear: Tensor
    distances: Tensor
    seconds: Tensor
    dots: Tensor
    energies: Tensor


def projection(columns: int) -> Tensor:
    """Signs float32 [columns, width of a sketch]; always the same."""
    signs = torch.randint(0, 2, (columns, _SKETCH), generator=torch.Generator().manual_seed(columns))
    return (signs * 2 - 1).to(torch.float32) / math.sqrt(_SKETCH)


def nearest(values: Tensor, sketches: Tensor, others: Tensor, gather: Gather) -> Nearest:
    """Find the row that each of some is nearest to.

    Args:
        values: float32 [count, columns].
        sketches: Their projections, [count, width].
        others: Projections of the rows that they may be, [n, width].
        gather: Reads those rows.
    """
    middle = others.mean(0)
    sketches, others = sketches - middle, others - middle
    lengths, compared = others.square().sum(1), min(_COMPARED, len(others))
    step = max(1, _BYTES // (4 * max(len(others), 2 * compared * values.shape[1])))
    parts = []
    for start in range(0, len(values), step):
        own, sketch = values[start : start + step], sketches[start : start + step]
        # Less the rows' own lengths, which change no order.
        apart = torch.addmm(lengths, sketch, others.T, alpha=-2)
        candidates = apart.topk(compared, largest=False).indices
        full = gather(candidates.reshape(-1)).view(len(own), compared, -1)
        distances = (full - own.unsqueeze(1)).square().sum(-1)
        order = distances.argsort(1)
        first = order[:, :1]
        chosen = full.gather(1, first.unsqueeze(-1).expand(-1, -1, full.shape[-1])).squeeze(1)
        least = distances.gather(1, first).squeeze(1)
        second = distances.gather(1, order[:, 1:2]).squeeze(1) if compared > 1 else torch.full_like(least, torch.inf)
        parts.append(
            (
                candidates.gather(1, first).squeeze(1),
                second >= CLEAR * least,
                least,
                second,
                (chosen * own).sum(1),
                chosen.square().sum(1),
            )
        )
    return Nearest(*(torch.cat(column) for column in zip(*parts, strict=True)))


def match(values: Tensor, sketches: Tensor, others: Tensor, gather: Gather) -> tuple[Tensor, Tensor, float]:
    """Give each of some rows one of others for itself; equal rows may have each other's.

    First those get theirs that are clearly nearest to one; then the rest, among the others that are left.

    Args:
        values: float32 [count, columns].
        sketches: Their projections, [count, width].
        others: Projections of the rows that they may be, [n, width].
        gather: Reads those rows.

    Returns:
        Numbers int64 [count] of the others; bool [count], whether they are certain; and the factor that makes these
        others most like the rows.
    """
    rows = torch.zeros(len(values), dtype=torch.int64)
    sure, free = torch.zeros(len(values), dtype=torch.bool), torch.ones(len(others), dtype=torch.bool)
    usual, dot, energy = torch.inf, 0.0, 0.0
    while not bool(sure.all()) and bool(free.any()):
        open_rows, left = (~sure).nonzero().flatten(), free.nonzero().flatten()
        near = nearest(values[open_rows], sketches[open_rows], others[left], partial(_among, gather, left))
        # What is left over is no match for that alone.
        chosen = near.clear & _like(near.distances, near.energies, usual)
        chosen &= torch.bincount(near.rows[chosen], minlength=len(left))[near.rows] == 1
        if usual == torch.inf:
            usual = float(near.distances.median())
        dot, energy = dot + float(near.dots[chosen].sum()), energy + float(near.energies[chosen].sum())
        own, theirs = open_rows[chosen], left[near.rows[chosen]]
        if not len(own):
            own, theirs = _equal_ones(values, open_rows, left, gather, usual)
        if not len(own):
            break
        rows[own], sure[own], free[theirs] = theirs, True, False
    return rows, sure, dot / max(energy, 1e-30)


def _among(gather: Gather, left: Tensor, numbers: Tensor) -> Tensor:
    return gather(left[numbers])


def _like(distances: Tensor, energies: Tensor, usual: float) -> Tensor:
    return distances <= torch.maximum(distances.new_tensor(_OUTLYING * usual), NEAR * energies)


def _equal_ones(values: Tensor, open_rows: Tensor, left: Tensor, gather: Gather, usual: float) -> tuple[Tensor, Tensor]:
    """Rows that are equal, for which it does not matter which of as many others each gets; and these others."""
    same: dict[bytes, list[int]] = {}
    for row in open_rows.tolist():
        same.setdefault(values[row].numpy().tobytes(), []).append(row)
    for members in same.values():
        count = len(members)
        if not 1 < count <= len(left):
            continue
        own, apart, energies = values[members[0]], [], []
        for start in range(0, len(left), _PIECE):
            piece = gather(left[start : start + _PIECE])
            apart.append((piece - own).square().sum(1))
            energies.append(piece.square().sum(1))
        distances, order = torch.cat(apart).sort()
        clear = count == len(left) or bool(distances[count] >= CLEAR * distances[count - 1])
        if clear and bool(_like(distances, torch.cat(energies)[order], usual)[:count].all()):
            return open_rows.new_tensor(members), left[order[:count]].sort().values
    return open_rows[:0], left[:0]
