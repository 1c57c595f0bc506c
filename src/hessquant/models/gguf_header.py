"""Walking through a GGUF header before its readers do, since some look past the end of the file for what it claims."""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from hessquant.errors import SourceError

_MAGIC, _VERSIONS, _MOST_DIMENSIONS = b"GGUF", (2, 3), 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


_ARCHITECTURE, _SPLIT, _SCALING = "general.architecture", "split.count", ".rope.scaling.type"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of a GGUF file describes it.

    Attributes:
        name: Its name there.
        kind: Type of its values, e.g. F32 or Q4_K.
        shape: Its dimensions as torch counts them: rows first, values of a row last.
        begin: Byte of the file that its data begin at.
        bytes: How many they are.
    """

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    begin: int
    bytes: int

    @property
    def rows(self) -> int:
        """Its rows, those of all matrices of a stack together."""
        return prod(self.shape[:-1])


@dataclass(frozen=True)
class Header:
    """What a GGUF file says that it holds, all of which is there.

    Attributes:
        tensors: By name, in the order of the file.
        blocks: Blocks that there are tensors of.
        parts: Files that the model is split over.
        architecture: What it names itself; empty if nothing.
        rope_scaling: How it says that positions are scaled, such as "yarn"; empty if it says nothing of that.
    """

    tensors: Mapping[str, StoredTensor]
    blocks: int
    parts: int
    architecture: str
    rope_scaling: str


def numbered_block(tensor: str) -> int | None:
    """The number of the block that a tensor is in, by its name; None if it is in none.

    >>> numbered_block("blk.3.attn_q.weight"), numbered_block("output.weight")
    (3, None)
    """
    block = _BLOCK.search(tensor)
    return None if block is None else int(block[1])


def read_header(file: Path) -> Header:
    """Read the header of a file, and refuse one that claims more than the file holds.

    Raises:
        SourceError: Naming the tensor, where it is one.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Walk(content).header()
    except (OSError, ValueError, struct.error) as error:
        raise SourceError(f"{file.name} is not a whole GGUF file ({error}); fetch it again") from error


class _Walk:
    """A GGUF header, walked through without a look past the end of the file."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._place = content, 0

    def header(self) -> Header:
        """Walk through it."""
        if self._take(4) != _MAGIC or self._number("I") not in _VERSIONS:
            raise ValueError("it does not begin as one of version 2 or 3")
        tensor_count, setting_count = self._number("Q"), self._number("Q")
        numbers: dict[str, int] = {"general.alignment": 32}
        words: dict[str, str] = {}
        for _ in range(setting_count):
            name, value = self._string(), self._value(self._number("I"))
            if isinstance(value, int):
                numbers[name] = value
            elif isinstance(value, str):
                words[name] = value
        # Of each, the byte that its data begin at is counted from the beginning of all data, which is not known yet.
        described = [self._tensor() for _ in range(tensor_count)]
        alignment = max(1, numbers["general.alignment"])
        start = -(-self._place // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for tensor in described:
            placed = replace(tensor, begin=start + tensor.begin)
            end = placed.begin + placed.bytes
            if end > len(self._content):
                raise ValueError(f"tensor {tensor.name} ends at byte {end}, the file at {len(self._content)}")
            if tensor.name in tensors:
                raise ValueError(f"tensor {tensor.name} is in it twice")
            tensors[tensor.name] = placed
        blocks, parts = len({numbered_block(name) for name in tensors} - {None}), numbers.get(_SPLIT, 1)
        for name, count in numbers.items() if parts <= 1 else ():
            if name.endswith(".block_count") and count > blocks:
                raise ValueError(f"its {name} is {count}, but it holds tensors of {blocks} blocks")
        architecture = words.get(_ARCHITECTURE, "")
        return Header(tensors, blocks, parts, architecture, words.get(f"{architecture}{_SCALING}", ""))

    def _tensor(self) -> StoredTensor:
        """The next tensor; its data begin at a byte counted from the beginning of all data."""
        name, dimensions = self._string(), self._number("I")
        if not 0 < dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        if 0 in shape:
            raise ValueError(f"tensor {name} holds no values, {list(shape)}")
        kind, begin = self._number("I"), self._number("Q")
        if kind not in GGML_QUANT_SIZES:
            raise ValueError(f"tensor {name} is of type {kind}, which is not known")
        values, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % values:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} values, which are no whole blocks of {values}")
        return StoredTensor(name, GGMLQuantizationType(kind), shape, begin, prod(shape) // values * size)

    def _value(self, kind: int) -> Any:
        """The next setting's value; an array is passed over."""
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"a setting is of type {kind}, which is not known")
        kind, count = self._number("I"), self._number("Q")
        if kind in _SCALARS:
            self._take(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        elif kind == _STRING:
            for _ in range(count):
                self._take(self._number("Q"))
        else:
            raise ValueError(f"a setting is an array of type {kind}, which is not known")
        return None

    def _string(self) -> str:
        return self._take(self._number("Q")).decode()

    def _number(self, code: str) -> Any:
        (number,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return number

    def _take(self, count: int) -> bytes:
        begin, self._place = self._place, self._place + count
        if self._place > len(self._content):
            raise ValueError(f"its header goes on after byte {len(self._content)}, where the file ends")
        return self._content[begin : self._place]
