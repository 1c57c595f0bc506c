"""Which view of a checkpoint shows the tensors of its model in 16 bit: by how its config says that they are stored."""

from collections.abc import Mapping
from typing import Any

from hessquant.checkpoint.dequantized import DequantizedCheckpoint
from hessquant.checkpoint.header import read_json
from hessquant.checkpoint.reader import CheckpointReader, WeightSource
from hessquant.checkpoint.unpacked import quantization_of
from hessquant.errors import SourceError
from hessquant.formats import float8, mxfp4

MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt says it, in older checkpoints only there."""

_FORMS = float8.read_form, mxfp4.read_form

_OF_MODELOPT = ("F8_E4M3", "U8")


def weights_of(reader: CheckpointReader) -> WeightSource | None:
    """The tensors of a checkpoint as its model has them; None if they are on grids, or stored in no way known here.

    Args:
        reader: The checkpoint; itself, if nothing in it is quantized.

    Raises:
        SourceError: If its config says something of it that has no meaning, or parts of weights do not fit each other.
    """
    described = _description(reader)
    if described is None:
        return reader
    try:
        forms = (read_form(described) for read_form in _FORMS)
        form = next((form for form in forms if form is not None), None)
    except SourceError as error:
        raise SourceError(f"{reader.directory}: {error}") from error
    return None if form is None else DequantizedCheckpoint(reader, form)


def _description(reader: CheckpointReader) -> Mapping[str, Any] | None:
    """What is said of a checkpoint's quantization; a file of ModelOpt's counts where there are such tensors."""
    described, file = quantization_of(reader.config), reader.directory / MODELOPT_FILE
    packed = any(info.dtype in _OF_MODELOPT for info in reader.tensors.values())
    if described is not None or not packed or not file.is_file():
        return described
    said = read_json(file).get("quantization")
    if not isinstance(said, dict):
        raise SourceError(f"{file} says nothing of quantization")
    return {"quant_method": "modelopt", **said}
