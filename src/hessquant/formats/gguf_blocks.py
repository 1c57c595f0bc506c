"""Codes as GGUF blocks: an exact repack, and a decoder of the bytes that shares nothing with it.

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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.formats.dialect import half_scales
from hessquant.records import GridSpec

BLOCK = 32
"""Inputs per block."""

_HALF = BLOCK // 2
_SCALE_BYTES = 2
_BYTES_PER_CHUNK = 1 << 22


@dataclass(frozen=True)
class BlockType:
    """One type of block.

    Attributes:
        kind: As the file names it.
        bits: Bits per integer.
        offset: What is added to `code - zero`.
        bytes: Bytes of a block.
    """

    kind: GGMLQuantizationType
    bits: int
    offset: int
    bytes: int


Q4_0 = BlockType(GGMLQuantizationType.Q4_0, bits=4, offset=8, bytes=18)
Q5_0 = BlockType(GGMLQuantizationType.Q5_0, bits=5, offset=16, bytes=22)
Q8_0 = BlockType(GGMLQuantizationType.Q8_0, bits=8, offset=0, bytes=34)

BLOCK_TYPES: Mapping[GGMLQuantizationType, BlockType] = {block.kind: block for block in (Q4_0, Q5_0, Q8_0)}


def block_type(stated: GridSpec) -> BlockType:
    """The narrowest type that holds every weight of these settings."""
    if stated.bits <= 4:
        return Q4_0 if stated.symmetric else Q5_0
    return Q5_0 if stated.bits == 5 and stated.symmetric else Q8_0


def target_fault(rows: int, columns: int, stated: GridSpec) -> str | None:
    """Why a weight has no GGUF form, in one sentence; None if it has one."""
    bits, group_size = stated.bits, stated.group_size
    if not 2 <= bits <= 8:
        return f"GGUF has no blocks for {bits} bits; choose 2 to 8"
    if bits == 8 and not stated.symmetric:
        return "asymmetric codes of 8 bits less their zeros do not fit GGUF's 8-bit blocks; choose symmetric, or 7 bits"
    if columns % BLOCK:
        return f"{columns} inputs are no whole number of GGUF's blocks of {BLOCK}; leave this weight in 16 bit"
    if group_size != -1 and group_size % BLOCK:
        return f"group size {group_size} is no multiple of GGUF's blocks of {BLOCK} inputs; choose one that is, or -1"
    if group_size != -1 and columns % group_size:
        return f"group size {group_size} does not divide {columns} inputs; choose a divisor or -1"
    return None


def packed_bytes(rows: int, columns: int, stated: GridSpec) -> int:
    """Bytes of a weight that has no `target_fault`."""
    return rows * columns // BLOCK * block_type(stated).bytes


def pack(weight: QuantizedWeight) -> Tensor:
    """Pack one weight.

    Returns:
        uint8 [rows, columns / 32 * bytes of a block], on the CPU.

    Raises:
        CheckpointError: If the shape, the settings, the scales or the codes have no place in the blocks.
    """
    spec, (rows, columns) = weight.grid.spec, weight.codes.shape
    stated = spec
    fault = target_fault(rows, columns, stated)
    if fault:
        raise CheckpointError(fault)
    block, repeats = block_type(stated), spec.width(columns) // BLOCK
    scales = half_scales(weight.grid.scales).repeat_interleave(repeats, dim=1)
    zeros = weight.grid.zeros.cpu().to(torch.int16).repeat_interleave(repeats, dim=1)
    integers = weight.codes.cpu().reshape(rows, -1, BLOCK).to(torch.int16)
    integers += block.offset - zeros.unsqueeze(-1)
    least, most = (-128, 127) if block.bits == 8 else (0, (1 << block.bits) - 1)
    if bool(((integers < least) | (integers > most)).any()):
        raise CheckpointError(f"a code less its zero does not fit {block.kind.name}; choose symmetric, or fewer bits")
    parts = [scales.unsqueeze(-1).contiguous().view(torch.uint8), *_integer_bytes(integers, block)]
    return torch.cat(parts, dim=-1).flatten(1)


def _integer_bytes(integers: Tensor, block: BlockType) -> list[Tensor]:
    """Bytes uint8 [rows, blocks, n] that hold integers int16 [rows, blocks, 32]."""
    if block.bits == 8:
        return [integers.to(torch.int8).view(torch.uint8)]
    low = (integers & 15).to(torch.uint8)
    nibbles = low[..., :_HALF] | low[..., _HALF:] << 4
    if block.bits == 4:
        return [nibbles]
    fifth = (integers >> 4).to(torch.uint8).view(*integers.shape[:2], 4, 8)
    places = torch.arange(8, dtype=torch.uint8)
    return [(fifth << places).sum(-1, dtype=torch.uint8), nibbles]


def unpack(packed: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Decode blocks uint8 [rows, n], whoever wrote them.

    Returns:
        float32 [rows, inputs].

    Raises:
        CheckpointError: If the type is none of the three, or the bytes are no whole blocks.
    """
    block = BLOCK_TYPES.get(kind)
    if block is None:
        raise CheckpointError(f"blocks of type {kind.name} cannot be decoded")
    rows, width = packed.shape
    if width % block.bytes:
        raise CheckpointError(f"rows of {width} bytes are no whole blocks of type {kind.name}, of {block.bytes} bytes")
    octets = packed.numpy().reshape(-1, block.bytes)
    values = np.empty((len(octets), BLOCK), dtype=np.float32)
    step = max(1, _BYTES_PER_CHUNK // block.bytes)
    for start in range(0, len(octets), step):
        values[start : start + step] = _decoded(octets[start : start + step], block)
    return torch.from_numpy(values).view(rows, -1)


def _decoded(octets: npt.NDArray[np.uint8], block: BlockType) -> npt.NDArray[np.float32]:
    """Values float32 [blocks, 32] of blocks uint8 [blocks, bytes]."""
    scales = np.ascontiguousarray(octets[:, :_SCALE_BYTES]).view("<f2").astype(np.float32)
    content = octets[:, _SCALE_BYTES:]
    if block.bits == 8:
        with np.errstate(invalid="ignore"):
            return np.ascontiguousarray(content).view(np.int8).astype(np.float32) * scales
    fifths, nibbles = content[:, :-_HALF], content[:, -_HALF:]
    values = np.concatenate([_NIBBLES[0][nibbles], _NIBBLES[1][nibbles]], axis=1)
    if block.bits == 5:
        values += np.unpackbits(fifths, axis=1, bitorder="little").astype(np.float32) * np.float32(16)
    values -= np.float32(block.offset)
    # Zero times a damaged scale is no error here: whoever looks for damage looks at the values.
    with np.errstate(invalid="ignore"):
        values *= scales
    return values


def _nibble_table() -> npt.NDArray[np.float32]:
    """What the lower and the upper four bits of each byte are worth, [2, 256]; read off its bits."""
    digits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    worth = np.array([1, 2, 4, 8], dtype=np.float32)
    return np.stack([digits[:, :4] @ worth, digits[:, 4:] @ worth]).astype(np.float32)


_NIBBLES = _nibble_table()
