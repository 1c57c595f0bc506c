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
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hessquant.core.grid import Grid, GridSpec, QuantizedWeight
from hessquant.errors import CheckpointError

CheckpointFormat = Literal["gptq", "gptq_v2"]
Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype (as safetensors spells it) and shape of each part of one weight."""

BITS = (2, 3, 4, 8)
"""Code widths that readers of the format know."""

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_WORD = 32
_BITS_PER_CHUNK = 1 << 26
_DTYPE_NAMES = {torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}
_FLOATING = ("F16", "BF16", "F32")


def module_of(weight_name: str) -> str:
    """The prefix X of a weight named `X.weight`.

    Raises:
        CheckpointError: If the name does not end in `.weight`, so that no reader would find its parts.
    """
    module, _, leaf = weight_name.rpartition(".")
    if not module or leaf != "weight":
        raise CheckpointError(f"{weight_name}: the GPTQ format holds only weights named `<module>.weight`; exclude it")
    return module


def quantized_modules(names: Iterable[str]) -> list[str]:
    """Modules whose packed codes are among these tensor names, in their order."""
    return [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]


def part_names(module: str) -> dict[str, str]:
    """Tensor name of each part of a module."""
    return {part: f"{module}.{part}" for part in PARTS}


def shape_fault(rows: int, columns: int, bits: int, group_size: int) -> str | None:
    """Why a weight of this shape has no GPTQ form, in one sentence; None if it has one.

    Args:
        rows: Outputs.
        columns: Inputs.
        bits: Bits per code.
        group_size: Inputs per group; -1 = one group per row.
    """
    if bits not in BITS:
        return f"the GPTQ format has no readers for {bits} bits; choose one of {', '.join(map(str, BITS))}"
    for count, what in ((columns, "inputs"), (rows, "outputs")):
        if count * bits % _WORD:
            return f"{count} {what} of {bits} bits do not fill whole 32-bit words; leave this weight in 16 bit"
    if group_size != -1 and columns % group_size:
        return f"group size {group_size} does not divide {columns} inputs; choose a divisor or -1"
    return None


def layout(rows: int, columns: int, bits: int, group_size: int) -> Layout:
    """Dtype and shape of each part of a weight that has no `shape_fault`."""
    groups = 1 if group_size == -1 else columns // group_size
    return {
        "qweight": ("I32", (columns * bits // _WORD, rows)),
        "qzeros": ("I32", (groups, rows * bits // _WORD)),
        "scales": ("F16", (groups, rows)),
        "g_idx": ("I32", (columns,)),
    }


def layout_fault(parts: Layout, bits: int) -> str | None:
    """What is wrong with the parts of one weight as found in a checkpoint, in one sentence; None if nothing is.

    A missing `g_idx` is not a fault here: it means the natural order of the inputs.
    """
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
    columns = words * _WORD // bits
    if words * _WORD % bits:
        return f"qweight has {words} words per row, which do not hold whole codes of {bits} bits"
    expected = {"qzeros": (groups, rows * bits // _WORD), "scales": (groups, rows), "g_idx": (columns,)}
    for part, shape in expected.items():
        if part in parts and parts[part][1] != shape:
            return (
                f"{part} is {list(parts[part][1])}, but {list(shape)} goes with qweight "
                f"{[words, rows]} at {bits} bits and {groups} groups"
            )
    return None


def weight_shape(parts: Layout, bits: int) -> tuple[int, int]:
    """Rows and columns of a weight whose parts have no `layout_fault`."""
    words, rows = parts["qweight"][1]
    return rows, words * _WORD // bits


def choose_checkpoint_format(weights: Iterable[QuantizedWeight]) -> CheckpointFormat:
    """The most widely read variant that holds these weights: v1, unless a zero of 0 would wrap in it."""
    return "gptq_v2" if any(bool((weight.grid.zeros == 0).any()) for weight in weights) else "gptq"


def pack(weight: QuantizedWeight, module: str, checkpoint_format: CheckpointFormat) -> dict[str, Tensor]:
    """Pack one weight into its parts, named `module.qweight` and so on, on the CPU.

    Raises:
        CheckpointError: If the shape, the bits, the scales or (in v1) a zero of 0 have no place in the format.
    """
    spec = weight.grid.spec
    rows, columns = weight.codes.shape
    fault = shape_fault(rows, columns, spec.bits, spec.group_size)
    if fault:
        raise CheckpointError(f"{module}: {fault}")
    if weight.grid.scales.dtype != torch.float16:
        raise CheckpointError(f"{module}: scales are {weight.grid.scales.dtype}; the GPTQ format stores float16")
    zeros = weight.grid.zeros.cpu()
    if checkpoint_format == "gptq":
        if bool((zeros == 0).any()):
            raise CheckpointError(f"{module}: a zero of 0 wraps in checkpoint format gptq; write gptq_v2")
        zeros = zeros - 1
    width = spec.width(columns)
    return {
        f"{module}.qweight": _pack_lines(weight.codes.cpu().T, spec.bits).contiguous(),
        f"{module}.qzeros": _pack_lines(zeros, spec.bits).T.contiguous(),
        f"{module}.scales": weight.grid.scales.cpu().T.contiguous(),
        f"{module}.g_idx": (torch.arange(columns) // width).to(torch.int32),
    }


def _pack_lines(values: Tensor, bits: int) -> Tensor:
    """Pack values uint8 [count, lines] along their first dimension into int32 words [count * bits / 32, lines]."""
    lines = values.shape[1]
    period = int(np.lcm(bits, _WORD)) // bits
    periods = values.reshape(-1, period, lines)
    words = torch.zeros(periods.shape[0], period * bits // _WORD, lines, dtype=torch.int32)
    for position in range(period):
        word, shift = divmod(position * bits, _WORD)
        value = periods[:, position].to(torch.int32)
        words[:, word] |= value << shift
        if shift + bits > _WORD:
            words[:, word + 1] |= value >> (_WORD - shift)
    return words.flatten(0, 1)


def dequantize(tensors: Mapping[str, Tensor], module: str, bits: int, checkpoint_format: CheckpointFormat) -> Tensor:
    """Decode one weight to float32 [rows, columns], whoever wrote it; `g_idx` is taken literally.

    This decoder shares nothing with `pack`: it expands the bytes to single bits and regroups them, where the packer
    shifts whole values, so that a mistake in one is not undone by the other.

    Raises:
        CheckpointError: If parts are missing or do not fit together.
    """
    codes, zeros, group_index = _unpack_parts(tensors, module, bits, checkpoint_format)
    scales = tensors[f"{module}.scales"].to(torch.float32).T
    values = codes.to(torch.float32)
    values -= zeros.T[:, group_index]
    values *= scales[:, group_index]
    return values


def unpack(
    tensors: Mapping[str, Tensor], module: str, spec: GridSpec, checkpoint_format: CheckpointFormat
) -> QuantizedWeight:
    """Read one weight back as codes on a grid; the same decoder as `dequantize`.

    Raises:
        CheckpointError: If parts are missing, do not fit together, or are not on a grid of this spec.
    """
    codes, zeros, group_index = _unpack_parts(tensors, module, spec.bits, checkpoint_format)
    columns = codes.shape[1]
    scales = tensors[f"{module}.scales"]
    groups = 1 if spec.group_size == -1 else columns // spec.group_size
    if scales.shape[0] != groups or groups * spec.width(columns) != columns:
        raise CheckpointError(f"{module}: {scales.shape[0]} groups, but group size {spec.group_size} makes {groups}")
    if scales.dtype != spec.scale_dtype:
        raise CheckpointError(f"{module}: scales are {scales.dtype}, not {spec.scale_dtype}")
    if not torch.equal(group_index, torch.arange(columns) // spec.width(columns)):
        raise CheckpointError(f"{module}: g_idx permutes the inputs, which codes on a grid cannot hold; use dequantize")
    return QuantizedWeight(codes, Grid(spec, scales.T.contiguous(), zeros.T.contiguous()))


def _unpack_parts(
    tensors: Mapping[str, Tensor], module: str, bits: int, checkpoint_format: CheckpointFormat
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns] and zeros [groups, rows], both uint8, and the group of each input."""
    found = {part: tensors[name] for part, name in part_names(module).items() if name in tensors}
    fault = layout_fault(
        {part: (_DTYPE_NAMES.get(t.dtype, str(t.dtype)), tuple(t.shape)) for part, t in found.items()}, bits
    )
    if fault:
        raise CheckpointError(f"{module}: {fault}")
    codes = _unpack_lines(found["qweight"].T, bits)
    zeros = read_zeros(found["qzeros"], bits, checkpoint_format)
    groups, columns = zeros.shape[0], codes.shape[1]
    if "g_idx" in found:
        group_index = found["g_idx"].cpu().to(torch.int64)
    elif columns % groups:
        raise CheckpointError(f"{module}: g_idx is missing, and {groups} groups do not divide {columns} inputs")
    else:
        group_index = torch.arange(columns) // (columns // groups)
    fault = group_index_fault(group_index, groups)
    if fault:
        raise CheckpointError(f"{module}: {fault}")
    return codes, zeros, group_index


