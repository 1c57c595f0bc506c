"""Re-reading what was written, by a decoder that shares nothing with the packer."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from hessquant.checkpoint.header import raw_bytes, read_json
from hessquant.checkpoint.output import QuantizedModel
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.sidecars import QUANTIZATION_FILE
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, quantization_of
from hessquant.errors import CheckpointError, SourceError, VerificationError
from hessquant.formats import dialect_of
from hessquant.formats.described import description_of
from hessquant.formats.dialect import Dialect
from hessquant.formats.names import module_of


def verify(out: Path, config: Mapping[str, Any], model: QuantizedModel) -> int:
    """Check that a written checkpoint decodes to exactly what was solved, and holds nothing else.

    Args:
        out: The written directory.
        config: What its `config.json` will hold; it must not be there yet.
        model: What was to be written.

    Returns:
        Quantized weights that were re-read and found equal.

    Raises:
        VerificationError: If anything differs; the message names the tensor.
    """
    try:
        with CheckpointReader(out, config) as written:
            described = quantization_of(config) or {}
            check_inventory(written.tensors.keys(), _expected_names(model, dialect_of(described)))
            _check_config(written, described, model)
            _check_untouched(written, model)
            unpacked = UnpackedCheckpoint(written)
            _check_quantized(unpacked, model)
            # That clients take every module for what it is, by what the config says.
            fault = unpacked.settings.misread(description_of(model.plan))
    except VerificationError:
        raise
    except (SourceError, CheckpointError) as error:
        raise VerificationError(f"what was written cannot be read back: {error}") from error
    if fault is not None:
        raise VerificationError(f"the written config would be misread: {fault}")
    return len(model.plan.targets)


def check_inventory(written: Collection[str], expected: Collection[str]) -> None:
    """Compare the names of the tensors, both ways.

    Raises:
        VerificationError: If they differ.
    """
    missing, surplus = set(expected) - set(written), set(written) - set(expected)
    if missing:
        raise VerificationError(f"{min(missing)} was not written ({len(missing)} tensors are missing)")
    if surplus:
        raise VerificationError(f"{min(surplus)} was written, but nothing asked for it ({len(surplus)} such tensors)")


def _expected_names(model: QuantizedModel, dialect: Dialect) -> set[str]:
    expected = set(model.source.tensors) - model.not_written
    for target in model.plan.targets:
        expected.discard(target.name)
        names = dialect.part_names(module_of(target.name))
        expected.update(names[part] for part in dialect.layout(target.rows, target.columns, target.grid))
    return expected


def _check_config(written: CheckpointReader, described: Mapping[str, Any], model: QuantizedModel) -> None:
    if described["quant_method"] == "gptq" and read_json(written.directory / QUANTIZATION_FILE) != described:
        raise VerificationError(f"{QUANTIZATION_FILE} and config.json describe the quantization differently")
    if written.config != {**model.config, "quantization_config": described}:
        raise VerificationError("config.json differs from the source's in more than quantization_config")


def _check_untouched(written: CheckpointReader, model: QuantizedModel) -> None:
    replaced = {target.name for target in model.plan.targets} | model.not_written
    for name, info in model.source.tensors.items():
        if name in replaced:
            continue
        copy = written.tensors[name]
        if (copy.dtype, copy.shape) != (info.dtype, info.shape):
            raise VerificationError(
                f"{name} is {copy.dtype} {list(copy.shape)}, but {info.dtype} {list(info.shape)} in the source"
            )
        if not torch.equal(raw_bytes(written.read(name)), raw_bytes(model.source.read(name))):
            raise VerificationError(f"{name} was to be copied, but its bytes differ from the source")


def _check_quantized(written: UnpackedCheckpoint, model: QuantizedModel) -> None:
    for target in model.plan.targets:
        module = module_of(target.name)
        decoded, solved = written.decode(target.name), model.weights[target.name].dequantize()
        if decoded.shape != solved.shape:
            raise VerificationError(f"{module} decodes to {list(decoded.shape)}, but {list(solved.shape)} was solved")
        if not torch.equal(decoded, solved):
            differing = int((decoded != solved).sum())
            raise VerificationError(f"{module}: {differing} of {solved.numel()} decoded values differ from the solved")
