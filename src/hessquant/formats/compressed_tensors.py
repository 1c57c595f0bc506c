"""The tensors of the compressed-tensors format "pack-quantized".

A weight [rows, columns] under the prefix X becomes

    X.weight_packed      int32 [rows, columns * bits / 32]    codes, packed along the inputs
    X.weight_scale       float16 [rows, groups]
    X.weight_zero_point  int32 [rows * bits / 32, groups]     zeros, packed along the outputs; asymmetric weights only
    X.weight_shape       int64 [2]                            rows, columns

The format thinks in signed integers, code - 2^(bits-1), and stores them with that added again: our codes and zeros.
Only widths that divide 32 are known here, since packers of the format disagree about the others.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats import compressed_tensors_config as config
from hessquant.formats.bits import WORD
from hessquant.formats.dialect import FLOATING, INTEGERS, Dialect, layout_of, ragged, scale_faults
from hessquant.records import GridSpec


class CompressedTensors(Dialect):
    """The compressed-tensors dialect; it has one variant."""

    title = "compressed-tensors"
    widths = config.WIDTHS
    variants = (config.VARIANT,)
    parts: ClassVar = {
        "weight_packed": INTEGERS,
        "weight_scale": FLOATING,
        "weight_zero_point": INTEGERS,
        "weight_shape": ("I64", "I32"),
    }
    codes, zeros, scales, fourth = "weight_packed", "weight_zero_point", "weight_scale", "weight_shape"
    transposed, always_zeros, any_groups = False, False, False
    describe = staticmethod(config.describe)
    read_settings = staticmethod(config.read_settings)

    def choose_variant(self, weights: Iterable[QuantizedWeight]) -> str:
        """The one variant that is written."""
        return config.VARIANT

    def fourth_shape(self, columns: int) -> tuple[int, ...]:
        """Two numbers."""
        return (2,)

    def fourth_part(self, rows: int, columns: int, grid: GridSpec) -> Tensor:
        """Rows and columns."""
        return torch.tensor([rows, columns])

    def may_lack(self, part: str, grid: GridSpec) -> bool:
        """Zeros, where they are fixed."""
        return part == "weight_zero_point" and grid.symmetric

    def streams(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, zeros and scales; columns that fill no word are padded, and cut off here."""
        codes, zeros, scales = super().streams(parts, grid, variant)
        stated = parts["weight_shape"].tolist()
        if not self._holds(parts, grid):
            raise CheckpointError(f"weight_shape says {stated}, but weight_packed holds {list(codes.shape)}")
        return codes[:, : stated[1]].contiguous(), zeros, scales

    def value_faults(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Iterator[str]:
        """Faults in the shape, the scales and the zeros."""
        stated, packed = parts["weight_shape"].tolist(), parts["weight_packed"]
        if not self._holds(parts, grid):
            yield f"weight_shape says {stated}, but weight_packed is {list(packed.shape)}"
        elif fault := ragged(stated[1], grid, "; vLLM cannot open this"):
            yield fault
        yield from scale_faults("weight_scale", parts["weight_scale"])
        if grid.symmetric and "weight_zero_point" in parts:
            yield "the config says symmetric, but there is a weight_zero_point"

    def _holds(self, parts: Mapping[str, Tensor], grid: GridSpec) -> bool:
        """Whether the packed codes are those of a weight of the shape that is stated."""
        (rows, columns), (held, full) = parts["weight_shape"].tolist(), self.weight_shape(layout_of(parts), grid)
        return bool(rows == held and 0 <= full - columns < WORD // grid.bits)
