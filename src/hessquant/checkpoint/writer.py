"""Writing the quantized checkpoint: shards one at a time, then everything else, then what makes it look complete."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from hessquant.checkpoint.files import replacing
from hessquant.checkpoint.reader import CONFIG_FILE, DTYPE_BYTES, INDEX_FILE, CheckpointReader
from hessquant.checkpoint.shards import Unit, plan_shards, write_shard
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, OutputError
from hessquant.formats import gptq
from hessquant.formats.gptq_config import quantization_config
from hessquant.records import Plan, Target, TensorInfo

QUANTIZATION_FILE = "quantize_config.json"
"""Where GPTQ readers older than `config.json`'s `quantization_config` look."""

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_WRITTEN_ANEW = {Path(CONFIG_FILE), Path(QUANTIZATION_FILE)}


def refuse_unless_empty(out: Path) -> None:
    """Check that an output directory can be made, or is there and empty.

    Raises:
        OutputError: If it holds anything, is no directory, or cannot be written to.
    """
    nearest = out
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise OutputError(f"{nearest} is a file, so {out} cannot be a directory; choose another output")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{nearest} cannot be written to; choose another output or change its permissions")
    if nearest == out:
        held = next(out.iterdir(), None)
        if held is not None:
            raise OutputError(f"{out} is not empty (it holds {held.name}); remove it or choose another output")


def write_checkpoint(
    out: Path,
    source: CheckpointReader,
    source_directory: Path,
    plan: Plan,
    config: Config,
    quantized: Mapping[str, QuantizedWeight],
    *,
    shard_bytes: int = 4_000_000_000,
    version: str,
) -> int:
    """Write the source with its targets replaced by quantized weights.

    A weight of `quantized` is asked for when its turn has come, so a mapping that loads from disk keeps memory at one
    weight; asymmetric ones are asked for twice. Every other tensor and file is copied byte for byte. `config.json`
    comes last, by rename: a directory without it is not a checkpoint to any reader.

    Args:
        out: Directory to write; made if need be.
        source: The checkpoint that the untouched tensors and the config come from.
        source_directory: Directory whose other files (tokenizer, chat template, code ...) are copied.
        plan: What was decided.
        config: Settings of the run.
        quantized: Weight per target name.
        shard_bytes: Largest size of a file, unless one weight alone is larger.
        version: Version to sign the checkpoint with.

    Returns:
        Bytes of all tensors written.

    Raises:
        OutputError: If `out` holds anything or cannot be made.
        CheckpointError: If a weight has no place in the format, or the disk is full or fails.
    """
    refuse_unless_empty(out)
    targets = {target.name: target for target in plan.targets}
    _check_targets(targets, source, quantized)
    checkpoint_format = gptq.choose_checkpoint_format(quantized[t.name] for t in plan.targets if not t.symmetric)
    described = quantization_config(plan, config, checkpoint_format, version)
    shards = plan_shards(_units(source, targets), shard_bytes)

    def make(unit: Unit) -> dict[str, Tensor]:
        if unit.source in targets:
            return gptq.pack(quantized[unit.source], gptq.module_of(unit.source), checkpoint_format)
        return {unit.source: source.read(unit.source)}

    try:
        out.mkdir(parents=True, exist_ok=True)
        for file, units in shards.items():
            write_shard(out / file, units, make)
        _copy_sidecars(source_directory, out)
        _write_json(out / QUANTIZATION_FILE, described)
        if len(shards) > 1:
            _write_json(out / INDEX_FILE, _index(shards))
        _write_json(out / CONFIG_FILE, {**source.config, "quantization_config": described})
    except OSError as error:
        raise CheckpointError(f"{error.filename or out}: writing failed: {error.strerror or error}") from error
    return sum(unit.bytes for units in shards.values() for unit in units)


def _check_targets(
    targets: Mapping[str, Target], source: CheckpointReader, quantized: Mapping[str, QuantizedWeight]
) -> None:
    for name, target in targets.items():
        if name not in source.tensors:
            raise CheckpointError(f"{name}: planned as a target, but the source has no such tensor")
        if name not in quantized:
            raise CheckpointError(f"{name}: planned as a target, but there is no quantized weight for it")
        fault = gptq.shape_fault(target.rows, target.columns, target.bits, target.group_size)
        if fault:
            raise CheckpointError(f"{name}: {fault}")


def _units(source: CheckpointReader, targets: Mapping[str, Target]) -> Iterator[Unit]:
    for name, info in source.tensors.items():
        target = targets.get(name)
        if target is None:
            yield Unit(name, (info,))
            continue
        names = gptq.part_names(gptq.module_of(name))
        layout = gptq.layout(target.rows, target.columns, target.bits, target.group_size)
        yield Unit(
            name,
            tuple(
                TensorInfo(names[part], shape, dtype, math.prod(shape) * DTYPE_BYTES[dtype], "")
                for part, (dtype, shape) in layout.items()
            ),
        )


def _index(shards: Mapping[str, list[Unit]]) -> dict[str, Any]:
    weight_map = {info.name: file for file, units in shards.items() for unit in units for info in unit.tensors}
    total = sum(unit.bytes for units in shards.values() for unit in units)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as stream:
        stream.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _copy_sidecars(source: Path, out: Path) -> None:
    """Copy every file that is neither weights, nor hidden, nor written anew."""
    for path in _sidecars(source, out.resolve()):
        with path.open("rb") as original, replacing(out / path.relative_to(source)) as copy:
            shutil.copyfileobj(original, copy)


def _sidecars(source: Path, out: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(source):
        here = Path(folder)
        # Pruned in place: hidden folders, and the output when it lies inside the source.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and (here / name).resolve() != out)
        for file in sorted(files):
            path = here / file
            weights = path.suffix in _WEIGHT_SUFFIXES or file.endswith(".index.json")
            if not weights and not file.startswith(".") and path.relative_to(source) not in _WRITTEN_ANEW:
                yield path


def withdraw(out: Path) -> None:
    """Take a written checkpoint's config.json away, so that it does not pass for a sound one."""
    (out / CONFIG_FILE).unlink(missing_ok=True)
