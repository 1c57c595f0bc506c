"""The tensors of the GPTQ format: packing a quantized weight, and decoding what any writer packed.

A weight [rows, columns] under the prefix X becomes

    X.qweight  int32 [columns * bits / 32, rows]     codes, packed along the inputs
    X.qzeros   int32 [groups, rows * bits / 32]      zeros, packed along the outputs
    X.scales   float16 [groups, rows]
    X.g_idx    int32 [columns]                       group of each input: column // group_size

Packed values are one little-endian bit stream in 32-bit words; at 3 bits, 32 values fill 3 words.
Checkpoint format "gptq" (v1) stores `zero - 1`, "gptq_v2" stores `zero`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats.bits import WORD, pack_lines, unpack_lines
from hessquant.formats.dialect import Layout, half_scales, layout_of
from hessquant.records import GridSpec

CheckpointFormat = Literal["gptq", "gptq_v2"]

BITS = (2, 3, 4, 8)
"""Code widths that readers of the format know."""

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_FLOATING = ("F16", "BF16", "F32")


def target_fault(rows: int, columns: int, stated: GridSpec) -> str | None:
    """Why a weight has no GPTQ form, in one sentence; None if it has one."""
    bits, group_size = stated.bits, stated.group_size
    if bits not in BITS:
        return f"the GPTQ format has no readers for {bits} bits; choose one of {', '.join(map(str, BITS))}"
    for count, what in ((columns, "inputs"), (rows, "outputs")):
        if count * bits % WORD:
            return f"{count} {what} of {bits} bits do not fill whole 32-bit words; leave this weight in 16 bit"
    if group_size != -1 and columns % group_size:
        return f"group size {group_size} does not divide {columns} inputs; choose a divisor or -1"
    return None


def layout(rows: int, columns: int, stated: GridSpec) -> Layout:
    """Dtype and shape of each part of a weight that has no `target_fault`."""
    groups = stated.groups(columns)
    return {
        "qweight": ("I32", (columns * stated.bits // WORD, rows)),
        "qzeros": ("I32", (groups, rows * stated.bits // WORD)),
        "scales": ("F16", (groups, rows)),
        "g_idx": ("I32", (columns,)),
    }


def layout_fault(parts: Layout, stated: GridSpec) -> str | None:
    """What is wrong with the parts of one weight as found in a checkpoint, in one sentence; None if nothing is.

    A missing `g_idx` is not a fault here: it means the natural order of the inputs.
    """
    bits = stated.bits
    for part in PARTS[:3]:
        if part not in parts:
            return f"{part} is missing"
        if 0 in parts[part][1]:
            return f"{part} is empty"
    for part, (dtype, shape) in parts.items():
        wanted = _FLOATING if part == "scales" else ("I32",)
        if dtype not in wanted or len(shape) != (1 if part == "g_idx" else 2):
            return f"{part} is {dtype} {list(shape)}, not {' or '.join(wanted)} of the right rank"
    (words, rows), (groups, _) = parts["qweight"][1], parts["scales"][1]
    columns = words * WORD // bits
    if words * WORD % bits:
        return f"qweight has {words} words per row, which do not hold whole codes of {bits} bits"
    expected = {"qzeros": (groups, rows * bits // WORD), "scales": (groups, rows), "g_idx": (columns,)}
    for part, shape in expected.items():
        if part in parts and parts[part][1] != shape:
            return (
                f"{part} is {list(parts[part][1])}, but {list(shape)} goes with qweight "
                f"{[words, rows]} at {bits} bits and {groups} groups"
            )
    return None


def weight_shape(parts: Layout, stated: GridSpec) -> tuple[int, int]:
    """Rows and columns of a weight whose parts have no `layout_fault`."""
    words, rows = parts["qweight"][1]
    return rows, words * WORD // stated.bits


def choose_checkpoint_format(weights: Iterable[QuantizedWeight]) -> CheckpointFormat:
    """The most widely read variant that holds these weights.

    v1 for symmetric weights; v2 otherwise: a zero of 0 would wrap in v1, and GPTQModel takes asymmetric v1 of no other
    writer than itself.
    """
    return "gptq" if all(weight.grid.spec.symmetric for weight in weights) else "gptq_v2"


def pack(weight: QuantizedWeight, checkpoint_format: str) -> dict[str, Tensor]:
    """Pack one weight into its parts, on the CPU.

    Raises:
        CheckpointError: If the shape, the bits, the scales or (in v1) a zero of 0 have no place in the format.
    """
    spec = weight.grid.spec
    rows, columns = weight.codes.shape
    fault = target_fault(rows, columns, spec)
    if fault:
        raise CheckpointError(fault)
    zeros = weight.grid.zeros.cpu()
    if checkpoint_format == "gptq":
        if bool((zeros == 0).any()):
            raise CheckpointError("a zero of 0 wraps in checkpoint format gptq; write gptq_v2")
        zeros = zeros - 1
    width = spec.width(columns)
    return {
        "qweight": pack_lines(weight.codes.cpu().T, spec.bits).contiguous(),
        "qzeros": pack_lines(zeros, spec.bits).T.contiguous(),
        "scales": half_scales(weight.grid.scales).T.contiguous(),
        "g_idx": (torch.arange(columns) // width).to(torch.int32),
    }


def dequantize(parts: Mapping[str, Tensor], stated: GridSpec, checkpoint_format: str) -> Tensor:
    """Decode one weight to float32 [rows, columns], whoever wrote it; `g_idx` is taken literally.

    Raises:
        CheckpointError: If parts are missing or do not fit together.
    """
    codes, zeros, group_index = _unpack_parts(parts, stated, checkpoint_format)
    scales = parts["scales"].to(torch.float32).T
    values = codes.to(torch.float32)
    values -= zeros.T[:, group_index]
    values *= scales[:, group_index]
    return values


def unpack(parts: Mapping[str, Tensor], stated: GridSpec, checkpoint_format: str) -> QuantizedWeight:
    """Read one weight back as codes on a grid; the same decoder as `dequantize`.

    Raises:
        CheckpointError: If parts are missing, do not fit together, or are on no grid of these settings.
    """
    codes, zeros, group_index = _unpack_parts(parts, stated, checkpoint_format)
    columns, scales = codes.shape[1], parts["scales"]
    spec = replace(stated, scale_dtype=str(scales.dtype).removeprefix("torch."))
    groups = stated.groups(columns)
    if scales.shape[0] != groups or groups * spec.width(columns) != columns:
        raise CheckpointError(f"{scales.shape[0]} groups, but group size {spec.group_size} makes {groups}")
    if not torch.equal(group_index, torch.arange(columns) // spec.width(columns)):
        raise CheckpointError("g_idx permutes the inputs, which codes on a grid cannot hold")
    return QuantizedWeight(codes, Grid(spec, scales.T.contiguous(), zeros.T.contiguous()))


def _unpack_parts(
    parts: Mapping[str, Tensor], stated: GridSpec, checkpoint_format: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns] and zeros [groups, rows], both uint8, and the group of each input."""
    fault = layout_fault(layout_of(parts), stated)
    if fault:
        raise CheckpointError(fault)
    codes = unpack_lines(parts["qweight"].T, stated.bits)
    zeros = read_zeros(parts["qzeros"], stated.bits, checkpoint_format)
    groups, columns = zeros.shape[0], codes.shape[1]
    if "g_idx" in parts:
        group_index = parts["g_idx"].cpu().to(torch.int64)
    elif columns % groups:
        raise CheckpointError(f"g_idx is missing, and {groups} groups do not divide {columns} inputs")
    else:
        group_index = torch.arange(columns) // (columns // groups)
    fault = group_index_fault(group_index, groups)
    if fault:
        raise CheckpointError(fault)
    return codes, zeros, group_index


def read_zeros(qzeros: Tensor, bits: int, checkpoint_format: str) -> Tensor:
    """Zeros uint8 [groups, rows] of packed `qzeros` [groups, words]; v1's all-ones value is read as a wrapped 0."""
    zeros = unpack_lines(qzeros, bits)
    return (zeros + 1) & ((1 << bits) - 1) if checkpoint_format == "gptq" else zeros


def group_index_fault(group_index: Tensor, groups: int) -> str | None:
    """Whether `g_idx` names a group that does not exist, in one sentence; None if not."""
    low, high = int(group_index.min()), int(group_index.max())
    return None if low >= 0 and high < groups else f"g_idx names groups {low} to {high}, but there are {groups}"
