"""How varied calibration inputs are: what a text that says the same again and again is known by."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hessquant.calibration.batches import CalibrationInput
from hessquant.calibration.model_inputs import ModelInputs, id_rows

PASSAGE = 8
"""Tokens of a passage. Runs of 4 recur in any text, and runs of 16 take a repeated sentence longer to recur."""


@dataclass(frozen=True)
class Variety:
    """Counts over all windows; the fields are those of `CalibrationRecord`."""

    distinct_windows: int
    distinct_tokens: int
    passages: int
    distinct_passages: int


def variety_of(windows: Sequence[CalibrationInput]) -> Variety:
    """Count what differs.

    Passages are the runs of `PASSAGE` tokens within a row of ids; a shorter row is one passage. A text that repeats a
    period has as many different ones as the period has tokens, wherever windows are cut. Inputs that hold no token ids
    have no passages.
    """
    passages = 0
    distinct: set[Sequence[int]] = set()
    tokens: set[int] = set()
    for row in _rows(windows):
        tokens.update(row)
        count = max(1, len(row) - PASSAGE + 1)
        passages += count
        distinct.update(row[start : start + PASSAGE] for start in range(count))
    different = {window.digest() if isinstance(window, ModelInputs) else window for window in windows}
    return Variety(len(different), len(tokens), passages, len(distinct))


def _rows(windows: Iterable[CalibrationInput]) -> Iterable[tuple[int, ...]]:
    for window in windows:
        if isinstance(window, ModelInputs):
            yield from (tuple(row) for _, row in id_rows(window))
        else:
            yield window.ids
            if window.target:
                yield window.target
