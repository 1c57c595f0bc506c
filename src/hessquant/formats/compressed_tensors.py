"""The tensors of the compressed-tensors format "pack-quantized".

A weight [rows, columns] under the prefix X becomes

    X.weight_packed      int32 [rows, columns * bits / 32]    codes, packed along the inputs
    X.weight_scale       float16 [rows, groups]
    X.weight_zero_point  int32 [rows * bits / 32, groups]     zeros, packed along the outputs; asymmetric weights only
    X.weight_shape       int64 [2]                            rows, columns

The format thinks in signed integers, code - 2^(bits-1), and stores them with that added again: our codes and zeros.
Only widths that divide 32 are written, since packers of the format disagree about the others.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats.bits import WORD, pack_lines, unpack_lines
from hessquant.formats.dialect import Layout, half_scales, layout_of
from hessquant.records import GridSpec

BITS = (4, 8)
"""Code widths that readers of the format know."""

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")
VARIANT = "pack-quantized"
_FLOATING = ("F16", "BF16", "F32")


def target_fault(rows: int, columns: int, stated: GridSpec) -> str | None:
    """Why a weight has no form in it, in one sentence; None if it has one."""
    bits, group_size = stated.bits, stated.group_size
    if bits not in BITS:
        return (
            f"the compressed-tensors format has no readers for {bits} bits; choose one of {', '.join(map(str, BITS))}"
        )
    if columns * bits % WORD:
        return f"{columns} inputs of {bits} bits do not fill whole 32-bit words; leave this weight in 16 bit"
    if not stated.symmetric and rows * bits % WORD:
        return f"zeros of {rows} outputs of {bits} bits do not fill whole 32-bit words; leave this weight in 16 bit"
    if group_size != -1 and columns % group_size:
        return f"group size {group_size} does not divide {columns} inputs; choose a divisor or -1"
    return None


def layout(rows: int, columns: int, stated: GridSpec) -> Layout:
    """Dtype and shape of each part of a weight that has no `target_fault`."""
    groups = stated.groups(columns)
    zeros = {} if stated.symmetric else {"weight_zero_point": ("I32", (rows * stated.bits // WORD, groups))}
    return {
        "weight_packed": ("I32", (rows, columns * stated.bits // WORD)),
        "weight_scale": ("F16", (rows, groups)),
        **zeros,
        "weight_shape": ("I64", (2,)),
    }


def choose_variant(_weights: Iterable[QuantizedWeight]) -> str:
    """The one variant that is written."""
    return VARIANT


def pack(weight: QuantizedWeight, _variant: str) -> dict[str, Tensor]:
    """Pack one weight into its parts, on the CPU.

    Raises:
        CheckpointError: If the shape, the bits, the scales or the zeros have no place in the format.
    """
    spec, (rows, columns) = weight.grid.spec, weight.codes.shape
    fault = target_fault(rows, columns, spec)
    if fault:
        raise CheckpointError(fault)
    zeros = weight.grid.zeros.cpu()
    parts = {
        "weight_packed": pack_lines(weight.codes.cpu().T, spec.bits).T.contiguous(),
        "weight_scale": half_scales(weight.grid.scales).contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not spec.symmetric:
        parts["weight_zero_point"] = pack_lines(zeros, spec.bits).contiguous()
    elif bool((zeros != spec.middle).any()):
        raise CheckpointError(f"a symmetric weight has zeros other than {spec.middle}")
    return parts


def layout_fault(parts: Layout, stated: GridSpec) -> str | None:
    """What is wrong with the parts of one weight as found in a checkpoint, in one sentence; None if nothing is."""
    for part in PARTS:
        if part not in parts and (part != "weight_zero_point" or not stated.symmetric):
            return f"{part} is missing"
        if part in parts and 0 in parts[part][1]:
            return f"{part} is empty"
    for part, (dtype, shape) in parts.items():
        wanted = _FLOATING if part == "weight_scale" else ("I64", "I32") if part == "weight_shape" else ("I32",)
        if dtype not in wanted or len(shape) != (1 if part == "weight_shape" else 2):
            return f"{part} is {dtype} {list(shape)}, not {' or '.join(wanted)} of the right rank"
    (rows, words), (_, groups) = parts["weight_packed"][1], parts["weight_scale"][1]
    if WORD % stated.bits:
        return f"{stated.bits} bits: packers of the format disagree about widths that do not divide 32"
    per_word = WORD // stated.bits
    expected = {
        "weight_scale": (rows, stated.groups(words * per_word)),
        "weight_zero_point": (-(-rows // per_word), groups),
        "weight_shape": (2,),
    }
    for part, shape in expected.items():
        if part in parts and parts[part][1] != shape:
            return (
                f"{part} is {list(parts[part][1])}, but {list(shape)} goes with weight_packed {[rows, words]} at "
                f"{stated.bits} bits and group size {stated.group_size}"
            )
    return None


def weight_shape(parts: Layout, stated: GridSpec) -> tuple[int, int]:
    """Rows and columns of a weight whose parts have no `layout_fault`; columns that fill no word are counted full."""
    rows, words = parts["weight_packed"][1]
    return rows, words * WORD // stated.bits


def dequantize(parts: Mapping[str, Tensor], stated: GridSpec, variant: str) -> Tensor:
    """Decode one weight to float32 [rows, columns], whoever wrote it.

    Raises:
        CheckpointError: If parts are missing or do not fit together.
    """
    return unpack(parts, stated, variant).dequantize()


def unpack(parts: Mapping[str, Tensor], stated: GridSpec, _variant: str) -> QuantizedWeight:
    """Read one weight back as codes on a grid.

    Raises:
        CheckpointError: If parts are missing or do not fit together.
    """
    fault = layout_fault(layout_of(parts), stated)
    if fault:
        raise CheckpointError(fault)
    rows, columns = parts["weight_shape"].tolist()
    codes = unpack_lines(parts["weight_packed"], stated.bits)
    if rows != codes.shape[0] or not 0 <= codes.shape[1] - columns < WORD // stated.bits:
        raise CheckpointError(f"weight_shape says {[rows, columns]}, but weight_packed holds {list(codes.shape)}")
    codes, scales = codes[:, :columns].contiguous(), parts["weight_scale"]
    spec = replace(stated, scale_dtype=str(scales.dtype).removeprefix("torch."))
    if columns % spec.width(columns):
        raise CheckpointError(f"group size {stated.group_size} does not divide {columns} inputs")
    if stated.symmetric:
        zeros = torch.full(scales.shape, spec.middle, dtype=torch.uint8)
    else:
        zeros = unpack_lines(parts["weight_zero_point"].T, stated.bits)[:, :rows].T.contiguous()
    return QuantizedWeight(codes, Grid(spec, scales.contiguous(), zeros))


def value_faults(parts: Mapping[str, Tensor], stated: GridSpec, _variant: str) -> Iterator[str]:
    """One sentence per fault in the values of one weight, given its parts without `layout_fault`."""
    rows, columns = parts["weight_shape"].tolist()
    held, words = parts["weight_packed"].shape
    if rows != held or not 0 <= words * WORD // stated.bits - columns < WORD // stated.bits:
        yield f"weight_shape says {[rows, columns]}, but weight_packed is {[held, words]}"
    elif stated.group_size != -1 and columns % stated.group_size:
        yield f"group size {stated.group_size} does not divide {columns} inputs; vLLM cannot open this"
    scales = parts["weight_scale"]
    bad = int((~(torch.isfinite(scales) & (scales > 0))).sum())
    if bad:
        yield f"weight_scale has {bad} values that are not finite and positive"
    if stated.symmetric and "weight_zero_point" in parts:
        yield "the config says symmetric, but there is a weight_zero_point"
