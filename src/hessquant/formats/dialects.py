"""The dialects there are, by the name that `--format` takes and by the method that a config names."""

from collections.abc import Mapping
from typing import Any, get_args

from hessquant.config import Format
from hessquant.errors import SourceError
from hessquant.formats import (
    compressed_tensors,
    compressed_tensors_config,
    gptq,
    gptq_check,
    gptq_config,
)
from hessquant.formats.dialect import Dialect

DIALECTS: Mapping[Format, Dialect] = {
    "gptq": Dialect(
        name="gptq",
        quant_method="gptq",
        parts=gptq.PARTS,
        variants=get_args(gptq.CheckpointFormat),
        target_fault=gptq.target_fault,
        layout=gptq.layout,
        choose_variant=gptq.choose_checkpoint_format,
        describe=gptq_config.describe,
        read_settings=gptq_config.read_settings,
        pack=gptq.pack,
        layout_fault=gptq.layout_fault,
        weight_shape=gptq.weight_shape,
        dequantize=gptq.dequantize,
        unpack=gptq.unpack,
        value_faults=gptq_check.value_faults,
    ),
    "compressed-tensors": Dialect(
        name="compressed-tensors",
        quant_method="compressed-tensors",
        parts=compressed_tensors.PARTS,
        variants=(compressed_tensors.VARIANT,),
        target_fault=compressed_tensors.target_fault,
        layout=compressed_tensors.layout,
        choose_variant=compressed_tensors.choose_variant,
        describe=compressed_tensors_config.describe,
        read_settings=compressed_tensors_config.read_settings,
        pack=compressed_tensors.pack,
        layout_fault=compressed_tensors.layout_fault,
        weight_shape=compressed_tensors.weight_shape,
        dequantize=compressed_tensors.dequantize,
        unpack=compressed_tensors.unpack,
        value_faults=compressed_tensors.value_faults,
    ),
}


def dialect_of(described: Mapping[str, Any]) -> Dialect:
    """The dialect that a `quantization_config` is in.

    Raises:
        SourceError: If it is none of ours.
    """
    method = described.get("quant_method")
    for dialect in DIALECTS.values():
        if dialect.quant_method == method:
            return dialect
    known = ", ".join(dialect.quant_method for dialect in DIALECTS.values())
    raise SourceError(f"quant_method is {method!r}; only {known} checkpoints can be decoded")
