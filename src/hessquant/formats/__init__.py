"""On-disk forms of quantized weights: all there are, by the names that `--format` takes; dialects by a config, too."""

from collections.abc import Mapping
from typing import Any

from hessquant.errors import SourceError
from hessquant.formats import gguf_blocks
from hessquant.formats.awq import Awq
from hessquant.formats.compressed_tensors import CompressedTensors
from hessquant.formats.dialect import Dialect, Output
from hessquant.formats.floats import Mxfp4, Nvfp4
from hessquant.formats.gptq import Gptq

DIALECTS: Mapping[str, Dialect] = {
    "gptq": Gptq(),
    "compressed-tensors": CompressedTensors(),
    "nvfp4": Nvfp4(),
    "mxfp4": Mxfp4(),
}
"""By the name that `--format` takes."""

READABLE: Mapping[str, Dialect] = {**DIALECTS, "awq": Awq()}
"""All that a source may be in; AWQ is not written."""

OUTPUTS: Mapping[str, Output] = {**DIALECTS, "gguf": gguf_blocks}


def dialect_of(described: Mapping[str, Any], known: Mapping[str, Dialect] = DIALECTS) -> Dialect:
    """The dialect that a `quantization_config` is in.

    Args:
        described: The config.
        known: Those that it may be in, by `quant_method`.

    Raises:
        SourceError: If it is none of them.
    """
    method = described.get("quant_method")
    readers = [dialect for dialect in known.values() if dialect.method == method]
    if not readers:
        methods = dict.fromkeys(dialect.method for dialect in known.values())
        raise SourceError(f"quant_method is {method!r}; only {', '.join(methods)} checkpoints can be decoded")
    # Some say it of each group only; all groups are in one format, or the dialect refuses one.
    groups = described.get("config_groups")
    stated = [described, *(groups.values() if isinstance(groups, dict) else ())]
    layouts = [said["format"] for said in stated if isinstance(said, dict) and isinstance(said.get("format"), str)]
    return next((dialect for layout in layouts for dialect in readers if layout in dialect.variants), readers[0])
