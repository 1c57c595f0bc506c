"""Measuring a model: text -> windows -> model -> numbers."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from hessquant.calibration.fit import refuse_unfit_windows, refuse_window_length
from hessquant.calibration.windows import evaluation_windows
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.stacks import restacked
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, decoded_state, quantization_of
from hessquant.errors import SourceError
from hessquant.evaluation import compare, perplexity
from hessquant.models.context import context_of
from hessquant.models.context import window_length as window_length_of
from hessquant.models.library import predicts_next_token
from hessquant.models.probe import probe
from hessquant.models.source import ModelSource, resolve
from hessquant.models.stream import build
from hessquant.results import SILENT, Comparison, Evaluation, Progress


def evaluate(
    model: str,
    *,
    against: str | None = None,
    text: str | None = None,
    num_windows: int | None = None,
    window_length: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a model's perplexity, and how far it is from a base model.

    Args:
        model: As `quantize` takes it, or a quantized checkpoint, which is decoded here without another package.
        against: Base model for KL divergence and top-1 agreement.
        text: A text as `quantize` takes it for calibration; None = the held-out part of the built-in text.
        num_windows: Windows to use; None = all.
        window_length: Tokens per window; None = the smaller of 2048 and the context of every model.
        trust_remote_code: Allow code that comes with the model to run.
        progress: Told of every window.

    Raises:
        RefusedError: If a model or the text cannot be used.
        FailedError: If a checkpoint is malformed, or logits are not finite.
    """
    source = resolve(model, trust_remote_code=trust_remote_code)
    base = None if against is None else resolve(against, trust_remote_code=trust_remote_code)
    models = [source] if base is None else [source, base]
    for each in models:
        _refuse_without_logits(each)
        refuse_window_length(window_length, each)
    length = window_length_of(window_length, *(context_of(each.config).least for each in models))
    windows = evaluation_windows(text, source.tokenizer, num_windows=num_windows, window_length=length)
    for each in models:
        refuse_unfit_windows(windows, each.config)
    if base is None:
        measured, comparison = perplexity(load_model(source), windows, progress=progress or SILENT), None
    else:
        contrast = compare(load_model(source), load_model(base), windows, progress=progress or SILENT)
        measured, agreement = contrast.model, contrast.top1_agreement
        comparison = Comparison(base.name, contrast.base.perplexity, contrast.kl_divergence, agreement)
    return Evaluation(
        model=model,
        text="builtin" if text is None else text if text.startswith("hub:") else Path(text).name,
        perplexity=measured.perplexity,
        nll=measured.nll,
        tokens=measured.tokens,
        windows=len(windows),
        window_length=length,
        comparison=comparison,
    )


def _refuse_without_logits(source: ModelSource) -> None:
    described = source.config
    if not predicts_next_token(described, trust_remote_code=source.trust_remote_code):
        kind = "an encoder-decoder" if described.is_encoder_decoder else "no model that continues a text"
        name = next(iter(described.architectures or ()), type(described).__name__)
        raise SourceError(
            f"{source.name}: {name} is {kind}, so it has no perplexity to measure; the quantization report "
            "(hessquant-report.json) has the error of each of its layers"
        )


def load_model(source: ModelSource, inputs: Mapping[str, Tensor] | None = None) -> PreTrainedModel:
    """The whole model in float32, decoded if it is quantized.

    Args:
        source: The model.
        inputs: Of its forward pass, for a model that takes more than text.

    Raises:
        SourceError: If it cannot be built.
        CheckpointError: If a quantized weight is malformed.
    """
    with CheckpointReader(source.directory) as reader:
        if quantization_of(reader.config) is None:
            state = decoded_state(reader)
        else:
            names = UnpackedCheckpoint(reader).tensors
            probed = probe(source, names, inputs=inputs)
            transposed = {product.name for product in probed.products if product.transposed}
            apart = decoded_state(reader, transposed=transposed)
            state = restacked(apart, probed.products, lambda stack: stack.joined(apart))
    return build(source, state)
