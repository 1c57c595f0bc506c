"""Every form that a result can have on disk, by the name that `--format` takes: what planning has to know of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

from hessquant.formats import gguf_blocks
from hessquant.formats.dialect import Dialect
from hessquant.formats.dialects import DIALECTS
from hessquant.records import GridSpec

_ITEM_BYTES = {"I64": 8, "I32": 4, "F16": 2}


@dataclass(frozen=True)
class Output:
    """One form. Both functions take rows, columns and settings of a weight.

    Attributes:
        target_fault: Why the weight has no form in it, in one sentence; None if it has one.
        packed_bytes: Bytes of a weight that has no such fault.
    """

    target_fault: Callable[[int, int, GridSpec], str | None]
    packed_bytes: Callable[[int, int, GridSpec], int]


def _packed_bytes(dialect: Dialect, rows: int, columns: int, stated: GridSpec) -> int:
    return sum(_ITEM_BYTES[dtype] * prod(shape) for dtype, shape in dialect.layout(rows, columns, stated).values())


OUTPUTS: Mapping[str, Output] = {
    **{name: Output(dialect.target_fault, partial(_packed_bytes, dialect)) for name, dialect in DIALECTS.items()},
    "gguf": Output(gguf_blocks.target_fault, gguf_blocks.packed_bytes),
}
