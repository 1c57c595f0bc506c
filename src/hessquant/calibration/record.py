"""What a report says of calibration inputs: how many, which (a digest), and how varied they are.

Variety is what a text that says the same again and again is known by.
"""

import hashlib
import struct
from collections.abc import Sequence

from hessquant.calibration.model_inputs import CalibrationInput, ModelInputs, id_rows
from hessquant.results import CalibrationRecord

# Where the digest goes on with something else than a window's length; no window is that long.
_TARGET, _SAMPLE = 2**32 - 1, 2**32 - 2

PASSAGE = 8
"""Tokens of a passage. Runs of 4 recur in any text, and runs of 16 take a repeated sentence longer to recur."""


def calibration_record(source: str, windows: Sequence[CalibrationInput], tokens_available: int) -> CalibrationRecord:
    """Describe the windows.

    Passages are the runs of `PASSAGE` tokens within a row of ids; a shorter row is one passage. A text that repeats a
    period has as many different ones as the period has tokens, wherever windows are cut. Inputs that hold no token ids
    have no passages.
    """
    passages = 0
    distinct_passages: set[tuple[int, ...]] = set()
    distinct_tokens: set[int] = set()
    for window in windows:
        for _, row in id_rows(window):
            distinct_tokens.update(row)
            count = max(1, len(row) - PASSAGE + 1)
            passages += count
            distinct_passages.update(row[start : start + PASSAGE] for start in range(count))
    return CalibrationRecord(
        source=source,
        windows=len(windows),
        tokens=sum(window.tokens for window in windows),
        tokens_available=tokens_available,
        digest=_digest(windows),
        distinct_windows=len({window.digest() if isinstance(window, ModelInputs) else window for window in windows}),
        distinct_tokens=len(distinct_tokens),
        passages=passages,
        distinct_passages=len(distinct_passages),
    )


def _digest(windows: Sequence[CalibrationInput]) -> str:
    """SHA-256 over, for each window in order, its length and then its ids, as little-endian 32-bit unsigned integers.

    A target follows as 2^32 - 1, its length and its ids. A sample that is more than token ids is 2^32 - 2 and the 32
    bytes of its own digest, which is over names, dtypes, shapes and bytes (`ModelInputs.digest`).
    """
    digest = hashlib.sha256()
    for window in windows:
        if isinstance(window, ModelInputs):
            digest.update(struct.pack("<I", _SAMPLE) + window.digest())
            continue
        digest.update(struct.pack(f"<{len(window.ids) + 1}I", len(window.ids), *window.ids))
        if window.target:
            digest.update(struct.pack(f"<{len(window.target) + 2}I", _TARGET, len(window.target), *window.target))
    return digest.hexdigest()
