"""The tensors of the GPTQ format: packing a quantized weight, and decoding what any writer packed.

A weight [rows, columns] under the prefix X becomes

    X.qweight  int32 [columns * bits / 32, rows]     codes, packed along the inputs
    X.qzeros   int32 [groups, rows * bits / 32]      zeros, packed along the outputs
    X.scales   float16 [groups, rows]
    X.g_idx    int32 [columns]                       group of each input: column // group_size

Packed values are one little-endian bit stream in 32-bit words; at 3 bits, 32 values fill 3 words.
Checkpoint format "gptq" (v1) stores `zero - 1`, "gptq_v2" stores `zero`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats import gptq_config
from hessquant.formats.dialect import FLOATING, INTEGERS, Dialect, layout_of, ragged, refuse, scale_faults
from hessquant.records import GridSpec


class Gptq(Dialect):
    """The GPTQ dialect; a missing `g_idx` means the natural order of the inputs."""

    title = "GPTQ"
    widths = gptq_config.WIDTHS
    variants = gptq_config.CHECKPOINT_FORMATS
    parts: ClassVar = {"qweight": INTEGERS, "qzeros": INTEGERS, "scales": FLOATING, "g_idx": INTEGERS}
    codes, zeros, scales, fourth = "qweight", "qzeros", "scales", "g_idx"
    transposed, always_zeros, any_groups = True, True, True
    describe = staticmethod(gptq_config.describe)
    read_settings = staticmethod(gptq_config.read_settings)

    def choose_variant(self, weights: Iterable[QuantizedWeight]) -> str:
        """v1 for symmetric weights; v2 otherwise.

        A zero of 0 would wrap in v1, and GPTQModel takes asymmetric v1 of no other writer than itself.
        """
        return "gptq" if all(weight.grid.spec.symmetric for weight in weights) else "gptq_v2"

    def stored_zeros(self, zeros: Tensor, variant: str) -> Tensor:
        """In v1 less 1, so that it has no place for a zero of 0."""
        if variant == "gptq" and bool((zeros == 0).any()):
            raise CheckpointError("a zero of 0 wraps in checkpoint format gptq; write gptq_v2")
        return zeros - 1 if variant == "gptq" else zeros

    def read_zeros(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Tensor:
        """Zeros uint8 [rows, groups]; v1's all-ones value is read as a wrapped 0."""
        zeros = super().read_zeros(parts, grid, variant)
        return (zeros + 1) & grid.top if variant == "gptq" else zeros

    def fourth_shape(self, columns: int) -> tuple[int, ...]:
        """A number per input."""
        return (columns,)

    def fourth_part(self, rows: int, columns: int, grid: GridSpec) -> Tensor:
        """The group of each input."""
        return _natural(columns, grid).to(torch.int32)

    def may_lack(self, part: str, grid: GridSpec) -> bool:
        """The groups of inputs, where they are in order."""
        return part == "g_idx"

    def dequantize(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Tensor:
        """Values float32 [rows, columns]; `g_idx` is taken literally."""
        codes, zeros, scales = self.streams(parts, grid, variant)
        groups, columns = scales.shape[1], codes.shape[1]
        if "g_idx" in parts:
            group_index = parts["g_idx"].cpu().to(torch.int64)
        elif columns % groups:
            raise CheckpointError(f"g_idx is missing, and {groups} groups do not divide {columns} inputs")
        else:
            group_index = torch.arange(columns) // (columns // groups)
        refuse(_index_fault(group_index, groups))
        values = codes.to(torch.float32)
        values -= zeros[:, group_index]
        values *= scales.to(torch.float32)[:, group_index]
        return values

    def unpack(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> QuantizedWeight:
        """Codes on a grid, which holds no permutation of the inputs."""
        weight = super().unpack(parts, grid, variant)
        if "g_idx" in parts:
            group_index = parts["g_idx"].cpu().to(torch.int64)
            refuse(_index_fault(group_index, weight.grid.scales.shape[1]))
            if not torch.equal(group_index, _natural(len(group_index), grid)):
                raise CheckpointError("g_idx permutes the inputs, which codes on a grid cannot hold")
        return weight

    def value_faults(self, parts: Mapping[str, Tensor], grid: GridSpec, variant: str) -> Iterator[str]:
        """Faults in the groups, the scales and the zeros."""
        columns, groups = self.weight_shape(layout_of(parts), grid)[1], len(parts["scales"])
        fault = ragged(columns, grid, "; vLLM cannot open this")
        if fault:
            yield fault
        if groups != grid.groups(columns):
            made = grid.groups(columns)
            yield f"scales has {groups} groups, but the config's group size {grid.group_size} makes {made}"
        yield from scale_faults("scales", parts["scales"])
        zeros = self.read_zeros(parts, grid, variant)
        if variant == "gptq" and bool((zeros == 0).any()):
            yield "qzeros holds a zero that wraps in checkpoint format gptq; readers differ in what it means"
        elif grid.symmetric and bool((zeros != grid.middle).any()):
            yield f"the config says symmetric, but qzeros stands for zeros other than {grid.middle}"
        if "g_idx" not in parts:
            yield "g_idx is missing; transformers cannot open this"
            return
        group_index = parts["g_idx"].to(torch.int64)
        fault = _index_fault(group_index, groups)
        if fault:
            yield fault
        elif not torch.equal(group_index, _natural(columns, grid)):
            yield "g_idx permutes the inputs; vLLM reads such a weight wrongly or not at all"


def _natural(columns: int, grid: GridSpec) -> Tensor:
    """Group of each input int64 [columns], where they are in order; the last group may be ragged."""
    return torch.arange(columns) // (columns if grid.group_size == -1 else grid.group_size)


def _index_fault(group_index: Tensor, groups: int) -> str | None:
    """That `g_idx` names a group that does not exist, in one sentence; None if it does not."""
    low, high = int(group_index.min()), int(group_index.max())
    return None if low >= 0 and high < groups else f"g_idx names groups {low} to {high}, but there are {groups}"
