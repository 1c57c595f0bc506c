"""A GGUF file, seen as the checkpoint of its model in 16 bit; a weight is dequantized when it is asked for."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from math import prod
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hessquant.checkpoint.dequantized import DequantizedView, at_once, copied_dtype
from hessquant.checkpoint.header import DTYPES, read_json, size_of
from hessquant.checkpoint.reader import CONFIG_FILE
from hessquant.errors import SourceError
from hessquant.models.gguf import GgufIndex
from hessquant.models.gguf_header import read_header
from hessquant.models.gguf_values import PIECE_BYTES, open_unchanged, read_rows, values_of
from hessquant.models.gguf_weights import MadeWeight, first_of
from hessquant.records import PLAIN, SourceForm, TensorInfo, Untouched

_ITEM = 4
_WARMED = 1 << 20


class GgufFile(AbstractContextManager["GgufFile"]):
    """What is in a GGUF file (`StoredFiles`): tensors as bytes, in types of its own.

    Attributes:
        directory: Where the files beside it lie.
        index: What that says of it.
        entries: Its tensors by name, and where in the file they are.
        tensors: The same as others know tensors; dtypes are GGUF's.
        config: The `config.json` of the directory.
        form: That tensors are seen as they are stored.

    Args:
        directory: Where `models.gguf` has put what describes it.
        index: What that says.

    Raises:
        SourceError: If the file has changed since, or cannot be read.
    """

    form: SourceForm = PLAIN

    def __init__(self, directory: Path, index: GgufIndex) -> None:
        self.directory, self.index = directory, index
        with open_unchanged(index.file, index.stamp):
            self.entries = read_header(index.file).tensors
        self.tensors = {
            name: TensorInfo(name, each.shape, each.kind.name, each.bytes, index.file.name)
            for name, each in self.entries.items()
        }
        self.config = read_json(directory / CONFIG_FILE)

    @property
    def stored(self) -> "GgufFile":
        """Itself."""
        return self

    def parts(self, name: str) -> tuple[str, ...]:
        """Its own name."""
        return (name,)

    def read(self, name: str) -> Tensor:
        """Read one tensor as it is stored, uint8 [rows, bytes of a row].

        Raises:
            SourceError: If the file cannot be read, or has changed.
        """
        return next(self.pieces(name, self.entries[name].rows))

    def decode(self, name: str) -> Tensor:
        """Read one tensor, as stored (`read`)."""
        return self.read(name)

    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """The same in pieces of rows, each of `most_bytes` or of one row.

        Raises:
            SourceError: As `read`.
        """
        entry = self.entries[name]
        yield from self.pieces(name, max(1, most_bytes * entry.rows // entry.bytes))

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """The same in pieces of so many rows.

        Raises:
            SourceError: As `read`.
        """
        entry = self.entries[name]
        for start in range(0, entry.rows, rows):
            with open_unchanged(self.index.file, self.index.stamp, name) as stream:
                content = read_rows(stream, entry, start, min(start + rows, entry.rows))
            yield torch.from_numpy(content)

    def values(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows of a tensor dequantized, float32 [rows, values of a row].

        Raises:
            SourceError: As `read`.
        """
        with open_unchanged(self.index.file, self.index.stamp, name) as stream:
            return values_of(stream, self.entries[name], start, stop)

    def warm(self, names: Iterable[str], stopped: Callable[[], bool]) -> None:
        """Read tensors and keep nothing (`CheckpointReader.warm`).

        Raises:
            SourceError: As `read`.
        """
        for entry in sorted((self.entries[name] for name in names), key=attrgetter("begin")):
            for _ in self.chunks(entry.name, _WARMED):
                if stopped():
                    return

    def __exit__(self, *_: object) -> None:
        """Nothing is open between reads."""


