"""Calibration inputs for a model: from a text or from a caller, and refused where they do not fit it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from hessquant.calibration.batches import Batch, CalibrationInput, batches_of
from hessquant.calibration.model_inputs import ModelInputs
from hessquant.calibration.sources import may_have_images
from hessquant.calibration.token_ids import windows_from_ids
from hessquant.calibration.windows import calibration_record, calibration_windows, refuse_unfit
from hessquant.config import Config
from hessquant.errors import CalibrationError
from hessquant.models.source import ModelSource, load_config, load_processor, load_tokenizer
from hessquant.records import CalibrationRecord

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
        start = _start_token(self._described, self._source.name) if self._described.is_encoder_decoder else None
        return batches_of(self._read[0], tokens_per_batch, start)

    @cached_property
    def _described(self) -> PreTrainedConfig:
        return load_config(self._source, trust_remote_code=self._config.trust_remote_code)

    @cached_property
    def _read(self) -> tuple[tuple[CalibrationInput, ...], CalibrationRecord]:
        config, trusted = self._config, self._config.trust_remote_code
        encoder_decoder = bool(self._described.is_encoder_decoder)
        if not isinstance(self._calibration, str):
            windows = windows_from_ids(self._calibration, encoder_decoder=encoder_decoder)
            record = calibration_record("python", windows, sum(window.tokens for window in windows))
        else:
            windows, record = calibration_windows(
                self._calibration,
                load_tokenizer(self._source, trust_remote_code=trusted),
                num_windows=config.num_windows,
                window_length=config.window_length,
                seed=config.seed,
                allow_fewer=config.allow_fewer,
                encoder_decoder=encoder_decoder,
                load_processor=cache(partial(load_processor, self._source, trust_remote_code=trusted)),
            )
        refuse_unfit_windows(windows, self._described)
        return windows, record


def refuse_unfit_windows(windows: Sequence[CalibrationInput], described: PreTrainedConfig) -> None:
    """Refuse windows that are longer than the model's context, or hold tokens that it does not know.

    Raises:
        CalibrationError: Naming the window.
    """
    text = described.get_text_config()
    context, vocabulary = (getattr(text, name, None) for name in ("max_position_embeddings", "vocab_size"))
    if context is not None and context < 1:  # how some say that there is no limit
        context = None
    refuse_unfit(windows, context=context, vocabulary=vocabulary)


def _start_token(described: PreTrainedConfig, name: str) -> int:
    """The token that a target begins with."""
    for setting in _STARTS:
        for config in (described, described.get_text_config(decoder=True)):
            token = getattr(config, setting, None)
            if isinstance(token, int):
                return token
    raise CalibrationError(
        f"{name}: its config has none of {', '.join(_STARTS)}, so nothing says what a target begins with; set the first"
    )
