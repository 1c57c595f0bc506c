"""A quantized checkpoint against the model that its config names: what is missing, and what would be misread."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Never

from torch import nn
from transformers.pytorch_utils import Conv1D

from hessquant.checkpoint.stacks import restacked
from hessquant.checkpoint.unpacked import in_no_file
from hessquant.errors import SourceError
from hessquant.formats.described import Settings
from hessquant.models.flow import MIN_ROWS
from hessquant.models.probe import Probe, probe
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.records import TensorInfo


def compare_with_model(
    source: ModelSource,
    tensors: Mapping[str, TensorInfo],
    settings: Settings | None,
) -> list[str]:
    """Build the model that the config names, without weights, and hold the checkpoint against it.

    Args:
        source: The checkpoint.
        tensors: Its tensors by name, each quantized weight as one.
        settings: What its config says of quantization; None = nothing.

    Returns:
        One sentence per thing that is wrong.

    Raises:
        HessquantError: If there can be no comparison.
    """
    seen = probe(source, tensors)
    try:
        model = StreamedModel(source, _restacked(tensors, seen), _never_read).model
    except SourceError as error:
        return [str(error).removeprefix(f"{source.name}: ")]
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    return [] if settings is None else list(_taken_for_quantized(tensors, seen, linear, settings))


def _never_read(name: str) -> Never:
    raise AssertionError(f"{name} was to be read, and only its header is needed")


def _restacked(tensors: Mapping[str, TensorInfo], probed: Probe) -> dict[str, TensorInfo]:
    """The tensors as the model has them: turned where it stores [columns, rows], together where one holds several."""
    turned = {product.name for product in probed.products if product.transposed and not product.part_of}
    tensors = {
        name: replace(info, shape=info.shape[::-1]) if name in turned and not info.file else info
        for name, info in tensors.items()
    }
    return restacked(tensors, probed.products, lambda stack: in_no_file(stack.name, stack.shape))


def _taken_for_quantized(
    tensors: Mapping[str, TensorInfo], probed: Probe, linear: set[str], settings: Settings
) -> Iterator[str]:
    """Matrices in 16 bit that some client would take for quantized."""
    choosers = {product.name for product in probed.products if product.chooses}
    for name, info in tensors.items():
        parameter = probed.parameter_name(name)
        if info.file == "" or len(info.shape) != 2 or not name.endswith(".weight") or name in choosers:
            continue
        # What has fewer rows is a gate, which servers build unquantized without being told.
        if (parameter and parameter not in linear) or min(info.shape) < 1 or info.shape[0] < MIN_ROWS:
            continue
        names = {name.removesuffix(".weight"), (parameter or name).removesuffix(".weight")}
        is_head = bool(parameter) and probed.parameters[parameter].role != "weight"
        for reading in settings.readings:
            if not (is_head and reading.heads_apart) and all(reading.module(each) is not None for each in names):
                yield f"{name} is in 16 bit, but {reading.clients} would take it for quantized, by what the config says"
                break
