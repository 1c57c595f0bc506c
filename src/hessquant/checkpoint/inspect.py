"""Looking over a checkpoint without reading it into a model: what it holds, and what is wrong with it."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from gguf import ReaderTensor

from hessquant.checkpoint.against_model import compare_with_model
from hessquant.checkpoint.audit import CHUNK_BYTES
from hessquant.checkpoint.dequantized import DequantizedCheckpoint
from hessquant.checkpoint.gguf_reader import decoded, form_of, open_gguf
from hessquant.checkpoint.opening import stated_form
from hessquant.checkpoint.reader import CONFIG_FILE, CheckpointReader, WeightSource
from hessquant.checkpoint.unpacked import in_no_file, packed_weight, parts_in, quantization_of, read_parts
from hessquant.errors import CheckpointError, HessquantError, SourceError
from hessquant.formats import DIALECTS, READABLE, dialect_of
from hessquant.formats.described import Settings
from hessquant.formats.dialect import Dialect
from hessquant.formats.gguf_blocks import BLOCK, BLOCK_TYPES
from hessquant.formats.stored import Form
from hessquant.models.source import ModelSource
from hessquant.records import FLOATING, GridSpec, TensorInfo
from hessquant.results import InspectedWeight, Inspection


def inspect_checkpoint(directory: Path, *, trust_remote_code: bool = False) -> Inspection:
    """Take stock of a checkpoint directory; what is wrong in it is reported, not raised.

    Args:
        directory: Where it lies.
        trust_remote_code: Allow code that comes with the model to run, to compare the checkpoint with its model.

    Raises:
        SourceError: If there is nothing to open, or it is quantized by a method that is not known.
    """
    with CheckpointReader(directory, faulty=True) as reader:
        form = stated_form(reader)
        if form is not None:
            return _inspect_form(reader, form, trust_remote_code=trust_remote_code)
        described, tensors = quantization_of(reader.config), reader.tensors
        dialect = dialect_of(described, READABLE) if described is not None else _unstated_dialect(tensors)
        settings = dialect.read_settings(described) if described is not None else None
        modules = dialect.modules(tensors)
        faults = [*reader.faults, *_inventory_faults(tensors, modules, dialect, settings)]
        weights: list[InspectedWeight] = []
        if settings is not None:
            weights, packing_faults = _inspect_weights(reader, modules, dialect, settings)
            faults.extend(packing_faults)
        parts = {name for module in modules for name in dialect.part_names(module).values()}
        untouched = tuple(info for name, info in tensors.items() if name not in parts)
        faults.extend(_non_finite(untouched, reader))
    # What is packed wrongly has been said; what else is wrong with the model can only be told of a whole inventory.
    unchecked, name = "its tensors do not fit together" if faults else "", directory.resolve().name
    if not faults:
        stand_ins = (in_no_file(weight.name, (weight.rows, weight.columns)) for weight in weights)
        whole = {info.name: info for info in (*untouched, *stand_ins)}
        faults, unchecked = _compared(ModelSource(name, directory, trust_remote_code), whole, settings)
    return Inspection(
        directory=name,
        format=settings.variant if settings is not None else "none",
        weights=tuple(weights),
        untouched=untouched,
        bits_per_weight=_mean_bits(weights),
        total_bytes=sum(info.bytes for info in tensors.values()),
        faults=tuple(faults),
        unchecked=unchecked,
    )


def _inspect_form(reader: CheckpointReader, form: Form, *, trust_remote_code: bool) -> Inspection:
    """Take stock of a checkpoint whose weights are on no grid, such as one in FP8."""
    name, stored = reader.directory.resolve().name, reader.tensors
    try:
        seen = DequantizedCheckpoint(reader, form)
    except SourceError as error:
        faults, weights, untouched, unchecked = [*reader.faults, str(error)], [], tuple(stored.values()), ""
    else:
        faults = [*reader.faults, *_non_finite(seen.tensors.values(), seen)]
        weights = [_dequantized(seen, each) for each in sorted(seen.form.dequantized)]
        parts = {part for each in seen.form.dequantized for part in seen.parts(each)}
        untouched = tuple(info for each, info in stored.items() if each not in parts)
        unchecked = "its tensors do not fit together" if faults else ""
        if not faults:
            source = ModelSource(name, reader.directory, trust_remote_code)
            faults, unchecked = _compared(source, seen.tensors, None)
    size = sum(info.bytes for info in stored.values())
    return Inspection(name, form.title, tuple(weights), untouched, _mean_bits(weights), size, tuple(faults), unchecked)


def _dequantized(seen: DequantizedCheckpoint, name: str) -> InspectedWeight:
    """One weight that is on no grid; a stack counts as one matrix."""
    shape = seen.tensors[name].shape
    size = sum(seen.stored.tensors[part].bytes for part in seen.parts(name))
    return InspectedWeight(name, prod(shape[:-1]), prod(shape[-1:]), None, size)


def _compared(
    source: ModelSource, tensors: Mapping[str, TensorInfo], settings: Settings | None
) -> tuple[list[str], str]:
    """What is wrong with whole tensors as those of their model, and why that is not known."""
    try:
        return compare_with_model(source, tensors, settings), ""
    except HessquantError as error:
        return [], str(error)


def inspect_gguf(file: Path) -> Inspection:
    """Take stock of a GGUF file; what is wrong in it is reported, not raised.

    Raises:
        SourceError: If it is not a whole GGUF file.
    """
    tensors, weights, untouched, faults = open_gguf(file).tensors, [], [], []
    for tensor in tensors:
        (kind, shape), size = form_of(tensor), int(tensor.n_bytes)
        if kind not in BLOCK_TYPES or len(shape) != 2:
            untouched.append(TensorInfo(tensor.name, shape, kind.name, size, file.name))
            continue
        weights.append(InspectedWeight(tensor.name, *shape, GridSpec(BLOCK_TYPES[kind], BLOCK), size))
        faults.extend(_block_faults(tensor))
    return Inspection(
        directory=file.name,
        format="gguf" if weights else "none",
        weights=tuple(weights),
        untouched=tuple(untouched),
        bits_per_weight=_mean_bits(weights),
        total_bytes=sum(int(tensor.n_bytes) for tensor in tensors),
        faults=tuple(faults),
    )


def _block_faults(tensor: ReaderTensor) -> list[str]:
    try:
        values = decoded(tensor)
    except CheckpointError as error:
        return [f"{tensor.name}: {error}"]
    bad = int((~torch.isfinite(values)).sum())
    return [f"{tensor.name} has {bad} values that are not finite"] if bad else []


def _mean_bits(weights: list[InspectedWeight]) -> float:
    count = sum(weight.rows * weight.columns for weight in weights)
    return 8 * sum(weight.bytes for weight in weights) / count if count else 0.0


def _inspect_weights(
    reader: CheckpointReader, modules: Iterable[str], dialect: Dialect, settings: Settings
) -> tuple[list[InspectedWeight], list[str]]:
    """The packed weights whose parts fit together, and what is wrong with any."""
    weights, faults = [], []
    for module in modules:
        stated, parts = settings.module(module), parts_in(reader.tensors, module, dialect)
        if stated is None:
            continue
        try:
            packed = packed_weight(parts, module, stated, dialect)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        size = sum(info.bytes for info in parts.values())
        weights.append(InspectedWeight(f"{module}.weight", packed.rows, packed.columns, stated, size))
        values = read_parts(reader, module, dialect)
        faults.extend(f"{module}: {fault}" for fault in dialect.value_faults(values, stated, settings.variant))
    return weights, faults


def _non_finite(untouched: Iterable[TensorInfo], reader: WeightSource) -> Iterator[str]:
    for info in untouched:
        if info.dtype not in FLOATING:
            continue
        try:
            bad = sum(int((~torch.isfinite(piece)).sum()) for piece in reader.chunks(info.name, CHUNK_BYTES))
        except SourceError as error:
            yield str(error)
            continue
        if bad:
            yield f"{info.name} has {bad} values that are NaN or Inf"


def _unstated_dialect(tensors: Mapping[str, TensorInfo]) -> Dialect:
    """The dialect whose packed weights are there, where no config says which."""
    return next((dialect for dialect in DIALECTS.values() if dialect.modules(tensors)), DIALECTS["gptq"])


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
