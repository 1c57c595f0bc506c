"""A quantized checkpoint as the plain state dict it stands for."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import SourceError
from hessquant.formats import gptq
from hessquant.formats.gptq_config import GptqSettings, read_quantization_config


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a model's config; None if it has none.

    Raises:
        SourceError: If it is not an object.
    """
    described = config.get("quantization_config")
    if described is not None and not isinstance(described, dict):
        raise SourceError(f"quantization_config is a {type(described).__name__}, not an object")
    return described


def decoded_state(reader: CheckpointReader, *, transposed: Collection[str] = ()) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, quantized weights decoded to float32 under `X.weight`.

    Args:
        reader: The checkpoint.
        transposed: Weights that the model stores [inputs, outputs]; others come as [outputs, inputs].

    Returns:
        Tensor by name; untouched ones as stored.

    Raises:
        SourceError: If the checkpoint's quantization is of another method, or its config and tensors disagree.
        CheckpointError: If a quantized weight is malformed.
    """
    described = quantization_of(reader.config)
    if described is None:
        modules = gptq.quantized_modules(reader.tensors)
        if modules:
            raise SourceError(f"{modules[0]} is packed, but config.json has no quantization_config to read it by")
        return {name: reader.read(name) for name in reader.tensors}
    settings = read_quantization_config(described)
    state: dict[str, Tensor] = {}
    parts: set[str] = set()
    for module in gptq.quantized_modules(reader.tensors):
        name = f"{module}.weight"
        decoded = decode_module(reader, module, settings)
        state[name] = decoded.T.contiguous() if name in transposed else decoded
        parts.update(gptq.part_names(module).values())
    return {name: reader.read(name) for name in reader.tensors if name not in parts} | state


def decode_module(reader: CheckpointReader, module: str, settings: GptqSettings) -> Tensor:
    """One quantized weight as float32 [outputs, inputs].

    Raises:
        SourceError: If the config says that the module is not quantized.
        CheckpointError: If its tensors are malformed.
    """
    stated = settings.module(module)
    if stated is None:
        raise SourceError(f"{module} is packed, but quantization_config says that it is left in 16 bit")
    names = [name for name in gptq.part_names(module).values() if name in reader.tensors]
    tensors = {name: reader.read(name) for name in names}
    return gptq.dequantize(tensors, module, stated.bits, settings.checkpoint_format)
