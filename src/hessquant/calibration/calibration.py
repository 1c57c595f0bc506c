"""What a model is calibrated on, all the way: from a text or from a caller, to the batches of its forward passes."""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from hessquant.calibration.batches import Batch, batches_of
from hessquant.calibration.fit import refuse_unfit_windows, refuse_unknown_inputs, refuse_window_length
from hessquant.calibration.model_inputs import CalibrationInput, ModelInputs
from hessquant.calibration.record import calibration_record
from hessquant.calibration.samples import Reader
from hessquant.calibration.sources import may_have_images
from hessquant.calibration.token_ids import windows_from_ids
from hessquant.calibration.windows import calibration_windows, check_start
from hessquant.config import Config
from hessquant.errors import CalibrationError
from hessquant.models.context import context_of, window_length
from hessquant.models.source import ModelSource
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
        _ = self._start_token
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
        return batches_of(self._read[0], tokens_per_batch, self._start_token)

    @cached_property
    def _read(self) -> tuple[tuple[CalibrationInput, ...], CalibrationRecord]:
        config = self._config
        if isinstance(self._calibration, str):
            windows, record = calibration_windows(
                self._calibration,
                self._reader,
                num_windows=config.num_windows,
                seed=config.seed,
                allow_fewer=config.allow_fewer,
            )
        else:
            windows = windows_from_ids(self._calibration, encoder_decoder=self._encoder_decoder)
            refuse_unknown_inputs(windows, self._source)
            record = calibration_record("python", windows, sum(window.tokens for window in windows))
        refuse_unfit_windows(windows, self._source.config)
        return windows, record

    @cached_property
    def _reader(self) -> Reader:
        length = window_length(self._config.window_length, context_of(self._source.config).least)
        return Reader(self._source.tokenizer, length, self._encoder_decoder, lambda: self._source.processor)

    @property
    def _encoder_decoder(self) -> bool:
        return bool(self._source.config.is_encoder_decoder)

    @cached_property
    def _start_token(self) -> int | None:
        """The token that an encoder-decoder's target begins with; None for every other model."""
        if not self._encoder_decoder:
            return None
        for setting in _STARTS:
            for config in (self._source.config, self._source.config.get_text_config(decoder=True)):
                token = getattr(config, setting, None)
                if isinstance(token, int):
                    return token
        raise CalibrationError(
            f"{self._source.name}: its config has none of {', '.join(_STARTS)}, so nothing says what a target begins "
            "with; set the first"
        )
