"""A quantized checkpoint against the model that its config names: what is missing, and what would be misread."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Never

from torch import nn
from transformers.pytorch_utils import Conv1D

from hessquant.errors import HessquantError, SourceError
from hessquant.formats.described import Settings
from hessquant.models.probe import Probe, probe
from hessquant.models.recorder import ProbedProduct
from hessquant.models.source import ModelSource, load_config
from hessquant.models.stream import StreamedModel
from hessquant.records import TensorInfo

_FEWEST_ROWS = 64
"""Linear layers with fewer outputs are gates, which servers build unquantized without being told."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison with the model class found.

    Attributes:
        faults: One sentence per thing that is wrong.
        unchecked: Why there was no comparison; empty if there was one.
    """

    faults: tuple[str, ...] = ()
    unchecked: str = ""


def compare_with_model(
    source: ModelSource,
    tensors: Mapping[str, TensorInfo],
    settings: Settings | None,
    *,
    trust_remote_code: bool = False,
) -> Comparison:
    """Build the model that the config names, without weights, and hold the checkpoint against it.

    Args:
        source: The checkpoint.
        tensors: Its tensors by name, each quantized weight as one.
        settings: What its config says of quantization; None = nothing.
        trust_remote_code: Allow code that comes with the model to run.
    """
    try:
        config = load_config(source, trust_remote_code=trust_remote_code)
        vars(config).pop("quantization_config", None)
        seen = probe(source, config, tensors, trust_remote_code=trust_remote_code)
    except HessquantError as error:
        return Comparison(unchecked=str(error))
    try:
        model = StreamedModel(source, _restacked(tensors, seen), _never_read, trust_remote_code=trust_remote_code).model
    except SourceError as error:
        return Comparison((str(error).removeprefix(f"{source.name}: "),))
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    faults = () if settings is None else tuple(_taken_for_quantized(tensors, seen, linear, settings))
    return Comparison(faults)


def _never_read(name: str) -> Never:
    raise AssertionError(f"{name} was to be read, and only its header is needed")


def _restacked(tensors: Mapping[str, TensorInfo], seen: Probe) -> dict[str, TensorInfo]:
    """The tensors as the model has them: turned where it stores [columns, rows], together where one holds several."""
    turned = {product.name for product in seen.products if product.transposed and not product.part_of}
    tensors = {
        name: replace(info, shape=info.shape[::-1]) if name in turned and not info.file else info
        for name, info in tensors.items()
    }
    stacks: dict[str, list[ProbedProduct]] = {}
    for product in seen.products:
        if product.part_of:
            stacks.setdefault(product.part_of, []).append(product)
    together: dict[str, TensorInfo] = {}
    apart: set[str] = set()
    for name, members in stacks.items():
        if all(product.name in tensors for product in members):
            pieces = 1 + max(product.locations[0].piece for product in members)
            rows, columns = sum(product.rows for product in members) // pieces, members[0].columns
            shape = (pieces, columns, rows) if members[0].transposed else (pieces, rows, columns)
            together[name] = TensorInfo(name, shape, "F16", 2 * pieces * rows * columns, "")
            apart.update(product.name for product in members)
    return {name: info for name, info in tensors.items() if name not in apart} | together


def _taken_for_quantized(
    tensors: Mapping[str, TensorInfo], seen: Probe, linear: set[str], settings: Settings
) -> Iterator[str]:
    """Matrices in 16 bit that some client would take for quantized."""
    choosers = {product.name for product in seen.products if product.chooses}
    for name, info in tensors.items():
        parameter = seen.parameter_name(name)
        if info.file == "" or len(info.shape) != 2 or not name.endswith(".weight") or name in choosers:
            continue
        if (parameter and parameter not in linear) or min(info.shape) < 1 or info.shape[0] < _FEWEST_ROWS:
            continue
        names = {name.removesuffix(".weight"), (parameter or name).removesuffix(".weight")}
        is_head = bool(parameter) and seen.parameters[parameter].role != "weight"
        for reading in settings.readings:
            if not (is_head and reading.heads_apart) and all(reading.module(each) is not None for each in names):
                yield f"{name} is in 16 bit, but {reading.clients} would take it for quantized, by what the config says"
                break