class GgufCheckpoint(DequantizedView):
    """The weights that the tensors of a GGUF file make.

    Args:
        file: That file.

    Raises:
        SourceError: If its index is of other tensors.
    """

    def __init__(self, file: GgufFile) -> None:
        self.directory, self.stored, self.config, self._file = file.directory, file, file.config, file
        self._weights = {weight.name: weight for weight in file.index.weights}
        lacking = {part for weight in self._weights.values() for part in weight.parts} - file.entries.keys()
        if lacking:
            raise SourceError(f"{file.index.file.name}: it has no tensor {min(lacking)}; remove {file.directory}")
        dtype, name = copied_dtype(self.config), file.index.file.name
        self.tensors = {
            each.name: TensorInfo(each.name, each.shape, dtype, size_of(dtype, each.shape), name)
            for each in self._weights.values()
        }
        stored = (file.tensors[part] for weight in self._weights.values() for part in weight.parts)
        self.form = SourceForm(
            f"{_title(stored)}, dequantized",
            frozenset(self._weights),
            tuple(_left(file.tensors[each], why) for each, why in file.index.left.items()),
            *at_once(map(_size, self._weights.values())),
        )

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make one."""
        return self._weights[name].parts

    def decode(self, name: str) -> Tensor:
        """One weight, float32.

        Raises:
            SourceError: If there is no such weight, or the file cannot be read.
        """
        weight = self._weights.get(name)
        if weight is None:
            raise SourceError(f"{self._file.index.file.name}: its tensors make no weight {name}")
        if not weight.stacked:
            return self._made(weight, 0)
        values = torch.empty(weight.shape)
        for number in range(weight.shape[0]):
            values[number] = self._made(weight, number)[0]
        return values

    def read(self, name: str) -> Tensor:
        """One weight in the dtype that `tensors` says.

        Raises:
            SourceError: As `decode`.
        """
        info = self.tensors[name]
        values, start = torch.empty(info.shape, dtype=DTYPES[info.dtype]), 0
        for piece in self.chunks(name, PIECE_BYTES):
            values[start : start + len(piece)] = piece
            start += len(piece)
        return values

    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """The same in pieces along its first dimension: rows where they are those of a tensor, matrices of a stack.

        Raises:
            SourceError: As `decode`.
        """
        weight = self._weights[name]
        if weight.stacked:
            yield from (self._made(weight, number) for number in range(weight.shape[0]))
        elif weight.kept and len(weight.shape) > 1:
            step = max(1, most_bytes // (_ITEM * weight.shape[1]))
            for start in range(0, weight.shape[0], step):
                stop = min(start + step, weight.shape[0])
                yield torch.from_numpy(self._file.values(weight.parts[0], start, stop))
        else:
            yield self.decode(name)

    def _made(self, weight: MadeWeight, number: int) -> Tensor:
        """A weight, or of a stack one matrix [1, rows, inputs]."""
        parts = []
        for name in weight.parts:
            shape = first_of(self._file.entries[name].shape)
            rows = prod(shape[:-1])
            parts.append((name, self._file.values(name, number * rows, (number + 1) * rows).reshape(shape)))
        with np.errstate(all="ignore"):
            (values,) = self._file.index.maker.make(parts).values()
        return torch.from_numpy(np.ascontiguousarray(values))


def _size(weight: MadeWeight) -> tuple[str, int, int]:
    """A name, bytes that are there while it is made, and its values."""
    if weight.kept:
        return weight.name, PIECE_BYTES, prod(weight.shape)
    # Its parts, and copies that transformers' processor makes of them.
    unit = _ITEM * prod(first_of(weight.shape))
    return weight.name, PIECE_BYTES + (2 * unit if weight.stacked else unit), prod(weight.shape)


def _left(info: TensorInfo, why: str) -> Untouched:
    """A tensor that has no place in what is written."""
    return Untouched(info.name, info.shape, info.dtype, info.bytes, why)


def _title(parts: Iterable[TensorInfo]) -> str:
    """Which types tensors are of, those that take most bytes first."""
    sizes = Counter[str]()
    for info in parts:
        sizes[info.dtype] += info.bytes
    *others, last = [kind for kind, _ in sizes.most_common()]
    return f"GGUF {', '.join(others)} and {last}" if others else f"GGUF {last}"
