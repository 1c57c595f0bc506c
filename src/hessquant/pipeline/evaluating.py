"""Measuring a model: text -> windows -> blocks -> logits -> numbers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor

from hessquant.calibration.fit import refuse_unfit_windows, refuse_window_length
from hessquant.calibration.windows import evaluation_windows
from hessquant.capture.activations import ActivationStore
from hessquant.capture.segments import Structure
from hessquant.checkpoint.decoded import DecodedCheckpoint
from hessquant.checkpoint.opening import weights_of
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.unpacked import UnpackedCheckpoint, refuse_undescribed
from hessquant.config import Config
from hessquant.errors import DeviceMemoryError, PlanError, SourceError
from hessquant.evaluation import Perplexity, compare, perplexity, predicted_tokens, refuse_vocabularies
from hessquant.memory import map_large_blocks
from hessquant.models.context import context_of
from hessquant.models.context import window_length as window_length_of
from hessquant.models.library import predicts_next_token
from hessquant.models.probe import probe
from hessquant.models.source import ModelSource, resolve
from hessquant.models.stream import StreamedModel
from hessquant.place import find_device
from hessquant.planning.size import activation_budget, activation_budget_on
from hessquant.records import TensorInfo, TokenWindow
from hessquant.results import SILENT, Comparison, Evaluation, Progress
from hessquant.run.forward import ForwardPass

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
) -> Evaluation:
    """Measure a model's perplexity, and how far it is from a base model.

    Args:
        model: As `quantize` takes it, or a quantized checkpoint, which is decoded here without another package.
        against: Base model for KL divergence and top-1 agreement.
        text: A text as `quantize` takes it for calibration; None = the held-out part of the built-in text.
        num_windows: Windows to use; None = all.
        window_length: Tokens per window; None = the smaller of 2048 and the context of every model.
        config: `device`, `activation_memory` and `trust_remote_code` count, and nothing else: it is all in float32.
        progress: Told of every window.

    Raises:
        RefusedError: If a model or the text cannot be used.
        FailedError: If a checkpoint is malformed, or logits are not finite.
    """
    config = config or Config()
    device = find_device(config.device)
    models = [
        replace(resolve(name, trust_remote_code=config.trust_remote_code), device=device)
        for name in (model, against)
        if name is not None
    ]
    for each in models:
        _refuse_without_logits(each)
        refuse_window_length(window_length, each)
    length = window_length_of(window_length, *(context_of(each.config).least for each in models))
    windows = evaluation_windows(text, models[0].tokenizer, num_windows=num_windows, window_length=length)
    for each in models:
        refuse_unfit_windows(windows, each.config)
    map_large_blocks()
    measured, comparison, whole = _measure(models, windows, config, progress or SILENT)
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


def _measure(
    models: Sequence[ModelSource], windows: Sequence[TokenWindow], config: Config, progress: Progress
) -> tuple[Perplexity, Comparison | None, str]:
    """Take the windows through each model in turn; then both heads are in memory, and give logits window by window.

    Returns:
        What is measured of the model, how far it is from the base, and why the model was in memory as a whole.
    """
    predicted_tokens(windows)
    source, base = models[0], models[1] if len(models) > 1 else None
    with ExitStack() as opened:
        opened.enter_context(_refusing_shortage(source))
        ours = _forward_pass(source, windows, opened)
        theirs = None if base is None else _forward_pass(base, windows, opened, "base: ")
        passes = [ours] if theirs is None else [ours, theirs]
        if theirs is not None and ours.vocabulary is not None and theirs.vocabulary is not None:
            refuse_vocabularies(ours.vocabulary, theirs.vocabulary)
        # Where any program's temporary files go; none of these has a name for longer than it takes to map it.
        activations = ActivationStore(
            activation_budget(config), Path(gettempdir()), _WAY_OUT, activation_budget_on(source.place)
        )
        progress.stage("evaluate", sum(each.steps for each in passes) + len(windows))
        for each in passes:
            each.begin(activations, progress)
        logits = opened.enter_context(ours.logits())
        if base is None or theirs is None:
            return perplexity(logits, windows, progress=progress), None, ours.whole
        contrast = compare(logits, opened.enter_context(theirs.logits()), windows, progress=progress)
    comparison = Comparison(
        base.name, contrast.base.perplexity, contrast.kl_divergence, contrast.top1_agreement, theirs.whole
    )
    return contrast.model, comparison, ours.whole


@contextmanager
def _refusing_shortage(source: ModelSource) -> Iterator[None]:
    """Inside, a device that runs out of memory is an error of ours: one window is run at a time, which is the least."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise DeviceMemoryError(
            f"{source.name}: {source.device} ran out of memory with one window in one block ({reason}); take a smaller "
            "--window-length, or --device cpu"
        ) from error


def _forward_pass(
    source: ModelSource, windows: Sequence[TokenWindow], opened: ExitStack, title: str = ""
) -> ForwardPass:
    """The windows before a model whose checkpoint is open as long as `opened` is; quantized weights are decoded."""
    reader = opened.enter_context(CheckpointReader(source.directory))
    streamed, structure = stream_checkpoint(source, reader)
    return ForwardPass(streamed, structure, windows, title)


def stream_checkpoint(
    source: ModelSource, reader: CheckpointReader, inputs: Mapping[str, Tensor] | None = None
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
