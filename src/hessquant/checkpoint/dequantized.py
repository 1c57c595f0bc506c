"""A checkpoint in FP8 or MXFP4, seen as that of its model in 16 bit; a tensor is dequantized when it is read."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from hessquant.checkpoint.header import DTYPES, size_of
from hessquant.checkpoint.reader import StoredFiles
from hessquant.checkpoint.unpacked import unquantized
from hessquant.errors import SourceError
from hessquant.formats.stored import Form, StoredWeight, is_of_activations, refuse_both, scale_fault
from hessquant.models.structure import block_of
from hessquant.records import SourceForm, TensorInfo, Untouched

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}

_TOGETHER = 4
"""Tensors that transformers reads at the same time, at most."""

_ITEM = 4
"""Bytes of a dequantized value."""


class DequantizedView(ABC):
    """A checkpoint seen as that of its model in 16 bit (`WeightSource`).

    Attributes:
        directory: Where it lies.
        stored: The checkpoint as it is stored.
        config: Its `config.json`, without what it says of quantization.
        tensors: Every tensor by name; what is dequantized, in the dtype that the config names (BF16 where it names
            none), which is what it is written in where it is not quantized anew.
        form: How it is stored.
    """

    directory: Path
    stored: StoredFiles
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    form: SourceForm

    @abstractmethod
    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make one."""

    @abstractmethod
    def decode(self, name: str) -> Tensor:
        """Read one tensor: float32 where it is dequantized, and else as stored."""

    @abstractmethod
    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """The same in pieces along its first dimension, each of `most_bytes` or of what cannot be parted."""

    def read(self, name: str) -> Tensor:
        """Read one tensor in the dtype that `tensors` says (`decode`)."""
        tensor = self.decode(name)
        return tensor.to(DTYPES[self.tensors[name].dtype]) if name in self.form.dequantized else tensor

    def warm(self, names: Iterable[str], stopped: Callable[[], bool]) -> None:
        """Read what makes these tensors and keep nothing (`CheckpointReader.warm`)."""
        self.stored.warm((part for name in names for part in self.parts(name)), stopped)


class DequantizedCheckpoint(DequantizedView):
    """The tensors of a checkpoint, with each quantized weight in place of its parts.

    Args:
        reader: The checkpoint.
        form: How its config says that weights are stored.

    Raises:
        SourceError: If parts are missing or do not fit each other, or nothing is stored so.
    """

    def __init__(self, reader: StoredFiles, form: Form) -> None:
        self.directory, self.stored = reader.directory, reader
        self.config = unquantized(reader.config)
        self._weights = {weight.name: weight for weight in form.weights(reader.tensors)}
        if not self._weights:
            raise SourceError(
                f"{reader.directory}: no tensor is stored as {form.title}, though its config says so; if its weights "
                "are 16-bit ones, take quantization_config out of config.json"
            )
        parts = {part.info.name: name for name, weight in self._weights.items() for part in weight.parts}
        refuse_both(self._weights.keys() - parts.keys(), reader.tensors)
        dropped = [info for name, info in reader.tensors.items() if name not in parts and is_of_activations(name)]
        hidden = {info.name for info in dropped}
        dtype, tensors = copied_dtype(self.config), dict[str, TensorInfo]()
        for name, info in reader.tensors.items():
            weight = self._weights.get(parts.get(name, ""))
            if weight is not None and weight.name not in tensors:
                size = size_of(dtype, weight.shape)
                tensors[weight.name] = TensorInfo(weight.name, weight.shape, dtype, size, info.file)
            elif weight is None and name not in hidden:
                tensors[name] = info
        self.tensors = tensors
        self.form = SourceForm(
            f"{form.title}, dequantized",
            frozenset(self._weights),
            tuple(map(dropped_scale, dropped)),
            *at_once(map(_size, self._weights.values())),
        )

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make one."""
        weight = self._weights.get(name)
        return (name,) if weight is None else tuple(part.info.name for part in weight.parts)

    def decode(self, name: str) -> Tensor:
        """Read one tensor: float32 where it is dequantized, and else as stored.

        Raises:
            SourceError: If it cannot be read, or a scale is none.
        """
        weight = self._weights.get(name)
        if weight is None:
            return self.stored.read(name)
        return _decoded(weight, [self.stored.read(part.info.name) for part in weight.parts])

    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """The same in pieces along its first dimension, each of `most_bytes` or of a row of blocks.

        Raises:
            SourceError: As `decode`.
        """
        weight = self._weights.get(name)
        if weight is None:
            yield from self.stored.chunks(name, most_bytes)
            return
        if not weight.shape or _ITEM * prod(weight.shape) <= most_bytes:
            yield self.decode(name)
            return
        units = max(1, most_bytes // (_ITEM * weight.unit * prod(weight.shape[1:])))
        streams = (
            self.stored.pieces(part.info.name, part.rows * units)
            if part.rows
            else cycle([self.stored.read(part.info.name)])
            for part in weight.parts
        )
        # The codes, which come first, are in pieces always, and end the others.
        for pieces in zip(*streams, strict=False):
            yield _decoded(weight, pieces)


def _decoded(weight: StoredWeight, parts: Iterable[Tensor]) -> Tensor:
    parts = tuple(parts)
    for part, scales in zip(weight.parts[1:], parts[1:], strict=True):
        fault = scale_fault(scales)
        if fault is not None:
            raise SourceError(f"{part.info.file}: tensor {part.info.name} {fault}; fetch the file again")
    return weight.decode(parts)


def _size(weight: StoredWeight) -> tuple[str, int, int]:
    return weight.name, sum(part.info.bytes for part in weight.parts), prod(weight.shape)


def dropped_scale(info: TensorInfo) -> Untouched:
    """A scale that has no place in what is written."""
    return Untouched(info.name, info.shape, info.dtype, info.bytes, "scale of activations, which stay in 16 bit")


def at_once(weights: Iterable[tuple[str, int, int]]) -> tuple[int, int]:
    """What is there together while weights of one block are read, at most: bytes besides the values, and of those.

    Args:
        weights: Name, bytes besides the values, and count of values of each.
    """
    of_block: dict[str, list[tuple[int, int]]] = {}
    for name, besides, count in weights:
        of_block.setdefault(block_of(name), []).append((besides, _ITEM * count))
    largest = [sorted(sizes, key=sum)[-_TOGETHER:] for sizes in of_block.values()]
    parts, values = (max(sum(size[kind] for size in sizes) for sizes in largest) for kind in (0, 1))
    return parts, values


def copied_dtype(config: Mapping[str, Any]) -> str:
    """What dequantized tensors are written in where they are not quantized anew: the dtype that a config names."""
    for described in (config, config.get("text_config")):
        if isinstance(described, dict):
            for key in ("dtype", "torch_dtype"):
                named = described.get(key)
                if isinstance(named, str) and named.removeprefix("torch.") in _DTYPES:
                    return _DTYPES[named.removeprefix("torch.")]
    return "BF16"
