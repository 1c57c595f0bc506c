"""The GGUF file of a model before it was quantized, as llama.cpp's converter makes it: its settings and its rows."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGUFReader, ReaderTensor
from torch import Tensor

from hessquant.checkpoint.gguf_contents import PLAIN
from hessquant.checkpoint.gguf_reader import form_of, open_gguf
from hessquant.checkpoint.header import DTYPES
from hessquant.errors import SourceError
from hessquant.models.gguf_header import numbered_block

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_COUNTED_PARTS = "split."
_CHUNK_BYTES = 1 << 24


class GgufBase:
    """A file without quantized tensors, or the first of the parts that one was split into.

    Attributes:
        name: Of the file.
        tensors: Every tensor by name, in the files' order.
        settings: By key, key and value as the file has them; how it was split is left out.
        alignment: Tensors begin at multiples of this.

    Args:
        file: Where it lies.

    Raises:
        SourceError: If it cannot be read, a part is missing, or a tensor is quantized.
    """

    def __init__(self, file: Path) -> None:
        self.name = file.name
        readers = [open_gguf(part) for part in _parts(file)]
        self.tensors: Mapping[str, ReaderTensor] = {t.name: t for reader in readers for t in reader.tensors}
        if len(self.tensors) < sum(len(reader.tensors) for reader in readers):
            raise SourceError(f"{file.name}: two of its parts hold one tensor; make it anew")
        self.settings = settings_of(readers[0])
        self.alignment = int(readers[0].alignment)
        for tensor in self.tensors.values():
            if GGML_QUANT_SIZES[tensor.tensor_type][0] > 1:
                raise SourceError(
                    f"{file.name} is quantized ({tensor.name} is {tensor.tensor_type.name}); as a base it must be "
                    "llama.cpp's conversion to BF16, F16 or F32 (convert_hf_to_gguf.py --outtype bf16)"
                )

    def identity(self) -> str:
        """SHA-256, in hex, over what the headers say."""
        digest = hashlib.sha256(b"".join(self.settings.values()))
        for name, tensor in self.tensors.items():
            digest.update(f"{name} {form_of(tensor)}".encode())
        return digest.hexdigest()

    def matrices(self) -> Iterator[tuple[str, int | None, tuple[int, ...]]]:
        """Name, number of the block (None = outside of them) and shape of every tensor that has rows to compare."""
        for name, tensor in self.tensors.items():
            kind, shape = form_of(tensor)
            if kind.name in PLAIN and len(shape) > 1:
                yield name, numbered_block(name), shape

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Some rows of a tensor, float32 [count, columns]; all dimensions but the last count as rows."""
        return _values(rows_of(self.tensors[name])[numbers.numpy()], self.tensors[name])

    def chunks(self, name: str) -> Iterator[Tensor]:
        """All rows of a tensor in pieces, float32 [count, columns]."""
        for lines in pieces_of(self.tensors[name]):
            yield _values(np.array(lines), self.tensors[name])


def settings_of(reader: GGUFReader) -> dict[str, bytes]:
    """Settings of a file by key, key and value as it has them."""
    settings = {}
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", _COUNTED_PARTS)):
            size = sum(int(part.nbytes) for part in field.parts)
            settings[key] = bytes(reader.data[field.offset : field.offset + size])
    return settings


def rows_of(tensor: ReaderTensor) -> np.ndarray:
    """Bytes of a tensor, uint8 [rows, bytes of a row]; they stay on disk until they are looked at."""
    rows = tensor.n_elements // max(1, int(tensor.shape[0]))
    return tensor.data.reshape(-1).view(np.uint8).reshape(rows, -1)


def pieces_of(tensor: ReaderTensor) -> Iterator[np.ndarray]:
    """The same, so many rows at a time."""
    lines = rows_of(tensor)
    step = max(1, _CHUNK_BYTES // max(1, lines.shape[1]))
    return (lines[start : start + step] for start in range(0, len(lines), step))


def _values(lines: np.ndarray, tensor: ReaderTensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(lines)).view(DTYPES[tensor.tensor_type.name]).to(torch.float32)


def _parts(file: Path) -> list[Path]:
    named = _PART.search(file.name)
    if named is None:
        return [file]
    stem, count = file.name[: named.start()], int(named[2])
    return [file.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
