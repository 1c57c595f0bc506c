"""Which view of a checkpoint shows the tensors of its model in 16 bit: by how its config says that they are stored."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

from hessquant.checkpoint.decoded import DecodedCheckpoint
from hessquant.checkpoint.dequantized import DequantizedCheckpoint
from hessquant.checkpoint.gguf_source import GgufCheckpoint, GgufFile
from hessquant.checkpoint.header import read_json
from hessquant.checkpoint.reader import CheckpointReader, StoredFiles, WeightSource
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, quantization_of, refuse_leftovers
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats import float8, mxfp4
from hessquant.formats.stored import Form, is_of_activations
from hessquant.models.gguf import read_index
from hessquant.models.probe import probe
from hessquant.models.source import ModelSource

MODELOPT_FILE = "hf_quant_config.json"
"""Where ModelOpt says it, in older checkpoints only there."""

_FORMS = float8.read_form, mxfp4.read_form

_OF_MODELOPT = ("F8_E4M3", "U8")


def open_files(directory: Path) -> AbstractContextManager[StoredFiles]:
    """The files of weights of a model: those in its directory, or the GGUF file that the directory describes.

    Raises:
        SourceError: If one is missing, incomplete or contradicts the others, or is not what was described.
    """
    index = read_index(directory)
    return CheckpointReader(directory) if index is None else GgufFile(directory, index)


def weights_of(reader: StoredFiles) -> WeightSource | None:
    """The tensors of a checkpoint as its model has them; None if they are on grids, or stored in no way known here.

    Args:
        reader: The checkpoint; itself, if nothing in it is quantized.

    Raises:
        SourceError: If its config says something of it that has no meaning, or parts of weights do not fit each other.
    """
    if isinstance(reader, GgufFile):
        return GgufCheckpoint(reader)
    if _description(reader) is None:
        return reader
    form = stated_form(reader)
    return None if form is None else DequantizedCheckpoint(reader, form)


def stated_form(reader: StoredFiles) -> Form | None:
    """The form that a checkpoint's config says its weights are in; None if it says nothing, or speaks of grids.

    Raises:
        SourceError: If it says something that has no meaning.
    """
    described = _description(reader)
    try:
        forms = (read_form(described) for read_form in _FORMS if described is not None)
        return next((form for form in forms if form is not None), None)
    except SourceError as error:
        raise SourceError(f"{reader.directory}: {error}") from error


def requantized(source: ModelSource, reader: StoredFiles, inputs: Mapping[str, Tensor] | None = None) -> WeightSource:
    """The tensors of a checkpoint in one of the dialects, decoded as its model has them.

    Args:
        source: The model, which is run without weights to see how it has them.
        reader: Its checkpoint.
        inputs: Of its forward pass, for a model that takes more than text.

    Raises:
        SourceError: If it is in no dialect that can be decoded, or parts of weights do not fit each other.
        PlanError: If the model's forward pass fails.
    """
    try:
        unpacked = UnpackedCheckpoint(reader)
    except CheckpointError as error:
        raise SourceError(f"{reader.directory}: {error}; fetch it again") from error
    refuse_leftovers(unpacked)
    seen = probe(source, unpacked.tensors, inputs=inputs)
    known = seen.buffers | {name for name in unpacked.tensors if seen.parameter_of(name) is not None}
    left = [name for name in unpacked.tensors if is_of_activations(name) and name not in known]
    return DecodedCheckpoint(unpacked, seen.products, left)


def _description(reader: StoredFiles) -> Mapping[str, Any] | None:
    """What is said of a checkpoint's quantization; a file of ModelOpt's counts where there are such tensors."""
    described, file = quantization_of(reader.config), reader.directory / MODELOPT_FILE
    packed = any(info.dtype in _OF_MODELOPT for info in reader.tensors.values())
    if described is not None or not packed or not file.is_file():
        return described
    said = read_json(file).get("quantization")
    if not isinstance(said, dict):
        raise SourceError(f"{file} says nothing of quantization")
    return {"quant_method": "modelopt", **said}
