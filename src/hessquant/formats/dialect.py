"""What an output format is, and what a dialect of quantized weights is, so that no room above names one.

A quantized weight `X.weight` becomes parts `X.<part>`. The config says how to read them; what is written is packed by
the config as it reads back, so that the two cannot disagree.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats.bits import WORD, half_scales, pack_lines, unpack_lines
from hessquant.formats.described import Description, Settings
from hessquant.records import GridSpec

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (as safetensors spells it) and shape of each part of one weight."""

INTEGERS, FLOATING = ("I32",), ("F16", "BF16", "F32")
"""Dtypes that packed numbers are read in, and scales; the first is written."""

_DTYPES = {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight as a checkpoint has it: its shape, and its grid."""

    rows: int
    columns: int
    grid: GridSpec


class Output(Protocol):
    """A form that a result can have on disk: what planning has to know of it."""

    def target_fault(self, rows: int, columns: int, grid: GridSpec) -> str | None:
        """Why a weight has no form in it, in one sentence; None if it has one."""

    def packed_bytes(self, rows: int, columns: int, grid: GridSpec) -> int:
        """Bytes of a weight that has no such fault."""


class Dialect(Output, Protocol):
    """One dialect. It takes parts by their short names ("scales"), never by the module's.

    All hold the same numbers: codes [rows, columns] packed along the inputs, zeros [rows, groups] packed along the
    outputs, scales [rows, groups]; each either so or transposed. A fourth part says something about the weight's shape.

    Attributes:
        title: Its name in sentences.
        widths: Bits per code that readers of the format know.
        variants: Those of the dialect, the usual one first.
        parts: Dtypes that each part is read in, by its name and in their order on disk.
        codes, zeros, scales, fourth: Which part is which.
        fourth_size: Numbers in the fourth part; 0 = one per input.
        optional: Parts that a weight can be read without.
        transposed: Whether the first three are stored with the inputs or groups first.
        always_zeros: Whether symmetric weights have a part of zeros, too.
        any_groups: Whether weights are read with other numbers of groups than the group size makes.
    """

    title: str
    widths: tuple[int, ...]
    variants: tuple[str, ...]
    parts: ClassVar[Mapping[str, tuple[str, ...]]]
    codes: str
    zeros: str
    scales: str
    fourth: str
    fourth_size: int
    optional: tuple[str, ...]
    transposed: bool
    always_zeros: bool
    any_groups: bool

    def target_fault(self, rows: int, columns: int, grid: GridSpec) -> str | None:
        """Why a weight has no form in it, in one sentence; None if it has one."""
        if grid.bits not in self.widths:
            known = ", ".join(map(str, self.widths))
            return f"the {self.title} format has no readers for {grid.bits} bits; choose one of {known}"
        counts = {f"{columns} inputs": columns}
        if self._has_zeros(grid):
            counts[f"{rows} outputs" if self.always_zeros else f"zeros of {rows} outputs"] = rows
        for what, count in counts.items():
            if count * grid.bits % WORD:
                return f"{what} of {grid.bits} bits do not fill whole 32-bit words; leave this weight in 16 bit"
        return ragged(columns, grid, "; choose a divisor or -1")

    def packed_bytes(self, rows: int, columns: int, grid: GridSpec) -> int:
        """Bytes of a weight that has no `target_fault`."""
        return sum(_ITEM_BYTES[dtype] * prod(shape) for dtype, shape in self.layout(rows, columns, grid).values())

    def layout(self, rows: int, columns: int, grid: GridSpec) -> Layout:
        """Parts of a weight that has no `target_fault`."""
        shapes = self._shapes(rows, columns, grid.groups(columns), grid)
        written = (part for part in self.parts if part != self.zeros or self._has_zeros(grid))
        return {part: (self.parts[part][0], shapes[part]) for part in written}

    def modules(self, names: Iterable[str]) -> list[str]:
        """Modules whose packed codes are among these tensor names, in their order."""
        ending = f".{self.codes}"
        return [name.removesuffix(ending) for name in names if name.endswith(ending)]

    def part_names(self, module: str) -> dict[str, str]:
        """Tensor name of each part of a module."""
        return {part: f"{module}.{part}" for part in self.parts}

    def choose_variant(self, weights: Iterable[QuantizedWeight]) -> str:
        """The most widely read variant that holds these weights."""
        return self.variants[0]

    def describe(self, description: Description, config: Config | None, variant: str, version: str) -> dict[str, Any]:
        """The `quantization_config` of exactly what a checkpoint written after a plan holds; no paths, no texts.

        Args:
            description: What it has to say.
            config: What the weights were solved with; None = not known.
            variant: The variant that they are packed in.
            version: Version of Hessquant.
        """

    def read_settings(self, described: Mapping[str, Any]) -> Settings:
        """Read a `quantization_config`, whoever wrote it.

        Raises:
            SourceError: If it is not of this format or says something that has no meaning.
        """

    def pack(self, weight: QuantizedWeight, variant: str) -> dict[str, Tensor]:
        """Pack one weight into its parts, on the CPU.

        Raises:
            CheckpointError: If the shape, the bits, the scales or the zeros have no place in the variant.
        """
        (rows, columns), grid, zeros = weight.codes.shape, weight.grid.spec, weight.grid.zeros
        refuse(self.target_fault(rows, columns, grid))
        made = {self.codes: pack_lines(weight.codes.T, grid.bits).T, self.scales: half_scales(weight.grid.scales)}
        if self._has_zeros(grid):
            made[self.zeros] = pack_lines(self.stored_zeros(zeros, variant), grid.bits)
        elif bool((zeros != grid.middle).any()):
            raise CheckpointError(f"a symmetric weight has zeros other than {grid.middle}")
        made = {part: (tensor.T if self.transposed else tensor).contiguous() for part, tensor in made.items()}
        return made | {self.fourth: self.fourth_part(rows, columns, grid)}

    def stored_zeros(self, zeros: Tensor, variant: str) -> Tensor:
        """Zeros uint8 as the variant stores them.

        Raises:
            CheckpointError: If it has no place for one.
        """
        return zeros

    def fourth_part(self, rows: int, columns: int, grid: GridSpec) -> Tensor:
        """The fourth part of what is written."""

    def layout_fault(self, parts: Layout, grid: GridSpec) -> str | None:
        """What is wrong with the parts of one weight as found in a checkpoint, in one sentence; None if nothing is."""
        for part in self.parts:
            if part not in parts and part not in self.optional and (part != self.zeros or self._has_zeros(grid)):
                return f"{part} is missing"
            if part in parts and 0 in parts[part][1]:
                return f"{part} is empty"
        for part, (dtype, shape) in parts.items():
            if dtype not in self.parts[part] or len(shape) != (1 if part == self.fourth else 2):
                return f"{part} is {dtype} {list(shape)}, not {' or '.join(self.parts[part])} of the right rank"
        (rows, words), (_, groups) = (self._turned(parts[part][1]) for part in (self.codes, self.scales))
        columns, left = divmod(words * WORD, grid.bits)
        if left:
            return f"{self.codes} has {words} words per row, which do not hold whole codes of {grid.bits} bits"
        said = f"{groups} groups" if self.any_groups else f"group size {grid.group_size}"
        shapes = self._shapes(rows, columns, groups if self.any_groups else grid.groups(columns), grid)
        for part in self.parts:
            if part in parts and parts[part][1] != shapes[part]:
                return (
                    f"{part} is {list(parts[part][1])}, but {list(shapes[part])} goes with {self.codes} "
                    f"{list(parts[self.codes][1])} at {grid.bits} bits and {said}"
                )
        return None

    def weight_shape(self, parts: Layout, grid: GridSpec) -> tuple[int, int]:
        """Rows and columns of a weight whose parts have no `layout_fault`; columns that fill no word count as full."""
        rows, words = self._turned(parts[self.codes][1])
        return rows, words * WORD // grid.bits

    def dequantize(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Tensor:
        """Decode one weight to float32 [rows, columns], whoever wrote it.

        Raises:
            CheckpointError: If parts are missing or do not fit together.
        """
        return self.unpack(parts, grid, variant).dequantize()

    def unpack(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> QuantizedWeight:
        """Read one weight back as codes on a grid; the same decoder as `dequantize`.

        Raises:
            CheckpointError: If parts are missing, do not fit together, or are on no grid of these settings.
        """
        codes, zeros, scales = self.streams(parts, grid, variant)
        groups = grid.groups(codes.shape[1])
        refuse(ragged(codes.shape[1], grid))
        if scales.shape[1] != groups:
            raise CheckpointError(f"{scales.shape[1]} groups, but group size {grid.group_size} makes {groups}")
        spec = replace(grid, scale_dtype=str(scales.dtype).removeprefix("torch."))
        return QuantizedWeight(codes, Grid(spec, scales.contiguous(), zeros.contiguous()))

    def streams(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> tuple[Tensor, Tensor, Tensor]:
        """Codes uint8 [rows, columns], zeros uint8 and scales [rows, groups].

        Raises:
            CheckpointError: If parts are missing or do not fit together.
        """
        refuse(self.layout_fault(layout_of(parts), grid))
        codes, scales = parts[self.codes], parts[self.scales]
        if self.transposed:
            codes, scales = codes.T, scales.T
        numbers = unpack_lines(codes, grid.bits)
        if self._has_zeros(grid):
            return numbers, self.read_zeros(parts, grid, variant)[: len(numbers)], scales
        return numbers, torch.full(scales.shape, grid.middle, dtype=torch.uint8), scales

    def read_zeros(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Tensor:
        """Zeros uint8 [rows, groups]; rows that fill no word count as full."""
        zeros = parts[self.zeros]
        return unpack_lines(zeros if self.transposed else zeros.T, grid.bits).T

    def zeros_fault(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> str | None:
        """Why readers may differ in the zeros of one weight, in one sentence; None if they do not."""
        return None

    def value_faults(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Iterator[str]:
        """One sentence per fault in the values of one weight, given its parts without `layout_fault`."""

    def _has_zeros(self, grid: GridSpec) -> bool:
        return self.always_zeros or not grid.symmetric

    def _turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self.transposed else shape

    def _shapes(self, rows: int, columns: int, groups: int, grid: GridSpec) -> dict[str, tuple[int, ...]]:
        """Shapes of all parts; numbers that fill no word are padded."""
        words, zero_words = (-(-count * grid.bits // WORD) for count in (columns, rows))
        return {
            self.codes: self._turned((rows, words)),
            self.zeros: self._turned((zero_words, groups)),
            self.scales: self._turned((rows, groups)),
            self.fourth: (self.fourth_size or columns,),
        }


def ragged(columns: int, grid: GridSpec, advice: str = "") -> str | None:
    """That the last group would have fewer inputs than the others, in one sentence; None if all have as many."""
    if grid.divides(columns):
        return None
    return f"group size {grid.group_size} does not divide {columns} inputs{advice}"


def refuse(fault: str | None) -> None:
    """Raise CheckpointError if there is a fault."""
    if fault:
        raise CheckpointError(fault)


def scale_faults(part: str, scales: Tensor) -> Iterator[str]:
    """That scales are none, in one sentence."""
    bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
    if bad:
        yield f"{part} has {bad} values that are not finite and positive"


def layout_of(parts: Mapping[str, Tensor]) -> Layout:
    """The layout of parts in memory."""
    return {part: (_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape)) for part, tensor in parts.items()}