def read_zeros(qzeros: Tensor, bits: int, checkpoint_format: CheckpointFormat) -> Tensor:
    """Zeros uint8 [groups, rows] of packed `qzeros` [groups, words]; v1's all-ones value is read as a wrapped 0."""
    zeros = _unpack_lines(qzeros, bits)
    return (zeros + 1) & ((1 << bits) - 1) if checkpoint_format == "gptq" else zeros


def group_index_fault(group_index: Tensor, groups: int) -> str | None:
    """Whether `g_idx` names a group that does not exist, in one sentence; None if not."""
    low, high = int(group_index.min()), int(group_index.max())
    return None if low >= 0 and high < groups else f"g_idx names groups {low} to {high}, but there are {groups}"


def _unpack_lines(words: Tensor, bits: int) -> Tensor:
    """Read int32 words [lines, count] as one little-endian bit stream per line; uint8 [lines, count * 32 / bits]."""
    octets = np.ascontiguousarray(words.cpu().numpy(), dtype="<i4").view(np.uint8)
    lines, stream_bits = octets.shape[0], octets.shape[1] * 8
    values: npt.NDArray[np.uint8] = np.empty((lines, stream_bits // bits), dtype=np.uint8)
    # One byte per bit is eight times the packed size, so only some lines at a time.
    step = max(1, _BITS_PER_CHUNK // max(1, stream_bits))
    for start in range(0, lines, step):
        stream = np.unpackbits(octets[start : start + step], axis=1, bitorder="little")
        digits = stream.reshape(stream.shape[0], -1, bits)
        chunk = digits[..., 0].copy()
        for place in range(1, bits):
            chunk += digits[..., place] * np.uint8(1 << place)
        values[start : start + step] = chunk
    return torch.from_numpy(values)
