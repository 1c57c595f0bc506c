"""Damaged copies: a client that agrees with one of these has not been tested at all."""

import shutil
from pathlib import Path

import gguf
import numpy as np
from safetensors.torch import load_file, save_file

FACTOR = 1.1

_BLOCKS = {
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q5_0,
    gguf.GGMLQuantizationType.Q8_0,
}


def with_wrong_scales(checkpoint: Path, broken: Path) -> Path:
    """A copy whose every scale is a tenth too large; zeros would not do, vLLM reads none of symmetric weights."""
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(checkpoint, broken)
    for file in broken.glob("*.safetensors"):
        tensors = load_file(file)
        scaled = {name: FACTOR * tensor for name, tensor in tensors.items() if name.endswith(("scales", "_scale"))}
        save_file(tensors | scaled, file, metadata={"format": "pt"})
    for file in broken.glob("*.gguf"):
        _scale_blocks(file)
    return broken


def _scale_blocks(file: Path) -> None:
    """Each block of these types begins with its scale in float16."""
    for tensor in gguf.GGUFReader(file, "r+").tensors:
        if tensor.tensor_type in _BLOCKS:
            size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
            scales = tensor.data.reshape(-1, size)[:, :2].view(np.float16)
            scales[...] = FACTOR * scales
