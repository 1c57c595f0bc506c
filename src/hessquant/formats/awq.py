"""The AWQ format (AutoAWQ's "gemm" layout): read as a source, never written.

A weight [rows, columns] under the prefix X is

    X.qweight  int32 [columns, rows / 8]   4-bit codes, eight outputs to a word
    X.qzeros   int32 [groups, rows / 8]    zeros likewise
    X.scales   float16 [groups, rows]

Place i of a word, from its lowest bits, holds output `_ORDER[i]` of the word's eight. Zeros are stored as they are:
value = scale * (code - zero).
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats.bits import WORD, unpack_lines
from hessquant.formats.described import LARGEST_GROUP, Description, Reading, Settings, Stated
from hessquant.formats.dialect import FLOATING, INTEGERS, Dialect, Layout, layout_of, ragged, refuse, scale_faults
from hessquant.formats.stored import stated
from hessquant.records import GridSpec

_READ_ONLY = "the AWQ format is read, and not written"

_BITS = 4
_ORDER = 0, 2, 4, 6, 1, 3, 5, 7


class Awq(Dialect):
    """The AWQ dialect, which has readers here and no writer."""

    title = "AWQ"
    widths = (_BITS,)
    variants = ("awq",)
    parts: ClassVar = {"qweight": INTEGERS, "qzeros": INTEGERS, "scales": FLOATING}
    codes, zeros, scales, fourth = "qweight", "qzeros", "scales", ""
    fourth_size, optional = 0, ()
    transposed, always_zeros, any_groups = True, True, False

    def read_settings(self, described: Mapping[str, Any]) -> Settings:
        """Read a `quantization_config`, whoever wrote it.

        Raises:
            SourceError: If it is not of the gemm layout or says something that has no meaning.
        """
        layout = described.get("version") or described.get("format") or "gemm"
        if str(layout).lower() != "gemm":
            raise SourceError(f"quantization_config: the AWQ version is {layout!r}; only gemm can be decoded")
        bits, group_size = stated(described, "bits", "w_bit"), stated(described, "group_size", "q_group_size")
        if bits != _BITS:
            raise SourceError(f"quantization_config: bits is {bits!r}; AWQ's are {_BITS}")
        if type(group_size) is not int or not (group_size == -1 or 0 < group_size < LARGEST_GROUP):
            raise SourceError(f"quantization_config: group_size is {group_size!r}; it must be -1 or positive")
        kept = described.get("modules_to_not_convert") or []
        if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
            raise SourceError("quantization_config: modules_to_not_convert is not a list of names")
        grid = GridSpec(_BITS, group_size, symmetric=False)

        def module(name: str) -> Stated:
            return None if any(f".{part}." in f".{name}." for part in kept) else grid

        return Settings("awq", (Reading("vLLM and transformers", module, heads_apart=True),))

    def target_fault(self, rows: int, columns: int, grid: GridSpec) -> str | None:
        """That nothing is written in it."""
        return _READ_ONLY

    def describe(self, description: Description, config: Config | None, variant: str, version: str) -> dict[str, Any]:
        """Refused with CheckpointError (`Dialect.describe`)."""
        raise CheckpointError(_READ_ONLY)

    def fourth_part(self, rows: int, columns: int, grid: GridSpec) -> Tensor:
        """Refused with CheckpointError: there is none."""
        raise CheckpointError(_READ_ONLY)

    def layout_fault(self, parts: Layout, grid: GridSpec) -> str | None:
        """What is wrong with the parts of one weight as found in a checkpoint, in one sentence; None if nothing is."""
        for part, dtypes in self.parts.items():
            if part not in parts:
                return f"{part} is missing"
            dtype, shape = parts[part]
            if dtype not in dtypes or len(shape) != 2 or 0 in shape:
                return f"{part} is {dtype} {list(shape)}, not {' or '.join(dtypes)} of two dimensions"
        rows, columns = self.weight_shape(parts, grid)
        groups = grid.groups(columns)
        shapes = {"qzeros": (groups, parts["qweight"][1][1]), "scales": (groups, rows)}
        for part, shape in shapes.items():
            if parts[part][1] != shape:
                return (
                    f"{part} is {list(parts[part][1])}, but {list(shape)} goes with qweight "
                    f"{list(parts['qweight'][1])} and group size {grid.group_size}"
                )
        return ragged(columns, grid)

    def weight_shape(self, parts: Layout, grid: GridSpec) -> tuple[int, int]:
        """Rows and columns of a weight whose parts have no `layout_fault`."""
        columns, words = parts["qweight"][1]
        return words * WORD // _BITS, columns

    def streams(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 [rows, columns], zeros uint8 and scales [rows, groups]."""
        refuse(self.layout_fault(layout_of(parts), grid))
        codes, zeros = (_in_order(parts[part]).T.contiguous() for part in ("qweight", "qzeros"))
        return codes, zeros, parts["scales"].T

    def value_faults(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Iterator[str]:
        """Faults in the scales."""
        yield from scale_faults("scales", parts["scales"])


def _in_order(words: Tensor) -> Tensor:
    """Numbers uint8 [lines, outputs] of words int32 [lines, outputs / 8]."""
    stored = unpack_lines(words, _BITS).reshape(len(words), -1, len(_ORDER))
    ordered = torch.empty_like(stored)
    ordered[..., list(_ORDER)] = stored
    return ordered.reshape(len(words), -1)
