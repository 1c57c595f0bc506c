"""A quantized checkpoint as the plain state dict it stands for."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from hessquant.checkpoint.reader import CheckpointReader
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats import DIALECTS, dialect_of
from hessquant.formats.described import Settings
from hessquant.formats.dialect import Dialect, Layout
from hessquant.records import GridSpec, TensorInfo


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
        packed = [module for dialect in DIALECTS.values() for module in dialect.modules(reader.tensors)]
        if packed:
            raise SourceError(f"{packed[0]} is packed, but config.json has no quantization_config to read it by")
        return {name: reader.read(name) for name in reader.tensors}
    dialect = dialect_of(described)
    settings = dialect.read_settings(described)
    state: dict[str, Tensor] = {}
    parts: set[str] = set()
    for module in dialect.modules(reader.tensors):
        name = f"{module}.weight"
        decoded = decode_module(reader, module, dialect, settings)
        state[name] = decoded.T.contiguous() if name in transposed else decoded
        parts.update(dialect.part_names(module).values())
    return {name: reader.read(name) for name in reader.tensors if name not in parts} | state


def decode_module(reader: CheckpointReader, module: str, dialect: Dialect, settings: Settings) -> Tensor:
    """One quantized weight as float32 [outputs, inputs].

    Raises:
        SourceError: If the config says that the module is not quantized.
        CheckpointError: If its tensors are malformed.
    """
    stated = stated_of(module, settings)
    try:
        return dialect.dequantize(read_parts(reader, module, dialect), stated, settings.variant)
    except CheckpointError as error:
        raise CheckpointError(f"{module}: {error}") from error


def stated_of(module: str, settings: Settings) -> GridSpec:
    """How a packed module is quantized, by the config.

    Raises:
        SourceError: If the config says that it is not.
    """
    stated = settings.module(module)
    if stated is None:
        raise SourceError(f"{module} is packed, but quantization_config says that it is left in 16 bit")
    return stated


def read_parts(reader: CheckpointReader, module: str, dialect: Dialect) -> dict[str, Tensor]:
    """The parts of one packed weight that are there, by their short names."""
    return {part: reader.read(info.name) for part, info in parts_in(reader.tensors, module, dialect).items()}


def parts_in(tensors: Mapping[str, TensorInfo], module: str, dialect: Dialect) -> dict[str, TensorInfo]:
    """What the headers say of those parts."""
    return {part: tensors[name] for part, name in dialect.part_names(module).items() if name in tensors}


def layout_in(parts: Mapping[str, TensorInfo]) -> Layout:
    """Their layout."""
    return {part: (info.dtype, info.shape) for part, info in parts.items()}
