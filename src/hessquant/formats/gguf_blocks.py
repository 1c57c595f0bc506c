"""Codes as GGUF blocks: an exact repack. What it makes is decoded by the gguf package, which shares nothing with it.

Every 32 inputs of a row are one block: a float16 scale d, then 32 integers q. Nothing is rounded, since only the
integers are shifted; a group of several blocks repeats its scale.

    type   bytes  a value is      q holds            for
    Q4_0   18     d * (q - 8)     code - zero + 8    symmetric, up to 4 bits
    Q5_0   22     d * (q - 16)    code - zero + 16   asymmetric up to 4 bits, symmetric 5 bits
    Q8_0   34     d * q           code - zero        the rest up to 8 bits

Nibbles lie as q[0] | q[16] << 4, q[1] | q[17] << 4, ...; the fifth bits of Q5_0 are one 32-bit word before them.
A type with a minimum (Q4_1, Q5_1) would round it, scale * zero, to float16, so asymmetric weights take a wider type.
"""

from collections.abc import Mapping

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats.bits import half_scales
from hessquant.formats.dialect import ragged, refuse
from hessquant.records import GridSpec

BLOCK = 32
"""Inputs per block."""

_Q4_0, _Q5_0, _Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q5_0, GGMLQuantizationType.Q8_0
BLOCK_TYPES: Mapping[GGMLQuantizationType, int] = {_Q4_0: 4, _Q5_0: 5, _Q8_0: 8}
"""Bits per integer of every type of block that is written."""

_HALF = BLOCK // 2
_BYTES_PER_CHUNK = 1 << 22


def block_type(grid: GridSpec) -> GGMLQuantizationType:
    """The narrowest type that holds every weight on such a grid."""
    if grid.bits <= 4:
        return _Q4_0 if grid.symmetric else _Q5_0
    return _Q5_0 if grid.bits == 5 and grid.symmetric else _Q8_0


def target_fault(rows: int, columns: int, grid: GridSpec) -> str | None:
    """Why a weight has no GGUF form, in one sentence; None if it has one."""
    bits, group_size = grid.bits, grid.group_size
    if grid.is_float:
        return f"our GGUF files hold integers, not {grid}; quantize anew for it"
    if not 2 <= bits <= 8:
        return f"GGUF has no blocks for {bits} bits; choose 2 to 8"
    if bits == 8 and not grid.symmetric:
        return "asymmetric codes of 8 bits less their zeros do not fit GGUF's 8-bit blocks; choose symmetric, or 7 bits"
    if columns % BLOCK:
        return f"{columns} inputs are no whole number of GGUF's blocks of {BLOCK}; leave this weight in 16 bit"
    if group_size != -1 and group_size % BLOCK:
        return f"group size {group_size} is no multiple of GGUF's blocks of {BLOCK} inputs; choose one that is, or -1"
    return ragged(columns, grid, "; choose a divisor or -1")


def packed_bytes(rows: int, columns: int, grid: GridSpec) -> int:
    """Bytes of a weight that has no `target_fault`."""
    return rows * columns // BLOCK * int(GGML_QUANT_SIZES[block_type(grid)][1])


def stored_scales(grid: Grid) -> Tensor:
    """Scales in float16, on the CPU.

    Raises:
        CheckpointError: If it does not hold them exactly.
    """
    return half_scales(grid.scales)


def pack(weight: QuantizedWeight, kind: GGMLQuantizationType | None = None) -> Tensor:
    """Pack one weight.

    Args:
        weight: The weight.
        kind: A wider type than it needs, that of others in its tensor; None = the narrowest.

    Returns:
        uint8 [rows, columns / 32 * bytes of a block], on the CPU.

    Raises:
        CheckpointError: If the shape, the settings, the scales or the codes have no place in the blocks.
    """
    grid, (rows, columns) = weight.grid.spec, weight.codes.shape
    refuse(target_fault(rows, columns, grid))
    kind, repeats = kind or block_type(grid), grid.width(columns) // BLOCK
    scales = stored_scales(weight.grid).repeat_interleave(repeats, dim=1)
    zeros = weight.grid.zeros.to(torch.int16).repeat_interleave(repeats, dim=1)
    integers = weight.codes.reshape(rows, -1, BLOCK).to(torch.int16) - zeros.unsqueeze(-1)
    half = 1 << (BLOCK_TYPES[kind] - 1)
    if bool(((integers < -half) | (integers >= half)).any()):
        raise CheckpointError(f"a code less its zero does not fit {kind.name}; choose symmetric, or fewer bits")
    parts = [scales.unsqueeze(-1).contiguous().view(torch.uint8), *_integer_bytes(integers, kind)]
    return torch.cat(parts, dim=-1).flatten(1)


def _integer_bytes(integers: Tensor, kind: GGMLQuantizationType) -> list[Tensor]:
    """Bytes uint8 [rows, blocks, n] that hold `code - zero` int16 [rows, blocks, 32]."""
    if kind == _Q8_0:
        return [integers.to(torch.int8).view(torch.uint8)]
    integers = (integers + (1 << (BLOCK_TYPES[kind] - 1))).to(torch.uint8)
    low = integers & 15
    nibbles = low[..., :_HALF] | low[..., _HALF:] << 4
    if kind == _Q4_0:
        return [nibbles]
    fifth = (integers >> 4).view(*integers.shape[:2], 4, 8)
    places = torch.arange(8, dtype=torch.uint8)
    return [(fifth << places).sum(-1, dtype=torch.uint8), nibbles]


def unpack(packed: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Decode blocks uint8 [rows, n], whoever wrote them.

    Returns:
        float32 [rows, inputs].

    Raises:
        CheckpointError: If the type is none of the three, or the bytes are no whole blocks.
    """
    if kind not in BLOCK_TYPES:
        raise CheckpointError(f"blocks of type {kind.name} cannot be decoded")
    (rows, width), size = packed.shape, int(GGML_QUANT_SIZES[kind][1])
    if width % size:
        raise CheckpointError(f"rows of {width} bytes are no whole blocks of type {kind.name}, of {size} bytes")
    values = torch.empty(rows, width // size * BLOCK)
    # The package holds everything that it decodes in one call twice, so only some rows at a time.
    step = max(1, _BYTES_PER_CHUNK // max(1, width))
    for start in range(0, rows, step):
        # Zero times a damaged scale is no error here: whoever looks for damage looks at the values.
        with np.errstate(invalid="ignore"):
            decoded = dequantize(packed[start : start + step].numpy(), kind)
        values[start : start + step] = torch.from_numpy(decoded)
    return values
