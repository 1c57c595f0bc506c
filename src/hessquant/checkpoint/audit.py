"""Looking at every byte of a source once, before any work: that its numbers can be used, and a digest of all."""

import hashlib
import json

from torch import Tensor

from hessquant.checkpoint.ranges import ScaleCheck
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.shards import raw_bytes
from hessquant.core.hessian import first_non_finite
from hessquant.errors import SourceError
from hessquant.records import Progress, TensorInfo

CHUNK_BYTES = 16 << 20
CHECKED = ("F64", "F32", "BF16", "F16")
"""Dtypes whose numbers may be not finite."""


def audit(source: CheckpointReader, progress: Progress, scales: ScaleCheck | None = None) -> str:
    """Read a source from end to end, in pieces of 16 MiB.

    Args:
        source: The checkpoint.
        progress: Told of one stage, "check", with a step per tensor.
        scales: Looks at what will be quantized; None = nothing will.

    Returns:
        SHA-256, in hex, over the config and every tensor's name, dtype, shape and bytes; how tensors are divided among
        files does not matter.

    Raises:
        SourceError: If a tensor cannot be read, or holds NaN or Inf, or numbers that no scale is large enough for;
            names file, tensor and place or value.
    """
    progress.stage("check", len(source.tensors))
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode())
    for name, info in sorted(source.tensors.items()):
        digest.update(json.dumps([name, info.dtype, info.shape]).encode())
        rows = 0
        for piece in source.chunks(name, CHUNK_BYTES):
            digest.update(raw_bytes(piece).numpy().data)
            if info.dtype in CHECKED:
                _refuse_non_finite(info, piece, rows)
                if scales is not None:
                    scales.look(info, piece)
            rows += len(piece) if piece.ndim else 0
        progress.advance(name)
    return digest.hexdigest()


def _refuse_non_finite(info: TensorInfo, piece: Tensor, rows_before: int) -> None:
    place = first_non_finite(piece)
    if place is not None:
        value = float(piece[place])
        where = list((place[0] + rows_before, *place[1:]) if place else ())
        raise SourceError(
            f"{info.file}: tensor {info.name} is {value} at {where}; a model with such a weight cannot be quantized: "
            "fetch the file again, or start from another copy"
        )
