"""Measuring a model: text -> windows -> blocks -> logits -> numbers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Unpack

import torch
from torch import Tensor

from hessquant.calibration.common import common_windows
from hessquant.capture.activations import ActivationStore
from hessquant.capture.segments import Structure
from hessquant.checkpoint.decoded import DecodedCheckpoint
from hessquant.checkpoint.opening import open_files, weights_of
from hessquant.checkpoint.reader import StoredFiles
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, refuse_undescribed
from hessquant.config import Config
from hessquant.errors import DeviceMemoryError, PlanError, SourceError
from hessquant.evaluation import Contrast, Perplexity, compare, perplexity, predicted_tokens, refuse_vocabularies
from hessquant.measures import Trials
from hessquant.memory import map_large_blocks
from hessquant.models.library import predicts_next_token, reason
from hessquant.models.probe import probe
from hessquant.models.source import ModelSource, resolve
from hessquant.models.stream import StreamedModel
from hessquant.place import find_device
from hessquant.planning.size import activation_budget, activation_budget_on
from hessquant.records import TensorInfo, TokenWindow
from hessquant.results import SILENT, Comparison, Evaluation, Progress
from hessquant.run.forward import ForwardPass
from hessquant.run.whole import Trying

_WAY_OUT = "or name another directory in the environment variable TMPDIR"


def evaluate(
    model: str,
    *,
    against: str | None = None,
    text: str | None = None,
    num_windows: int | None = None,
    window_length: int | None = None,
    config: Config | None = None,
    progress: Progress | None = None,
    **trials: Unpack[Trials],
) -> Evaluation:
    """Measure a model's perplexity, and how far it is from a base model.

    Args:
        model: As `quantize` takes it, or a quantized checkpoint, which is decoded here without another package.
        against: Base model for KL divergence and top-1 agreement; it may be quantized as well.
        text: A text as `quantize` takes it for calibration; None = the held-out part of the built-in text.
        num_windows: Windows to use; None = all.
        window_length: Tokens per window; None = the smaller of 2048 and the context of every model.
        config: `device`, `activation_memory` and `trust_remote_code` count, and nothing else: it is all in float32.
        progress: Told of every window.
        **trials: What to try besides, with all of a model in memory: `generate`, `prompts`, `tasks`, `task_path`
            (`hessquant.measures.Trials`).

    Raises:
        RefusedError: If a model or the text cannot be used.
        FailedError: If a checkpoint is malformed, or logits are not finite.
    """
    config, progress = config or Config(), progress or SILENT
    models = [_source(name, config) for name in (model, against) if name is not None]
    windows, length = common_windows(models, text, num_windows=num_windows, length=window_length)
    trying = Trying(trials, models)
    map_large_blocks()
    with ExitStack() as opened:
        with _refusing_shortage(models[0], "with one window in one block", "take a smaller --window-length, or "):
            streamed = [_open(each, opened) for each in models]
            trying.refuse_sizes([each for each, _ in streamed])
            measured, comparison, whole = _measure(models, streamed, windows, config, progress)
        with _refusing_shortage(models[0], "with all of a model in memory", "leave --generate and --tasks out, or "):
            continuations, scores = trying.run([each for each, _ in streamed], progress)
    return Evaluation(
        model=model,
        text="builtin" if text is None else text if text.startswith("hub:") else Path(text).name,
        perplexity=measured.perplexity,
        nll=measured.nll,
        tokens=measured.tokens,
        windows=len(windows),
        window_length=length,
        comparison=comparison,
        whole=whole,
        perplexity_error=measured.perplexity_error,
        nll_error=measured.nll_error,
        per_window=measured.windows,
        continuations=continuations,
        tasks=scores,
    )


def _source(name: str, config: Config) -> ModelSource:
    """A model that has logits to measure, on its device."""
    source = replace(resolve(name, trust_remote_code=config.trust_remote_code), device=find_device(config.device))
    described = source.config
    if not predicts_next_token(described, trust_remote_code=source.trust_remote_code):
        kind = "an encoder-decoder" if described.is_encoder_decoder else "no model that continues a text"
        title = next(iter(described.architectures or ()), type(described).__name__)
        raise SourceError(
            f"{source.name}: {title} is {kind}, so it has no perplexity to measure; the quantization report "
            "(hessquant-report.json) has the error of each of its layers"
        )
    return source


_Opened = tuple[StreamedModel, Structure]


def _open(source: ModelSource, opened: ExitStack) -> _Opened:
    """A model whose checkpoint is open as long as `opened` is, and its blocks; quantized weights are decoded."""
    return stream_checkpoint(source, opened.enter_context(open_files(source.directory)))


def _measure(
    models: Sequence[ModelSource],
    streamed: Sequence[_Opened],
    windows: Sequence[TokenWindow],
    config: Config,
    progress: Progress,
) -> tuple[Perplexity, Comparison | None, str]:
    """Take the windows through each model in turn; then both heads are in memory, and give logits window by window.

    Returns:
        What is measured of the model, how far it is from the base, and why the model was in memory as a whole.
    """
    predicted_tokens(windows)
    passes = [ForwardPass(*each, windows, title) for each, title in zip(streamed, ("", "base: "), strict=False)]
    ours, *others = passes
    for theirs in others:
        if ours.vocabulary is not None and theirs.vocabulary is not None:
            refuse_vocabularies(ours.vocabulary, theirs.vocabulary)
    # Where any program's temporary files go; none of these has a name for longer than it takes to map it.
    activations = ActivationStore(
        activation_budget(config), Path(gettempdir()), _WAY_OUT, activation_budget_on(models[0].place)
    )
    progress.stage("evaluate", sum(each.steps for each in passes) + len(windows))
    for each in passes:
        each.begin(activations, progress)
    with ExitStack() as loaded:
        logits, *base_logits = [loaded.enter_context(each.logits()) for each in passes]
        if not base_logits:
            return perplexity(logits, windows, progress=progress), None, ours.whole
        contrast = compare(logits, base_logits[0], windows, progress=progress)
    return contrast.model, _comparison(models[1].name, contrast, others[0].whole), ours.whole


def _comparison(base: str, contrast: Contrast, whole: str) -> Comparison:
    ratio = contrast.perplexity_ratio
    error = contrast.nll_difference_error
    return Comparison(
        base=base,
        base_perplexity=contrast.base.perplexity,
        kl_divergence=contrast.kl_divergence,
        top1_agreement=contrast.top1_agreement,
        whole=whole,
        base_perplexity_error=contrast.base.perplexity_error,
        kl_error=contrast.kl_error,
        top1_error=contrast.top1_error,
        perplexity_ratio=ratio,
        ratio_error=None if error is None else ratio * error,
    )


@contextmanager
def _refusing_shortage(source: ModelSource, doing: str, way_out: str) -> Iterator[None]:
    """Inside, a device that runs out of memory is an error of ours, since what is done there takes the least it can."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{source.name}: {source.device} ran out of memory {doing} ({reason(error)}); {way_out}--device cpu"
        ) from error


