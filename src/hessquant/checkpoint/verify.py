"""Re-reading what was written, by a decoder that shares nothing with the packer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hessquant.checkpoint.decode import decode_module, quantization_of
from hessquant.checkpoint.header import read_json
from hessquant.checkpoint.reader import CheckpointReader, TensorSource
from hessquant.checkpoint.shards import raw_bytes
from hessquant.checkpoint.sidecars import QUANTIZATION_FILE
from hessquant.checkpoint.writer import model_config, not_written
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, SourceError, VerificationError
from hessquant.formats import dialect_of
from hessquant.formats.described import description_of
from hessquant.formats.names import module_of
from hessquant.records import Plan


def verify(
    out: Path,
    config: Mapping[str, Any],
    quantized: Mapping[str, QuantizedWeight],
    source: TensorSource,
    plan: Plan,
) -> int:
    """Check that a written checkpoint decodes to exactly what was solved, and holds nothing else.

    Args:
        out: The written directory.
        config: What its `config.json` will hold; it must not be there yet.
        quantized: Weight per target name.
        source: What the untouched tensors must equal, byte for byte.
        plan: What was to be written.

    Returns:
        Quantized weights that were re-read and found equal.

    Raises:
        VerificationError: If anything differs; the message names the tensor.
    """
    try:
        with CheckpointReader(out, config) as written:
            _check_inventory(written, source, plan)
            _check_config(out, written, source, plan)
            _check_untouched(written, source, plan)
            verified = _check_quantized(written, quantized, plan)
            _check_words(written, plan)
            return verified
    except VerificationError:
        raise
    except (SourceError, CheckpointError) as error:
        raise VerificationError(f"what was written cannot be read back: {error}") from error


def _check_inventory(written: CheckpointReader, source: TensorSource, plan: Plan) -> None:
    dialect = dialect_of(quantization_of(written.config) or {})
    expected = set(source.tensors) - not_written(plan)
    for target in plan.targets:
        expected.discard(target.name)
        names = dialect.part_names(module_of(target.name))
        expected.update(names[part] for part in dialect.layout(target.rows, target.columns, target.grid))
    missing, surplus = expected - set(written.tensors), set(written.tensors) - expected
    if missing:
        raise VerificationError(f"{min(missing)} was not written ({len(missing)} tensors are missing)")
    if surplus:
        raise VerificationError(f"{min(surplus)} was written, but nothing asked for it ({len(surplus)} such tensors)")


def _check_config(out: Path, written: CheckpointReader, source: TensorSource, plan: Plan) -> None:
    described = quantization_of(written.config)
    if described is None:
        raise VerificationError("config.json does not describe the quantization")
    if described.get("quant_method") == "gptq" and read_json(out / QUANTIZATION_FILE) != described:
        raise VerificationError(f"{QUANTIZATION_FILE} and config.json describe the quantization differently")
    if written.config != {**model_config(source, plan), "quantization_config": described}:
        raise VerificationError("config.json differs from the source's in more than quantization_config")


def _check_words(written: CheckpointReader, plan: Plan) -> None:
    """That clients take every module for what it is, by what the config says."""
    described = quantization_of(written.config) or {}
    fault = dialect_of(described).read_settings(described).misread(description_of(plan))
    if fault is not None:
        raise VerificationError(f"the written config would be misread: {fault}")


def _check_untouched(written: CheckpointReader, source: TensorSource, plan: Plan) -> None:
    replaced = {target.name for target in plan.targets} | not_written(plan)
    for name, info in source.tensors.items():
        if name in replaced:
            continue
        copy = written.tensors[name]
        if (copy.dtype, copy.shape) != (info.dtype, info.shape):
            raise VerificationError(
                f"{name} is {copy.dtype} {list(copy.shape)}, but {info.dtype} {list(info.shape)} in the source"
            )
        if not torch.equal(raw_bytes(written.read(name)), raw_bytes(source.read(name))):
            raise VerificationError(f"{name} was to be copied, but its bytes differ from the source")


def _check_quantized(written: CheckpointReader, quantized: Mapping[str, QuantizedWeight], plan: Plan) -> int:
    described = quantization_of(written.config) or {}
    dialect = dialect_of(described)
    settings = dialect.read_settings(described)
    for target in plan.targets:
        module = module_of(target.name)
        decoded = decode_module(written, module, dialect, settings)
        solved = quantized[target.name].dequantize().cpu()
        if decoded.shape != solved.shape:
            raise VerificationError(f"{module} decodes to {list(decoded.shape)}, but {list(solved.shape)} was solved")
        if not torch.equal(decoded, solved):
            differing = int((decoded != solved).sum())
            raise VerificationError(f"{module}: {differing} of {solved.numel()} decoded values differ from the solved")
    return len(plan.targets)
