"""Reading a GGUF file: by the gguf package's reader, after its header has been found to claim no more than it holds."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from torch import Tensor

from hessquant.errors import SourceError
from hessquant.formats.gguf_blocks import unpack
from hessquant.models.gguf_header import check_header


def open_gguf(file: Path) -> GGUFReader:
    """Open a file; its tensors stay on disk until they are looked at.

    Raises:
        SourceError: If it is not a whole GGUF file.
    """
    check_header(file)
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
