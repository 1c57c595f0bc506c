"""Whole models in memory, for comparisons; Hessquant itself has one block there at a time."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hessquant.checkpoint.opening import open_files
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, quantization_of, refuse_undescribed
from hessquant.evaluation import CHUNK, NextTokenLogits
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.pipeline.evaluating import stream_checkpoint
from hessquant.records import TokenWindow


def load_model(source: ModelSource, inputs: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """A model or a quantized checkpoint in float32, in eval mode, without gradients.

    Args:
        source: The model.
        inputs: Of its forward pass, for a model that takes more than text.
    """
    with open_files(source.directory) as reader:
        streamed, _ = stream_checkpoint(source, reader, inputs)
        return filled(streamed)


def build(source: ModelSource, state: Mapping[str, Tensor]) -> PreTrainedModel:
    """The same of the tensors of a checkpoint by their names there."""
    return filled(StreamedModel(source, state, state.__getitem__))


def filled(streamed: StreamedModel) -> PreTrainedModel:
    """A model with all of its weights."""
    streamed.load(list(streamed.model.state_dict()))
    return streamed.model


def decoded_state(reader: CheckpointReader) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, quantized weights decoded to float32 [outputs, inputs] under `X.weight`."""
    if quantization_of(reader.config) is None:
        refuse_undescribed(reader)
        return {name: reader.read(name) for name in reader.tensors}
    checkpoint = UnpackedCheckpoint(reader)
    packed = checkpoint.packed
    return {name: checkpoint.decode(name) if name in packed else checkpoint.read(name) for name in checkpoint.tensors}


def logits_of(model: nn.Module, windows: Sequence[TokenWindow]) -> NextTokenLogits:
    """What `hessquant.evaluation` takes of a model: its logits on each of the windows."""

    def of_window(index: int) -> Sequence[Tensor]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([windows[index].ids]), use_cache=False).logits[0, :-1]
        return torch.split(logits, CHUNK)

    return of_window
