"""Calibration inputs for a model: from a text or from a caller, and refused where they do not fit it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from hessquant.calibration.batches import Batch, CalibrationInput, batches_of
from hessquant.calibration.model_inputs import ModelInputs
from hessquant.calibration.samples import Reader
from hessquant.calibration.sources import may_have_images
from hessquant.calibration.token_ids import windows_from_ids
from hessquant.calibration.windows import calibration_record, calibration_windows, check_start, refuse_unfit
from hessquant.config import Config
from hessquant.errors import CalibrationError
from hessquant.models.context import Context, context_of, window_length
from hessquant.models.source import ModelSource
from hessquant.models.structure import unknown_inputs
from hessquant.results import CalibrationRecord

_STARTS = ("decoder_start_token_id", "pad_token_id", "bos_token_id")


class Calibration:
    """What a model is calibrated on. It is read when it is first asked for, and once.

    Args:
        source: The model.
        calibration: A text as `calibration_windows` takes it, or items as `windows_from_ids` takes them.
        config: Settings of the run.
    """

    def __init__(self, source: ModelSource, calibration: str | Iterable[Any], config: Config) -> None:
        self._source, self._calibration, self._config = source, calibration, config

    def check(self) -> None:
        """Refuse what can be seen without reading a text, or much of one.

        The length of a window, whether the source is there, and whether the model's tokenizer takes its beginning; a
        hub data set is not asked for. Items from a caller are read whole.

        Raises:
            CalibrationError: If the calibration cannot be used.
        """
        if self._source.config.is_encoder_decoder:
            _start_token(self._source)
        if not isinstance(self._calibration, str):
            _ = self._read
            return
        refuse_window_length(self._config.window_length, self._source)
        if self._calibration != "builtin":
            check_start(self._calibration, self._reader)

    @property
    def sample(self) -> Mapping[str, Tensor] | None:
        """Inputs of the first sample that is more than text, which the plan's forward pass must run on; None if all is.

        Raises:
            CalibrationError: If the calibration cannot be used.
        """
        if isinstance(self._calibration, str) and not may_have_images(self._calibration):
            return None  # without a look at the text, so that the plan need not wait for it
        samples = (window.tensors for window in self._read[0] if isinstance(window, ModelInputs))
        return next(samples, None)

    @property
    def record(self) -> CalibrationRecord:
        """Where it came from.

        Raises:
            CalibrationError: If it cannot be used.
        """
        return self._read[1]

    def batches(self, tokens_per_batch: int) -> tuple[Batch, ...]:
        """Inputs of the forward passes.

        Raises:
            CalibrationError: If the calibration cannot be used, or a target has nothing to begin with.
        """
        start = _start_token(self._source) if self._source.config.is_encoder_decoder else None
        return batches_of(self._read[0], tokens_per_batch, start)

    @cached_property
    def _reader(self) -> Reader:
        return Reader(
            self._source.tokenizer,
            window_length(self._config.window_length, context_of(self._source.config).least),
            bool(self._source.config.is_encoder_decoder),
            lambda: self._source.processor,
        )

    @cached_property
    def _read(self) -> tuple[tuple[CalibrationInput, ...], CalibrationRecord]:
        config = self._config
        if not isinstance(self._calibration, str):
            windows = windows_from_ids(
                self._calibration,
                encoder_decoder=bool(self._source.config.is_encoder_decoder),
            )
            self._refuse_unknown(windows)
            record = calibration_record("python", windows, sum(window.tokens for window in windows))
        else:
            windows, record = calibration_windows(
                self._calibration,
                self._reader.tokenizer,
                num_windows=config.num_windows,
                window_length=self._reader.window_length,
                seed=config.seed,
                allow_fewer=config.allow_fewer,
                encoder_decoder=self._reader.encoder_decoder,
                load_processor=self._reader.load_processor,
            )
        refuse_unfit_windows(windows, self._source.config)
        return windows, record

    def _refuse_unknown(self, windows: Sequence[CalibrationInput]) -> None:
        """Refuse inputs that the model's forward pass does not name: it may take any, and ignore them."""
        samples = [window for window in windows if isinstance(window, ModelInputs)]
        names = dict.fromkeys(name for sample in samples for name in sample.tensors)
        unknown = unknown_inputs(self._source.weightless(), names) if names else []
        for sample in samples:
            strange = [name for name in sample.tensors if name in unknown]
            if strange:
                raise CalibrationError(
                    f"{sample.place}: {', '.join(map(repr, strange))} is no input that the model's forward pass names, "
                    "so it would be ignored; rename it if it is misspelt, or leave it out"
                )


def refuse_window_length(asked: int | None, source: ModelSource) -> None:
    """Refuse windows of a text that are longer than the model's context; those of the default length never are.

    Raises:
        CalibrationError: If they are.
    """
    context = context_of(source.config)
    # An encoder-decoder reads one half of a window and writes the other.
    halves = 2 if source.config.is_encoder_decoder else 1
    if asked is not None and context.least is not None and asked > halves * context.least:
        raise CalibrationError(
            f"windows of {asked} tokens are too long for {source.name}, whose {_said(context)}; "
            f"take --window-length {context.least} or less"
        )


def refuse_unfit_windows(windows: Sequence[CalibrationInput], described: PreTrainedConfig) -> None:
    """Refuse windows that are longer than the model's context, or hold tokens that it does not know.

    Raises:
        CalibrationError: Naming the window.
    """
    vocabulary = getattr(described.get_text_config(), "vocab_size", None)
    refuse_unfit(windows, context=context_of(described), vocabulary=vocabulary)


def _said(context: Context) -> str:
    if context.read == context.written:
        return f"context is {context.read}"
    return f"context is {context.read} for what it reads and {context.written} for what it writes"


def _start_token(source: ModelSource) -> int:
    """The token that a target begins with."""
    for setting in _STARTS:
        for config in (source.config, source.config.get_text_config(decoder=True)):
            token = getattr(config, setting, None)
            if isinstance(token, int):
                return token
    raise CalibrationError(
        f"{source.name}: its config has none of {', '.join(_STARTS)}, so nothing says what a target begins with; "
        "set the first"
    )
