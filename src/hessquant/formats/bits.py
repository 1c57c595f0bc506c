"""Numbers as they are stored: codes as bit streams in 32-bit words, and scales.

Streams are packed by shifts, and unpacked by single bits: the two share nothing, so that a mistake in one is not undone
by the other.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hessquant.errors import CheckpointError

WORD = 32
_BITS_PER_CHUNK = 1 << 26


def pack_lines(values: Tensor, bits: int) -> Tensor:
    """Pack values uint8 [count, lines] along their first dimension, as one little-endian stream per line.

    Args:
        values: Codes below 2^bits; `count * bits` is a multiple of 32.
        bits: Bits per code.

    Returns:
        int32 [count * bits / 32, lines].
    """
    lines = values.shape[1]
    period = int(np.lcm(bits, WORD)) // bits
    periods = values.reshape(-1, period, lines)
    words = torch.zeros(periods.shape[0], period * bits // WORD, lines, dtype=torch.int32)
    for position in range(period):
        word, shift = divmod(position * bits, WORD)
        value = periods[:, position].to(torch.int32)
        words[:, word] |= value << shift
        if shift + bits > WORD:
            words[:, word + 1] |= value >> (WORD - shift)
    return words.flatten(0, 1)


def unpack_lines(words: Tensor, bits: int) -> Tensor:
    """Read int32 words [lines, count] as one little-endian stream per line; uint8 [lines, count * 32 / bits]."""
    octets = np.ascontiguousarray(words.numpy(), dtype="<i4").view(np.uint8)
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


def half_scales(scales: Tensor) -> Tensor:
    """Scales as float16, on the CPU.

    Raises:
        CheckpointError: If float16 does not hold them exactly.
    """
    half = scales.to(torch.float16)
    if not torch.equal(half.to(torch.float64), scales.to(torch.float64)):
        raise CheckpointError(f"its scales, in {str(scales.dtype).removeprefix('torch.')}, are not exact in float16")
    return half
