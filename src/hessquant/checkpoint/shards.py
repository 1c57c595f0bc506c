"""Planning shards from sizes, and streaming one to disk with a single tensor in memory.

safetensors' own `save_file` wants every tensor of a file at once; a shard's layout is known beforehand, so its header
can be written first and its tensors one after another.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hessquant.checkpoint.header import DTYPE_BYTES
from hessquant.checkpoint.reader import SINGLE_FILE
from hessquant.errors import CheckpointError
from hessquant.files import replacing
from hessquant.records import TensorInfo

_ALIGNMENT = 8


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together and lie side by side: one untouched tensor, or the parts of one weight.

    Attributes:
        source: Name of the source tensor they come from.
        tensors: What will be written; their `file` is not decided yet.
    """

    source: str
    tensors: tuple[TensorInfo, ...]

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return sum(info.bytes for info in self.tensors)


def plan_shards(units: Iterable[Unit], shard_bytes: int) -> dict[str, list[Unit]]:
    """Divide units among files of at most `shard_bytes` (more only for a unit larger than that), in order."""
    shards: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if shards[-1] and filled + unit.bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(unit)
        filled += unit.bytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def write_shard(path: Path, units: Sequence[Unit], make: Callable[[Unit], Mapping[str, Tensor]]) -> None:
    """Write one safetensors file; `make` gives a unit's tensors when their turn has come.

    Raises:
        CheckpointError: If `make` gives something else than was planned.
    """
    # Wide dtypes first: then every tensor starts at a multiple of its element size.
    ordered = sorted(units, key=lambda unit: -max(DTYPE_BYTES[info.dtype] for info in unit.tensors))
    with replacing(path) as stream:
        stream.write(_header([info for unit in ordered for info in unit.tensors]))
        for unit in ordered:
            made = make(unit)
            for info in unit.tensors:
                _write_tensor(stream, info, made[info.name])


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [count]."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _header(infos: Iterable[TensorInfo]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for info in infos:
        header[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, offset + info.bytes],
        }
        offset += info.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(stream: BinaryIO, info: TensorInfo, tensor: Tensor) -> None:
    content = raw_bytes(tensor)
    if tuple(tensor.shape) != info.shape or content.numel() != info.bytes:
        raise CheckpointError(
            f"{info.name}: planned as {info.dtype} {list(info.shape)}, but got {tensor.dtype} {list(tensor.shape)}"
        )
    stream.write(content.numpy().data)
