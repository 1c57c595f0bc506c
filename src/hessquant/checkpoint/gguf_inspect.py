"""Looking over a GGUF file without a model: what it holds, and what is wrong with it."""

from pathlib import Path

import torch
from gguf import ReaderTensor

from hessquant.checkpoint.gguf_reader import decoded, form_of, open_gguf
from hessquant.errors import CheckpointError
from hessquant.formats.gguf_blocks import BLOCK, BLOCK_TYPES
from hessquant.records import GridSpec, InspectedWeight, Inspection, TensorInfo


def inspect_gguf(file: Path) -> Inspection:
    """Take stock of a GGUF file; what is wrong in it is reported, not raised.

    Raises:
        SourceError: If it is not a whole GGUF file.
    """
    tensors = open_gguf(file).tensors
    weights, untouched, faults = [], [], []
    for tensor in tensors:
        kind, shape = form_of(tensor)
        if kind not in BLOCK_TYPES or len(shape) != 2:
            untouched.append(TensorInfo(tensor.name, shape, kind.name, int(tensor.n_bytes), file.name))
            continue
        grid = GridSpec(BLOCK_TYPES[kind], BLOCK)
        weights.append(InspectedWeight(tensor.name, *shape, grid, int(tensor.n_bytes)))
        faults.extend(_faults(tensor))
    count = sum(weight.rows * weight.columns for weight in weights)
    return Inspection(
        directory=file.name,
        format="gguf" if weights else "none",
        weights=tuple(weights),
        untouched=tuple(untouched),
        bits_per_weight=8 * sum(weight.bytes for weight in weights) / count if count else 0.0,
        total_bytes=sum(int(tensor.n_bytes) for tensor in tensors),
        faults=tuple(faults),
    )


def _faults(tensor: ReaderTensor) -> list[str]:
    try:
        values = decoded(tensor)
    except CheckpointError as error:
        return [f"{tensor.name}: {error}"]
    bad = int((~torch.isfinite(values)).sum())
    return [f"{tensor.name} has {bad} values that are not finite"] if bad else []
