"""Token windows for a model: from a text or from ids, and refused where they do not fit it."""

from collections.abc import Iterable
from typing import Any

from hessquant.calibration.token_ids import windows_from_ids
from hessquant.calibration.windows import calibration_record, calibration_windows, refuse_unfit
from hessquant.config import Config
from hessquant.models.source import ModelSource, load_config, load_tokenizer
from hessquant.records import CalibrationRecord, TokenWindow


def windows_for(
    source: ModelSource, calibration: str | Iterable[Any], config: Config
) -> tuple[tuple[TokenWindow, ...], CalibrationRecord]:
    """Calibration windows for a model, and where they came from.

    Raises:
        CalibrationError: If the text or the ids cannot be used.
    """
    if not isinstance(calibration, str):
        windows = windows_from_ids(calibration)
        record = calibration_record("python", windows, sum(len(window.ids) for window in windows))
    else:
        windows, record = calibration_windows(
            calibration,
            load_tokenizer(source, trust_remote_code=config.trust_remote_code),
            num_windows=config.num_windows,
            window_length=config.window_length,
            seed=config.seed,
            allow_fewer=config.allow_fewer,
        )
    refuse_unfit_windows(windows, source, config.trust_remote_code)
    return windows, record


def refuse_unfit_windows(windows: tuple[TokenWindow, ...], source: ModelSource, trust_remote_code: bool) -> None:
    """Refuse windows that are longer than the model's context, or hold tokens that it does not know.

    Raises:
        CalibrationError: Naming the window.
    """
    described = load_config(source, trust_remote_code=trust_remote_code).get_text_config()
    context = getattr(described, "max_position_embeddings", None)
    if context is not None and context < 1:  # how some say that there is no limit
        context = None
    refuse_unfit(windows, context=context, vocabulary=described.vocab_size)
