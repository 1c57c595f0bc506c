"""The compressed-tensors formats of 4-bit floats, "nvfp4-pack-quantized" and "mxfp4-pack-quantized"; weights only.

A weight [rows, columns] under the prefix X becomes

    X.weight_packed        uint8 [rows, columns / 2]     numbers of E2M1, the first of two in the low bits
    X.weight_scale         float8 E4M3 [rows, groups]    nvfp4: scales times the global scale, groups of 16
                           uint8 [rows, groups]          mxfp4: exponents of powers of two, plus 127, groups of 32
    X.weight_global_scale  float32 [1]                   nvfp4 only

E2M1 has a sign, two bits of exponent and one of mantissa: the rank of a number by size is its lower three bits, and our
codes are 8 plus or minus that. Its second zero is read as zero.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hessquant.config import Config
from hessquant.core.grid import FLOAT_GRIDS, Grid, QuantizedWeight
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats.bits import pack_lines
from hessquant.formats.compressed_tensors import CompressedTensors
from hessquant.formats.dialect import layout_of, ragged, refuse, scale_faults
from hessquant.records import GridSpec

_SIGN = 8
"""The sign bit of a number of E2M1."""


class FloatTensors(CompressedTensors):
    """What the two have in common: numbers of E2M1, and no zeros.

    Attributes:
        grid: The grid that all weights are on, but for a global scale of their own.
        strategy: What a config calls scales of that kind.
        scale_dtype: What it calls their dtype.
    """

    grid: GridSpec
    strategy: str
    scale_dtype: str
    widths = (4,)
    word = 8

    def target_fault(self, rows: int, columns: int, grid: GridSpec) -> str | None:
        """Why a weight has no form in it, in one sentence; None if it has one."""
        if replace(grid, global_scale=1.0) != self.grid:
            return (
                f"the {self.title} format holds {self.grid}, not {grid}; quantize anew for it, with no other settings"
            )
        return ragged(columns, grid, "; leave this weight in 16 bit")

    def stored_scales(self, grid: Grid) -> Tensor:
        """Scales times the global scale in E4M3, or exponents of powers of two; on the CPU."""
        scales, spec = grid.scales, grid.spec
        stored = (scales * spec.global_scale).to(getattr(torch, spec.scale_dtype))
        if not torch.equal(stored.to(torch.float32) / spec.global_scale, scales):
            raise CheckpointError(
                f"its scales, by the global scale {spec.global_scale:g}, are not exact in {self.title}"
            )
        return stored if self.fourth else stored.view(torch.uint8)

    def pack(self, weight: QuantizedWeight, variant: str) -> dict[str, Tensor]:
        """Pack one weight into its parts, on the CPU."""
        (rows, columns), grid, codes = weight.codes.shape, weight.grid.spec, weight.codes
        refuse(self.target_fault(rows, columns, grid))
        if bool((weight.grid.zeros != grid.middle).any()) or bool((codes == 0).any()):
            raise CheckpointError(
                f"a code or a zero stands for no number of E2M1; zeros are {grid.middle}, codes above 0"
            )
        numbers = torch.where(codes < grid.middle, grid.middle - codes | _SIGN, codes - grid.middle)
        made = {
            self.codes: pack_lines(numbers.T, grid.bits).T.contiguous().view(torch.uint8),
            self.scales: self.stored_scales(weight.grid),
        }
        return made | ({self.fourth: torch.tensor([grid.global_scale])} if self.fourth else {})

    def unpack(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> QuantizedWeight:
        """Read one weight back as codes on a grid."""
        refuse(self.layout_fault(layout_of(parts), grid))
        pairs = parts[self.codes]
        refuse(ragged(2 * pairs.shape[1], grid))
        numbers = torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(1)
        size = numbers & (_SIGN - 1)
        codes = torch.where(numbers < _SIGN, grid.middle + size, grid.middle - size)
        spec = replace(grid, global_scale=float(parts[self.fourth]) if self.fourth else 1.0)
        scales = self._scales(parts) / spec.global_scale
        return QuantizedWeight(codes, Grid(spec, scales, torch.full(scales.shape, grid.middle, dtype=torch.uint8)))

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Scales as they are stored, in float32."""
        stored = parts[self.scales]
        return (stored if self.fourth else stored.view(torch.float8_e8m0fnu)).to(torch.float32)

    def value_faults(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Iterator[str]:
        """Faults in the groups and the scales."""
        if fault := ragged(2 * parts[self.codes].shape[1], grid, "; vLLM cannot open this"):
            yield fault
        yield from scale_faults(self.scales, self._scales(parts))
        if self.fourth:
            yield from scale_faults(self.fourth, parts[self.fourth])

    def stated_weights(self, settings: GridSpec, config: Config | None) -> dict[str, Any]:
        """What a group says of how its weights are quantized."""
        return {
            **super().stated_weights(settings, config),
            "type": "float",
            "strategy": self.strategy,
            "scale_dtype": self.scale_dtype,
        }

    def read_weights(self, weights: Mapping[str, Any], where: str) -> GridSpec:
        """The grid of which a group says that; there is one only."""
        expected = {
            "num_bits": 4,
            "type": "float",
            "strategy": self.strategy,
            "group_size": self.grid.group_size,
            "symmetric": True,
        }
        for name, value in expected.items():
            stated = weights.get(name, True if name == "symmetric" else None)
            if stated != value:
                raise SourceError(f"{where}: {name} is {stated!r}; in {self.variants[0]} it can only be {value!r}")
        return self.grid


class Nvfp4(FloatTensors):
    """Scales in E4M3 with a global scale, by which they are to be divided."""

    title, variants = "nvfp4", ("nvfp4-pack-quantized",)
    grid = FLOAT_GRIDS["nvfp4"]
    strategy, scale_dtype = "tensor_group", "torch.float8_e4m3fn"
    fourth, fourth_size = "weight_global_scale", 1
    parts: ClassVar = {"weight_packed": ("U8",), "weight_scale": ("F8_E4M3",), "weight_global_scale": ("F32",)}


class Mxfp4(FloatTensors):
    """Powers of two as scales, E8M0."""

    title, variants = "mxfp4", ("mxfp4-pack-quantized",)
    grid = FLOAT_GRIDS["mxfp4"]
    strategy, scale_dtype = "group", "torch.uint8"
    fourth = ""
    parts: ClassVar = {"weight_packed": ("U8",), "weight_scale": ("U8",)}