def stream_checkpoint(
    source: ModelSource, reader: StoredFiles, inputs: Mapping[str, Tensor] | None = None
) -> tuple[StreamedModel, Structure]:
    """The model of a checkpoint, with its weights still there, and its blocks; quantized weights will be decoded.

    Args:
        source: The model.
        reader: Its checkpoint.
        inputs: Of its forward pass, for a model that takes more than text.

    Raises:
        SourceError: If it cannot be built, or its config and tensors disagree.
        PlanError: If it is quantized, and its forward pass fails, which has to show what its weights are.
    """
    weights = weights_of(reader)
    if weights is not None:
        if weights is reader:
            refuse_undescribed(reader)
        return StreamedModel(source, weights.tensors, weights.decode), _structure(source, weights.tensors, inputs)
    unpacked = UnpackedCheckpoint(reader)
    probed = probe(source, unpacked.tensors, inputs=inputs)
    decoded = DecodedCheckpoint(unpacked, probed.products)
    return StreamedModel(source, decoded.tensors, decoded.decode), probed


@dataclass(frozen=True)
class _OneSegment:
    """A model whose blocks are not known."""

    whole: str
    blocks: tuple[str, ...] = ()
    returns_tuple: tuple[bool, ...] = ()


def _structure(
    source: ModelSource, tensors: Mapping[str, TensorInfo], inputs: Mapping[str, Tensor] | None
) -> Structure:
    """The blocks of a model, or why it has none: unlike quantizing, measuring it does not need them."""
    try:
        return probe(source, tensors, inputs=inputs)
    except PlanError as error:
        return _OneSegment(str(error))
