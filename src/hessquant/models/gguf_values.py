"""Values of a tensor in a GGUF file: rows that are read, and dequantized by the gguf package, when they are asked for.

Read, not mapped: a read that fails is an error, where a page that cannot be had kills the process.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize

from hessquant.errors import SourceError
from hessquant.models.gguf_header import StoredTensor

_PIECE = 1 << 17
"""Values that are dequantized at once; with few of them gguf's own steps take most of the time."""

PIECE_BYTES = 8 * 4 * _PIECE
"""What that takes besides the result, at most: gguf's steps between a block's bytes and its values."""


@dataclass(frozen=True)
class Stamp:
    """By what it is seen that a file is still the same one.

    Attributes:
        size: Bytes of it.
        changed: When it was changed last, in ns.
    """

    size: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Stamp":
        """That of a file's status."""
        return cls(status.st_size, status.st_mtime_ns)


@contextmanager
def open_unchanged(file: Path, stamp: Stamp, tensor: str = "") -> Iterator[BufferedReader]:
    """A file open for reading, if it is still the same one.

    Args:
        file: The file.
        stamp: What it was.
        tensor: What is read of it; empty for more than one.

    Raises:
        SourceError: If it is not, or cannot be read, or a read inside fails.
    """
    try:
        with file.open("rb") as stream:
            if Stamp.of(os.fstat(stream.fileno())) != stamp:
                raise SourceError(
                    f"{file.name} has changed since its header was read; begin again with the file as it is"
                )
            yield stream
    except (OSError, MemoryError) as error:
        what, why = f": tensor {tensor}" if tensor else "", str(error) or type(error).__name__
        raise SourceError(f"{file.name}{what} cannot be read: {why}") from error


def read_rows(stream: BufferedReader, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor as they are stored, uint8 [rows, bytes of a row].

    Raises:
        OSError: If they are not all there.
    """
    width = tensor.bytes // tensor.rows
    content = np.empty((stop - start, width), dtype=np.uint8)
    stream.seek(tensor.begin + start * width)
    if stream.readinto(content.data) != content.nbytes:
        raise OSError("the file ends in the midst of it")
    return content


def values_of(stream: BufferedReader, tensor: StoredTensor, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor, float32 [rows, values of a row].

    Raises:
        OSError: As `read_rows`.
    """
    columns = tensor.shape[-1]
    values = np.empty((stop - start, columns), dtype=np.single)
    step = max(1, _PIECE // columns)
    # What is not finite is found by whoever looks at the values.
    with np.errstate(all="ignore"):
        for row in range(start, stop, step):
            stored = read_rows(stream, tensor, row, min(row + step, stop))
            # As one row, since it goes through rows in small groups; a block knows nothing of rows.
            flat = dequantize(stored.reshape(1, -1), tensor.kind)
            values[row - start : row - start + len(stored)] = flat.reshape(len(stored), columns)
    return values


def refuse_kinds(tensors: Iterable[StoredTensor]) -> None:
    """Refuse types that gguf does not dequantize.

    Raises:
        SourceError: Naming a tensor, but not the file.
    """
    for kind, tensor in {tensor.kind: tensor for tensor in tensors}.items():
        try:
            dequantize(np.zeros((1, tensor.bytes // tensor.rows), dtype=np.uint8), kind)
        except NotImplementedError as error:
            raise SourceError(f"tensor {tensor.name} is of type {kind.name}, which gguf does not dequantize") from error


_WIDE = GGMLQuantizationType.F32, GGMLQuantizationType.BF16


def fits_float16(stream: BufferedReader, tensor: StoredTensor, *, in_block: bool) -> bool:
    """Whether all values of a tensor are finite in float16.

    Matrices in blocks whose values are multiples of scales in float16 are not looked at: they are most of a file, and
    what they hold was far smaller than that when they were made. The audit refuses one where that is not so.

    Raises:
        OSError: As `read_rows`.
    """
    if in_block and len(tensor.shape) > 1 and tensor.kind not in _WIDE:
        return True
    step = max(1, _PIECE // tensor.shape[-1])
    starts = range(0, tensor.rows, step)
    pieces = (values_of(stream, tensor, row, min(row + step, tensor.rows)) for row in starts)
    return all(bool(torch.isfinite(torch.from_numpy(piece).to(torch.float16)).all()) for piece in pieces)
