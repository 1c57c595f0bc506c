"""Writing the quantized checkpoint: shards one at a time, then everything else, then what makes it look complete."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from hessquant.checkpoint.header import DTYPE_BYTES
from hessquant.checkpoint.output import RUN_MARK
from hessquant.checkpoint.reader import CONFIG_FILE, INDEX_FILE, TensorSource
from hessquant.checkpoint.shards import Unit, plan_shards, write_shard
from hessquant.checkpoint.sidecars import QUANTIZATION_FILE, copy_sidecars, portable
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError
from hessquant.files import fsync_directory, replacing
from hessquant.formats import DIALECTS
from hessquant.formats.described import description_of
from hessquant.formats.dialect import Dialect
from hessquant.formats.names import module_of
from hessquant.records import Plan, Target, TensorInfo

GGUF_FILE = "model.gguf"
"""The one file of a model in the gguf format."""


def write_checkpoint(
    out: Path,
    source: TensorSource,
    source_directory: Path,
    plan: Plan,
    quantized: Mapping[str, QuantizedWeight],
    output: Config,
    *,
    solved_with: Config | None,
    reports: Collection[str],
    run: str,
    version: str,
) -> dict[str, Any]:
    """Write the source with its targets replaced by quantized weights.

    A weight of `quantized` is asked for when its turn has come, so a mapping that loads from disk keeps memory at one
    weight; asymmetric ones are asked for twice. Every other tensor is copied byte for byte, and so are the files that a
    user of the checkpoint may need (`sidecars`). `config.json` is not written: `complete` does that when the rest has
    been verified, and a directory without it is not a checkpoint to any reader.

    Args:
        out: Directory to write; made if need be.
        source: The checkpoint that the untouched tensors and the config come from.
        source_directory: Directory whose other files (tokenizer, chat template, code ...) are copied.
        plan: What was decided.
        quantized: Weight per target name.
        output: Says the format and the size of its files.
        solved_with: Settings that the weights were solved with; None = not known.
        reports: Names of files that are written anew, not copied.
        run: The run's identity; the directory carries it until it is complete.
        version: Version to sign the checkpoint with.

    Returns:
        What `config.json` will hold.

    Raises:
        CheckpointError: If a weight has no place in the format, or the disk is full or fails.
    """
    targets = {target.name: target for target in plan.targets}
    dialect = DIALECTS[output.format]
    _check_targets(targets, quantized, dialect)
    variant = dialect.choose_variant(quantized[target.name] for target in plan.targets if not target.grid.symmetric)
    described = dialect.describe(description_of(plan), solved_with, variant, version)
    shards = plan_shards(_units(source, plan, dialect), output.shard_bytes)

    def make(unit: Unit) -> dict[str, Tensor]:
        if unit.source in targets:
            try:
                parts = dialect.pack(quantized[unit.source], variant)
            except CheckpointError as error:
                raise CheckpointError(f"{unit.source}: {error}") from error
            names = dialect.part_names(module_of(unit.source))
            return {names[part]: tensor for part, tensor in parts.items()}
        return {unit.source: source.read(unit.source)}

    begin(out, run)
    with writing(out):
        for file, units in shards.items():
            write_shard(out / file, units, make)
        copy_sidecars(source_directory, out, reports)
        if output.format == "gptq":
            _write_json(out / QUANTIZATION_FILE, described)
        if len(shards) > 1:
            _write_json(out / INDEX_FILE, _index(shards))
    return {**model_config(source, plan), "quantization_config": described}


def model_config(source: TensorSource, plan: Plan) -> dict[str, Any]:
    """What `config.json` will say of the model: the source's, untied where the head gets a weight of its own.

    Where the source lay when it was saved is left out.
    """
    config = portable(source.config)
    return _untied(config) if plan.unties_head else config


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _untied(value) for name, value in config.items() if name == "text_config"}
    # Stated even where it was not: some classes tie by default.
    return {**config, **inner, "tie_word_embeddings": False}


def begin(out: Path, run: str) -> None:
    """Make a directory this run's; it does not pass for a checkpoint from now on.

    Raises:
        CheckpointError: If the disk is full or fails.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / RUN_MARK) as stream:
            stream.write(run.encode())
        withdraw(out)


def write_text(path: Path, text: str) -> None:
    """Write a text file beside the checkpoint.

    Raises:
        CheckpointError: If the disk is full or fails.
    """
    with writing(path), replacing(path) as stream:
        stream.write(text.encode())


def complete(out: Path, config: Mapping[str, Any]) -> None:
    """Make a written and verified directory a checkpoint: `config.json` appears, by rename, as the last of its files.

    Raises:
        CheckpointError: If the disk is full or fails.
    """
    with _completing(out):
        _write_json(out / CONFIG_FILE, config)


def complete_gguf(out: Path, draft: Path) -> None:
    """Make a written and verified draft the model of its directory: it gets its name.

    Raises:
        CheckpointError: If the disk fails.
    """
    with _completing(out):
        draft.replace(out / GGUF_FILE)
        fsync_directory(out)


@contextmanager
def _completing(out: Path) -> Iterator[None]:
    """Inside, what makes a directory pass for a checkpoint appears; where anything fails, it goes again."""
    with writing(out):
        try:
            yield
            (out / RUN_MARK).unlink()
        except OSError:
            withdraw(out)
            raise


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell an operating system's error as one of ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: writing failed: {error.strerror or error}") from error


def _check_targets(
    targets: Mapping[str, Target],
    quantized: Mapping[str, QuantizedWeight],
    dialect: Dialect,
) -> None:
    for name, target in targets.items():
        if name not in quantized:
            raise CheckpointError(f"{name}: planned as a target, but there is no quantized weight for it")
        fault = dialect.target_fault(target.rows, target.columns, target.grid)
        if fault:
            raise CheckpointError(f"{name}: {fault}")


def _units(source: TensorSource, plan: Plan, dialect: Dialect) -> Iterator[Unit]:
    # Targets without a tensor of their own, last: a head that was tied to the embedding, matrices of a stack.
    targets, left_out = {target.name: target for target in plan.targets}, not_written(plan)
    for name in dict.fromkeys([*source.tensors, *targets]):
        if name in left_out:
            continue
        target = targets.get(name)
        if target is None:
            yield Unit(name, (source.tensors[name],))
            continue
        names = dialect.part_names(module_of(name))
        layout = dialect.layout(target.rows, target.columns, target.grid)
        yield Unit(
            name,
            tuple(
                TensorInfo(names[part], shape, dtype, math.prod(shape) * DTYPE_BYTES[dtype], "")
                for part, (dtype, shape) in layout.items()
            ),
        )


def not_written(plan: Plan) -> set[str]:
    """Tensors of the source that targets take the place of: stacks that are taken apart, other names of a target."""
    return {target.part_of for target in plan.targets} - {""} | set(plan.aliases)


def _index(shards: Mapping[str, list[Unit]]) -> dict[str, Any]:
    weight_map = {info.name: file for file, units in shards.items() for unit in units for info in unit.tensors}
    total = sum(unit.bytes for units in shards.values() for unit in units)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    with replacing(path) as stream:
        stream.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def withdraw(out: Path) -> None:
    """Take away what makes a written directory pass for a sound checkpoint."""
    for name in (CONFIG_FILE, GGUF_FILE):
        (out / name).unlink(missing_ok=True)
