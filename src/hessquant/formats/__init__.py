"""On-disk forms of quantized weights: all there are, by the names that `--format` takes; dialects by a config, too."""

from collections.abc import Mapping
from typing import Any

from hessquant.errors import SourceError
from hessquant.formats import gguf_blocks
from hessquant.formats.awq import Awq
from hessquant.formats.compressed_tensors import CompressedTensors
from hessquant.formats.dialect import Dialect, Output
from hessquant.formats.gptq import Gptq

DIALECTS: Mapping[str, Dialect] = {"gptq": Gptq(), "compressed-tensors": CompressedTensors()}
"""By names that are those of `quant_method` as well."""

READ_ONLY: Mapping[str, Dialect] = {"awq": Awq()}
"""Dialects that are read as a source and not written."""

OUTPUTS: Mapping[str, Output] = {**DIALECTS, "gguf": gguf_blocks}


def dialect_of(described: Mapping[str, Any]) -> Dialect:
    """The dialect that a `quantization_config` is in.

    Raises:
        SourceError: If it is none of ours.
    """
    method = described.get("quant_method")
    known = {**DIALECTS, **READ_ONLY}
    for name, dialect in known.items():
        if name == method:
            return dialect
    raise SourceError(f"quant_method is {method!r}; only {', '.join(known)} checkpoints can be decoded")
