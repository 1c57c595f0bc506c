"""Writing a quantized model as a GGUF file with all that a base says of it, and reading it back."""

import struct
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGML_QUANT_VERSION, GGUFValueType, Keys, ReaderTensor
from torch import Tensor

from hessquant.checkpoint.gguf_base import GgufBase, pieces_of, rows_of, settings_of
from hessquant.checkpoint.gguf_contents import Entry, file_type
from hessquant.checkpoint.gguf_map import RowMap
from hessquant.checkpoint.gguf_reader import form_of, open_gguf
from hessquant.checkpoint.gguf_rows import Found
from hessquant.checkpoint.gguf_writer import VERSION_KEY
from hessquant.checkpoint.output import GGUF_FILE, QuantizedModel, writing
from hessquant.checkpoint.verify import check_inventory
from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError, SourceError, VerificationError
from hessquant.files import fsync_directory, replacing
from hessquant.formats.gguf_blocks import pack, unpack
from hessquant.formats.gguf_models import Place

_CHUNK_BYTES = 1 << 24


class BasedGgufDraft:
    """A draft of one GGUF file: a base's settings and tensors, with blocks where quantized weights have their rows.

    Attributes:
        path: The file, which no reader takes for a model by this name.
        bytes: Size of its tensors.
    """

    def __init__(self, out: Path, model: QuantizedModel, base: GgufBase, rows: RowMap) -> None:
        self.path, self._final = out / f".{GGUF_FILE}.unverified", out / GGUF_FILE
        self._model, self._base, self._rows = model, base, rows
        self._entries = [self._entry(name) for name in base.tensors]
        self.bytes = sum(entry.bytes for entry in self._entries)

    def _entry(self, name: str) -> Entry:
        tensor = self._base.tensors[name]
        kind, shape = form_of(tensor)
        kind = self._rows.kinds.get(name, kind)
        values, size = GGML_QUANT_SIZES[kind]
        return Entry(None, Place(name), kind, shape, tensor.n_elements // values * size)

    @cached_property
    def _settings(self) -> dict[str, bytes]:
        """Every setting of the file by key, as it has them."""
        said = {
            Keys.General.FILE_TYPE: (GGUFValueType.UINT32, struct.pack("<I", file_type(self._entries))),
            Keys.General.QUANTIZATION_VERSION: (GGUFValueType.UINT32, struct.pack("<I", GGML_QUANT_VERSION)),
            VERSION_KEY: (GGUFValueType.STRING, _text(self._model.version)),
        }
        ours = {key: _text(key) + struct.pack("<I", kind) + value for key, (kind, value) in said.items()}
        return {**self._base.settings, **ours}

    @cached_property
    def _header(self) -> bytes:
        """Everything before the tensors, in the third version of the format."""
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self._entries), len(self._settings)), *self._settings.values()]
        offset = 0
        for entry in self._entries:
            sizes = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
            parts += [_text(entry.place.name), sizes, struct.pack("<IQ", entry.kind, offset)]
            offset += self._padded(entry.bytes)
        header = b"".join(parts)
        return header + bytes(self._padded(len(header)) - len(header))

    def _padded(self, size: int) -> int:
        return -(-size // self._base.alignment) * self._base.alignment

    @cached_property
    def _begins(self) -> dict[str, int]:
        """Where each tensor begins in the file, by name, and where the file ends, by no name."""
        begins, place = {}, len(self._header)
        for entry in self._entries:
            begins[entry.place.name] = place
            place += self._padded(entry.bytes)
        return {**begins, "": place}

    def write(self) -> None:
        """Write the header and what stays of the base, then weight by weight."""
        with writing(self.path), replacing(self.path) as stream:
            stream.write(self._header)
            # What nothing is written to is zero bytes, which as blocks are zeros: so is padding.
            stream.truncate(self._begins[""])
            for name, tensor in self._base.tensors.items():
                stream.seek(self._begins[name])
                for piece in () if name in self._rows.kinds else pieces_of(tensor):
                    stream.write(piece.tobytes())
            for name, parts in self._rows.found.items():
                weight = self._model.weights[name]
                for part in parts:
                    self._write_rows(stream, name, weight, part)

    def _write_rows(self, stream: BinaryIO, name: str, weight: QuantizedWeight, part: Found) -> None:
        order = part.theirs.argsort()
        own, theirs, grid = part.own[order], part.theirs[order], weight.grid
        rows = QuantizedWeight(weight.codes[own], Grid(grid.spec, grid.scales[own], grid.zeros[own]))
        try:
            packed = pack(rows, self._rows.kinds[part.tensor]).numpy()
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
        begin, width = self._begins[part.tensor], packed.shape[1]
        breaks = (theirs.diff() != 1).nonzero().flatten() + 1
        for start, end in pairwise([0, *breaks.tolist(), len(theirs)]):
            stream.seek(begin + int(theirs[start]) * width)
            stream.write(packed[start:end].tobytes())

    def verify(self) -> int:
        """Re-read it all: settings and tensors are the base's, but for the weights, which are decoded."""
        try:
            reader = open_gguf(self.path)
        except SourceError as error:
            raise VerificationError(f"what was written cannot be read back: {error}") from error
        written = {tensor.name: tensor for tensor in reader.tensors}
        check_inventory(written.keys(), self._base.tensors.keys())
        if settings_of(reader) != self._settings:
            raise VerificationError(f"the settings that were written are not those of {self._base.name}")
        for entry in self._entries:
            _check_entry(written[entry.place.name], entry, self._base, self._rows)
        for name, parts in self._rows.found.items():
            solved = self._model.weights[name].dequantize()
            for part in parts:
                _check_rows(written[part.tensor], name, solved, part)
        return len(self._rows.found)

    def reveal(self) -> None:
        """Give the file its name."""
        self.path.replace(self._final)
        fsync_directory(self._final.parent)


def _text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def _check_entry(tensor: ReaderTensor, entry: Entry, base: GgufBase, rows: RowMap) -> None:
    """That a tensor has its form; if it is the base's, that its bytes are; if blocks, that its padding is zero."""
    name, form = entry.place.name, form_of(tensor)
    if form != (entry.kind, entry.shape):
        raise VerificationError(f"{name} is {form[0].name} {list(form[1])}, not {entry.kind.name} {list(entry.shape)}")
    if name in rows.kinds:
        same = not any(rows_of(tensor)[row].any() for row in rows.padding[name].tolist())
    else:
        pieces = zip(pieces_of(tensor), pieces_of(base.tensors[name]), strict=True)
        same = all(np.array_equal(a, b) for a, b in pieces)
    if not same:
        raise VerificationError(f"{name} was to be as in {base.name}, but differs")


def _check_rows(tensor: ReaderTensor, name: str, solved: Tensor, part: Found) -> None:
    step = max(1, _CHUNK_BYTES // solved.shape[1])
    for start in range(0, len(part.own), step):
        own, theirs = part.own[start : start + step], part.theirs[start : start + step]
        if not torch.equal(_decoded(tensor, theirs), solved[own]):
            raise VerificationError(f"{name}: values in {tensor.name} differ from what they are of")


def _decoded(tensor: ReaderTensor, rows: Tensor) -> Tensor:
    return unpack(torch.from_numpy(rows_of(tensor)[rows.numpy()]), form_of(tensor)[0])
