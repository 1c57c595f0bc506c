"""Reading a GGUF file back: by the gguf package's reader, and a decoder that shares nothing with the packer."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, Keys, ReaderTensor
from torch import Tensor

from hessquant.checkpoint.gguf_contents import Entry, contents_of
from hessquant.checkpoint.header import DTYPES, raw_bytes
from hessquant.checkpoint.output import QuantizedModel
from hessquant.checkpoint.verify import check_inventory
from hessquant.errors import CheckpointError, SourceError, VerificationError
from hessquant.formats.gguf_blocks import BLOCK_TYPES, unpack
from hessquant.formats.gguf_settings import rope_factors
from hessquant.models.gguf_header import read_header


def open_gguf(file: Path) -> GGUFReader:
    """Open a file; its tensors stay on disk until they are looked at.

    Raises:
        SourceError: If it is not a whole GGUF file.
    """
    read_header(file)
    try:
        return GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise SourceError(f"{file.name} cannot be read: {error}") from error


def form_of(tensor: ReaderTensor) -> tuple[GGMLQuantizationType, tuple[int, ...]]:
    """Type of a tensor's values, and its dimensions as torch counts them."""
    return GGMLQuantizationType(tensor.tensor_type), tuple(int(size) for size in reversed(tensor.shape))


def decoded(tensor: ReaderTensor) -> Tensor:
    """Values float32 [rows, inputs] of a tensor of blocks.

    Raises:
        CheckpointError: If its type is none of ours.
    """
    return unpack(torch.from_numpy(np.array(tensor.data)), form_of(tensor)[0])


def verify_gguf(path: Path, model: QuantizedModel) -> int:
    """Check that a written file decodes to exactly what was solved, and holds nothing else.

    Args:
        path: The file.
        model: What was to be written.

    Returns:
        Quantized weights that were re-read and found equal.

    Raises:
        VerificationError: If anything differs; the message names the tensor.
    """
    entries = contents_of(model.source.config, model.plan)
    try:
        reader = open_gguf(path)
    except SourceError as error:
        raise VerificationError(f"what was written cannot be read back: {error}") from error
    written = {tensor.name: tensor for tensor in reader.tensors}
    check_inventory(written.keys(), {entry.place.name for entry in entries})
    _check_vocabulary(reader, written)
    for entry in entries:
        _check_tensor(written[entry.place.name], entry, model)
    return len(model.plan.targets)


def _check_vocabulary(reader: GGUFReader, written: Mapping[str, ReaderTensor]) -> None:
    tokens = reader.get_field(Keys.Tokenizer.LIST)
    count, rows = 0 if tokens is None else len(tokens.data), int(written["token_embd.weight"].shape[1])
    if count != rows:
        raise VerificationError(f"token_embd.weight has {rows} rows, but {count} tokens were written")


def _check_tensor(tensor: ReaderTensor, entry: Entry, model: QuantizedModel) -> None:
    kind, shape = form_of(tensor)
    if (kind, shape) != (entry.kind, entry.shape):
        raise VerificationError(
            f"{tensor.name} is {kind.name} {list(shape)}, not {entry.kind.name} {list(entry.shape)}"
        )
    name = entry.source
    if name is None:
        same = torch.equal(_plain(tensor, entry), rope_factors(model.source.config))
    elif kind in BLOCK_TYPES:
        try:
            values = decoded(tensor)
        except CheckpointError as error:
            raise VerificationError(f"{name}: {error}") from error
        same = torch.equal(_source_order(values, entry), model.weights[name].dequantize())
    else:
        expected = model.source.read(name)
        if len(shape) == 1:
            expected = expected.to(torch.float32) + (1.0 if entry.place.plus_one else 0.0)
        same = torch.equal(raw_bytes(_source_order(_plain(tensor, entry), entry)), raw_bytes(expected))
    if not same:
        raise VerificationError(f"{name or tensor.name}: values in {tensor.name} differ from what they are of")


def _plain(tensor: ReaderTensor, entry: Entry) -> Tensor:
    """Values that are stored as they are."""
    octets = np.array(tensor.data).view(np.uint8).reshape(-1)
    return torch.from_numpy(octets).view(DTYPES[entry.kind.name]).view(entry.shape)


def _source_order(values: Tensor, entry: Entry) -> Tensor:
    """Rows as the checkpoint has them: by where each of them went, one head after the other."""
    heads = entry.place.heads
    if not heads:
        return values
    size = len(values) // heads
    # The first half of a head went to the even rows, the second to the odd ones.
    within = [2 * row if row < size // 2 else 2 * (row - size // 2) + 1 for row in range(size)]
    return values[[head * size + row for head in range(heads) for row in within]]
