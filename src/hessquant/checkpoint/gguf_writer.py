"""Writing a whole model as one GGUF file: its header first, then tensor by tensor."""

import io
import re
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import torch
from gguf.gguf_writer import WriterState
from torch import Tensor

from hessquant.checkpoint.gguf_contents import Entry, contents_of, file_type
from hessquant.checkpoint.gguf_reader import verify_gguf
from hessquant.checkpoint.gguf_tokenizer import Tokenizer, read_tokenizer
from hessquant.checkpoint.header import raw_bytes
from hessquant.checkpoint.output import GGUF_FILE, QuantizedModel, writing
from hessquant.checkpoint.reader import TensorSource
from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError, PlanError, SourceError
from hessquant.files import fsync_directory, replacing
from hessquant.formats.gguf_blocks import BLOCK_TYPES, pack
from hessquant.formats.gguf_models import family_of, row_order
from hessquant.formats.gguf_settings import model_settings, rope_factors, shape_of
from hessquant.records import Plan

VERSION_KEY = "hessquant.version"
"""Where the file says what wrote it."""

ALIGNMENT = int(gguf.GGUF_DEFAULT_ALIGNMENT)
"""Tensors begin at multiples of this."""


class GgufDraft:
    """A `Draft` of one GGUF file for all, the tokenizer in it, as llama.cpp opens it.

    Attributes:
        path: The file, which no reader takes for a model by this name; it is there when it is whole and on disk.
    """

    @staticmethod
    def fault(source: TensorSource, plan: Plan) -> str | None:
        """Why a model cannot become a GGUF file: its settings, its tokenizer or its tensors have no place there.

        Cheap next to anything that reads weights, so that a model is refused before calibration.
        """
        try:
            model_settings(source.config)
            read_tokenizer(source.directory, shape_of(source.config).vocabulary)
            contents_of(source.config, plan)
        except (PlanError, SourceError) as error:
            return str(error)
        return None

    def __init__(self, out: Path, model: QuantizedModel) -> None:
        self.path, self._final, self._model = out / f".{GGUF_FILE}.unverified", out / GGUF_FILE, model
        self._entries = contents_of(model.source.config, model.plan)
        self._header = _header(self._entries, model)

    def write(self) -> None:
        """Write the header, then tensor by tensor."""
        with writing(self.path), replacing(self.path) as stream:
            stream.write(self._header + _padding(len(self._header)))
            for entry in self._entries:
                content = raw_bytes(_stored(entry, self._model))
                size = content.numel()
                if size != entry.bytes:
                    raise CheckpointError(f"{entry.source}: planned as {entry.bytes} bytes, but got {size}")
                stream.write(content.numpy().data)
                stream.write(_padding(size))

    def verify(self) -> int:
        """Re-read it all."""
        return verify_gguf(self.path, self._model)

    def reveal(self) -> None:
        """Give the file its name."""
        self.path.replace(self._final)
        fsync_directory(self._final.parent)


def _padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def _stored(entry: Entry, model: QuantizedModel) -> Tensor:
    """What is stored of one tensor."""
    name, heads = entry.source, entry.place.heads
    if name is None:
        return rope_factors(model.source.config)
    if entry.kind in BLOCK_TYPES:
        try:
            return pack(_ordered(model.weights[name], heads))
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from error
    tensor = model.source.read(name)
    if heads:
        tensor = tensor[row_order(len(tensor), heads)]
    if len(entry.shape) == 1:
        tensor = tensor.to(torch.float32)
        return tensor + 1 if entry.place.plus_one else tensor
    return tensor


def _ordered(weight: QuantizedWeight, heads: int) -> QuantizedWeight:
    """A weight with its rows, and their scales and zeros, in the file's order."""
    if not heads:
        return weight
    order, grid = row_order(len(weight.codes), heads), weight.grid
    return QuantizedWeight(weight.codes[order], Grid(grid.spec, grid.scales[order], grid.zeros[order]))


def _header(entries: list[Entry], model: QuantizedModel) -> bytes:
    """Everything before the tensors, by the gguf package."""
    config = model.source.config
    writer = gguf.GGUFWriter(None, family_of(config).name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(_title(model.plan))
    writer.add_file_type(file_type(entries))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string(VERSION_KEY, model.version)
    for key, value in model_settings(config).items():
        # By itself the package would make a count a signed number.
        kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    add_tokenizer(writer, read_tokenizer(model.source.directory, shape_of(config).vocabulary))
    for entry in entries:
        # The dtype is not looked at when the kind is given; it only says that the shape is not one of bytes.
        writer.add_tensor_info(entry.place.name, entry.shape, np.dtype(np.float32), entry.bytes, entry.kind)
    # The package writes to a file it opens itself; here, the header is all it writes.
    written = io.BytesIO()
    writer.fout, writer.state = [cast("io.BufferedWriter", written)], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return written.getvalue()


def _title(plan: Plan) -> str:
    """The model's name without any folder it lies in."""
    last = re.split(r"[\\/]", plan.source.rstrip("\\/"))[-1]
    return last.removesuffix(".gguf") or plan.architecture


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Say a tokenizer in a file's header."""
    vocabulary = tokenizer.vocabulary
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.texts)
    writer.add_token_types(vocabulary.kinds)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    tokenizer.special.add_to_gguf(writer, quiet=True)
