"""Looking over a checkpoint without reading it into a model: what it holds, and what is wrong with it."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from hessquant.checkpoint.against_model import compare_with_model
from hessquant.checkpoint.audit import CHECKED, CHUNK_BYTES
from hessquant.checkpoint.decode import layout_in, parts_in, quantization_of
from hessquant.checkpoint.header import read_json
from hessquant.checkpoint.reader import CONFIG_FILE, ShardFiles, take_inventory
from hessquant.errors import SourceError
from hessquant.formats import DIALECTS, dialect_of
from hessquant.formats.described import Settings
from hessquant.formats.dialect import Dialect
from hessquant.models.source import ModelSource
from hessquant.records import GridSpec, InspectedWeight, Inspection, TensorInfo


def inspect_checkpoint(directory: Path, *, trust_remote_code: bool = False) -> Inspection:
    """Take stock of a checkpoint directory; what is wrong in it is reported, not raised.

    Args:
        directory: Where it lies.
        trust_remote_code: Allow code that comes with the model to run, to compare the checkpoint with its model.

    Raises:
        SourceError: If there is nothing to open, or it is quantized by a method that is not known.
    """
    inventory = take_inventory(directory)
    described = quantization_of(read_json(directory / CONFIG_FILE))
    tensors = inventory.tensors
    dialect = dialect_of(described) if described is not None else _unstated_dialect(tensors)
    settings = dialect.read_settings(described) if described is not None else None
    modules = dialect.modules(tensors)
    faults = [*inventory.faults, *_inventory_faults(tensors, modules, dialect, settings)]
    parts = {name for module in modules for name in dialect.part_names(module).values()}
    weights: list[InspectedWeight] = []
    untouched = tuple(info for name, info in tensors.items() if name not in parts)
    files = ShardFiles(directory)
    try:
        for module in modules:
            stated = settings.module(module) if settings is not None else None
            if settings is None or stated is None:
                continue
            weight, found = _inspect_weight(module, tensors, stated, dialect, settings.variant, files)
            weights.extend([weight] if weight is not None else [])
            faults.extend(f"{module}: {fault}" for fault in found)
        faults.extend(_non_finite(untouched, files))
    finally:
        files.close()
    # What is packed wrongly has been said; what else is wrong with the model can only be told of a whole inventory.
    unchecked = "its tensors do not fit together" if faults else ""
    if not faults:
        whole = {info.name: info for info in (*untouched, *map(_as_plain, weights))}
        source = ModelSource(directory.resolve().name, directory)
        compared = compare_with_model(source, whole, settings, trust_remote_code=trust_remote_code)
        faults, unchecked = [*compared.faults], compared.unchecked
    count = sum(weight.rows * weight.columns for weight in weights)
    return Inspection(
        directory=directory.resolve().name,
        format=settings.variant if settings is not None else "none",
        weights=tuple(weights),
        untouched=untouched,
        bits_per_weight=8 * sum(weight.bytes for weight in weights) / count if count else 0.0,
        total_bytes=sum(info.bytes for info in tensors.values()),
        faults=tuple(faults),
        unchecked=unchecked,
    )


def _as_plain(weight: InspectedWeight) -> TensorInfo:
    """A quantized weight as the tensor that it stands for, which is in no file."""
    return TensorInfo(weight.name, (weight.rows, weight.columns), "F16", 2 * weight.rows * weight.columns, "")


def _non_finite(untouched: Iterable[TensorInfo], files: ShardFiles) -> Iterator[str]:
    for info in untouched:
        if info.dtype not in CHECKED:
            continue
        bad = 0
        try:
            for piece in files.chunks(info, CHUNK_BYTES):
                bad += int((~torch.isfinite(piece)).sum())
        except SourceError as error:
            yield str(error)
            continue
        if bad:
            yield f"{info.name} has {bad} values that are NaN or Inf"


def _inspect_weight(
    module: str,
    tensors: Mapping[str, TensorInfo],
    stated: GridSpec,
    dialect: Dialect,
    variant: str,
    files: ShardFiles,
) -> tuple[InspectedWeight | None, list[str]]:
    """One packed weight and its faults; no weight where its parts do not fit together."""
    parts = parts_in(tensors, module, dialect)
    layout = layout_in(parts)
    fault = dialect.layout_fault(layout, stated)
    if fault:
        return None, [fault]
    rows, columns = dialect.weight_shape(layout, stated)
    weight = InspectedWeight(
        name=f"{module}.weight",
        rows=rows,
        columns=columns,
        grid=stated,
        bytes=sum(info.bytes for info in parts.values()),
    )
    values = {part: files.read(info) for part, info in parts.items()}
    return weight, list(dialect.value_faults(values, stated, variant))


def _unstated_dialect(tensors: Mapping[str, TensorInfo]) -> Dialect:
    """The dialect whose packed weights are there, where no config says which."""
    found = (dialect for dialect in DIALECTS.values() if dialect.modules(tensors))
    return next(found, DIALECTS["gptq"])


def _inventory_faults(
    tensors: Mapping[str, TensorInfo], modules: list[str], dialect: Dialect, settings: Settings | None
) -> Iterator[str]:
    """Contradictions between config and tensor names."""
    if settings is None and modules:
        yield f"{modules[0]} and {len(modules) - 1} more are packed, but {CONFIG_FILE} has no quantization_config"
    if settings is not None and not modules:
        yield f"{CONFIG_FILE} has a quantization_config, but no tensor is packed"
    for module in modules:
        if settings is not None and settings.module(module) is None:
            yield f"{module} is packed, but quantization_config says that it is left in 16 bit"
        if f"{module}.weight" in tensors:
            yield f"{module} is there twice: packed, and as {module}.weight"
    packed = set(modules)
    for name in tensors:
        module, _, part = name.rpartition(".")
        if settings is not None and part in dialect.parts and module not in packed:
            yield f"{name} belongs to a packed weight that is not there"
