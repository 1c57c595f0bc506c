"""That a GGUF base holds what a quantized checkpoint has kept in 16 bit, as far as it holds it row by row."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hessquant.checkpoint.gguf_rows import Rows, is_near, samples
from hessquant.errors import PlanError

_ROUNDING, _SMALLEST = 2.0**-8, 2.0**-24
"""How far a number may be from itself in another 16-bit type: as a part of it, and where float16 has no finer steps."""

_CHUNK_ROWS = 1 << 10


def same_rows(name: str, values: Tensor, rows: Rows) -> Iterator[tuple[str, Tensor]]:
    """Find a matrix that was kept, and compare it.

    Args:
        name: Its name.
        values: [rows, columns], as stored.
        rows: Those of the base that it may be among.

    Yields:
        A tensor of the base, and the numbers of rows in it that are the matrix's; none if the base has it in another
        form.

    Raises:
        PlanError: If a row is there with other values.
    """
    asked = samples(torch.arange(len(values)))
    near = rows.nearest(values[asked].to(torch.float32))
    close = is_near(near)
    if 2 * int(close.sum()) < len(asked):
        return
    # Embeddings and most others are in order, which is quicker to look at than all pairs of rows.
    shift = int(torch.mode((near.rows - asked)[close]).values)
    in_order = 2 * int((near.rows - asked == shift).sum()) >= len(asked)
    first, end = rows.slice_around(int(near.rows[near.rows - asked == shift][0]))
    for start in range(0, len(values), _CHUNK_ROWS):
        own = values[start : start + _CHUNK_ROWS].to(torch.float32)
        if in_order:
            there = torch.arange(start, start + len(own)) + shift
            known = (there >= first) & (there < end)
        else:
            near = rows.nearest(own)
            there, known = near.rows, near.clear & is_near(near)
        yield from _compared(name, own[known], there[known], rows)


def _compared(name: str, own: Tensor, numbers: Tensor, rows: Rows) -> Iterator[tuple[str, Tensor]]:
    theirs = rows.gather(numbers)
    for tensor, places, there in rows.by_tensor(numbers):
        a, b = own[places], theirs[places]
        if bool(((a - b).abs() > _ROUNDING * b.abs() + _SMALLEST).any()):
            raise PlanError(
                f"{name} is {tensor} in {rows.base.name}, but with other values there: that is a file of another "
                "model, or of another version of it; make it of the model that was quantized"
            )
        yield tensor, there
