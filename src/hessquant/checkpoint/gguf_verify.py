"""Re-reading a written GGUF file: by the gguf package's reader, and a decoder that shares nothing with the packer."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, Keys, ReaderTensor
from torch import Tensor

from hessquant.checkpoint.gguf_contents import Entry, contents_of
from hessquant.checkpoint.gguf_reader import decoded, form_of, open_gguf
from hessquant.checkpoint.reader import TensorSource
from hessquant.checkpoint.shards import raw_bytes
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, SourceError, VerificationError
from hessquant.formats.gguf_blocks import BLOCK_TYPES
from hessquant.formats.gguf_settings import rope_factors
from hessquant.records import Plan

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def verify_gguf(path: Path, source: TensorSource, plan: Plan, quantized: Mapping[str, QuantizedWeight]) -> int:
    """Check that a written file decodes to exactly what was solved, and holds nothing else.

    Args:
        path: The file.
        source: What the untouched tensors must equal.
        plan: What was to be written.
        quantized: Weight per target name.

    Returns:
        Quantized weights that were re-read and found equal.

    Raises:
        VerificationError: If anything differs; the message names the tensor.
    """
    entries = contents_of(source.config, plan)
    try:
        reader = open_gguf(path)
    except SourceError as error:
        raise VerificationError(f"what was written cannot be read back: {error}") from error
    written = {tensor.name: tensor for tensor in reader.tensors}
    _check_inventory(entries, written)
    _check_vocabulary(reader, written)
    for entry in entries:
        tensor = written[entry.place.name]
        stated = form_of(tensor)
        if stated != (entry.kind, entry.shape):
            raise VerificationError(
                f"{entry.place.name} is {stated[0].name} {list(stated[1])}, not {entry.kind.name} {list(entry.shape)}"
            )
        _check_values(entry, tensor, source, quantized)
    return len(plan.targets)


def _check_inventory(entries: list[Entry], written: Mapping[str, ReaderTensor]) -> None:
    expected = {entry.place.name for entry in entries}
    missing, surplus = expected - set(written), set(written) - expected
    if missing:
        raise VerificationError(f"{min(missing)} was not written ({len(missing)} tensors are missing)")
    if surplus:
        raise VerificationError(f"{min(surplus)} was written, but nothing asked for it ({len(surplus)} such tensors)")


def _check_vocabulary(reader: GGUFReader, written: Mapping[str, ReaderTensor]) -> None:
    tokens = reader.get_field(Keys.Tokenizer.LIST)
    count, rows = 0 if tokens is None else len(tokens.data), int(written["token_embd.weight"].shape[1])
    if count != rows:
        raise VerificationError(f"token_embd.weight has {rows} rows, but {count} tokens were written")


def _check_values(
    entry: Entry, tensor: ReaderTensor, source: TensorSource, quantized: Mapping[str, QuantizedWeight]
) -> None:
    name = entry.source
    if name is None:
        same = torch.equal(_plain(tensor, entry), rope_factors(source.config))
    elif entry.kind in BLOCK_TYPES:
        try:
            found = decoded(tensor)
        except CheckpointError as error:
            raise VerificationError(f"{name}: {error}") from error
        same = torch.equal(_source_order(found, entry), quantized[name].dequantize().cpu())
    else:
        same = torch.equal(raw_bytes(_source_order(_plain(tensor, entry), entry)), raw_bytes(_expected(entry, source)))
    if not same:
        raise VerificationError(
            f"{name or entry.place.name}: values in {entry.place.name} differ from what they are of"
        )


def _expected(entry: Entry, source: TensorSource) -> Tensor:
    tensor = source.read(entry.source or "")
    if len(entry.shape) > 1:
        return tensor
    return tensor.to(torch.float32) + (1.0 if entry.place.plus_one else 0.0)


def _plain(tensor: ReaderTensor, entry: Entry) -> Tensor:
    """Values that are stored as they are."""
    octets = np.array(tensor.data).view(np.uint8).reshape(-1)
    return torch.from_numpy(octets).view(_PLAIN[entry.kind]).view(entry.shape)


def _source_order(found: Tensor, entry: Entry) -> Tensor:
    """Rows as the checkpoint has them: by where each of them went, one head after the other."""
    heads = entry.place.heads
    if not heads:
        return found
    size = len(found) // heads
    # The first half of a head went to the even rows, the second to the odd ones.
    within = [2 * row if row < size // 2 else 2 * (row - size // 2) + 1 for row in range(size)]
    return found[[head * size + row for head in range(heads) for row in within]]
