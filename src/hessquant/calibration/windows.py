"""Text -> token windows. Windows are never padded.

Text is tokenized with the tokenizer's defaults, as `tokenizer(text)["input_ids"]` gives it: where the
tokenizer begins a text with a special token, a running text has it once, a sample at its own start.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hessquant.calibration.model_inputs import CalibrationInput
from hessquant.calibration.record import calibration_record
from hessquant.calibration.rows import Sample
from hessquant.calibration.samples import Reader
from hessquant.calibration.sources import RunningText, Samples, Source, hub_parts, open_source
from hessquant.errors import CalibrationError, NotEnoughTextError
from hessquant.records import TokenWindow
from hessquant.results import CalibrationRecord

_BEGINNING = 4096  # characters of a file, from its first that is not blank, that a plan looks at
_CHARACTERS_PER_TOKEN = 4  # first guess of how much running text to read; wrong guesses cost time only


def calibration_windows(
    source: str, reader: Reader, *, num_windows: int, seed: int, allow_fewer: bool
) -> tuple[tuple[CalibrationInput, ...], CalibrationRecord]:
    """Take the first windows of a text.

    A running text (built in, a .txt file, text rows of a hub data set) is cut into full windows in order. A sample (a
    row of a .jsonl file, a conversation) begins its own window and is never truncated: one longer than a window
    goes on in the next, and its last window may be short. For an encoder-decoder each of these is cut in half, into a
    source and a target; a pair (a row of a .jsonl file) is one window, and so is a row with images.

    Args:
        source: As `sources.open_source` takes it.
        reader: What makes windows of it.
        num_windows: Windows to take.
        seed: Order of the built-in documents. No global random state is read or changed.
        allow_fewer: Take the windows there are when the text has fewer; one short window if none is full.

    Returns:
        The windows, and a record whose `tokens_available` counts the tokens of all text that was read; samples and
        hub data sets are read no further than needed.

    Raises:
        CalibrationError: If the text cannot be read or tokenized, or holds no token.
        NotEnoughTextError: If there are fewer windows than asked for and `allow_fewer` is false.
    """
    text = open_source(source, "calibration", seed)
    windows, available = _cut(text, reader, num_windows, take_short=allow_fewer)
    if not available:
        raise CalibrationError(f"{text.name} holds no token")
    if len(windows) < num_windows and not allow_fewer:
        raise NotEnoughTextError(
            f"{_amount(text, available, windows, reader.window_length)}, fewer than the {num_windows} asked for; "
            "--allow-fewer takes what there is, a shorter --window-length makes more windows"
        )
    return tuple(windows), calibration_record(text.name, windows, available)


def evaluation_windows(
    source: str | None, tokenizer: Any, *, num_windows: int | None, window_length: int
) -> tuple[TokenWindow, ...]:
    """Take the windows that perplexity is measured on, cut as in `calibration_windows`.

    Args:
        source: As `sources.open_source` takes it; None or "builtin" = the held-out part of the built-in text.
        tokenizer: A transformers tokenizer.
        num_windows: Windows to take; None = all there are.
        window_length: Tokens per window.

    Raises:
        CalibrationError: If the text cannot be read or tokenized.
        NotEnoughTextError: If there are fewer windows than asked for, or none.
    """
    text = open_source("builtin" if source is None else source, "held-out")
    inputs, available = _cut(text, Reader(tokenizer, window_length), num_windows, take_short=False)
    windows = tuple(window for window in inputs if isinstance(window, TokenWindow))
    if len(windows) < (num_windows or 1):
        raise NotEnoughTextError(
            f"{_amount(text, available, windows, window_length)}, fewer than the {num_windows or 1} needed; "
            "give more text, or a smaller --num-windows or --window-length"
        )
    return windows


def check_start(source: str, reader: Reader) -> None:
    """Refuse a text by what can be seen without reading it: the file, and what the tokenizer makes of its first row.

    A hub data set is not asked for. Whether there is enough text, and whether later rows are sound, is seen when it is
    read.

    Raises:
        CalibrationError: As `calibration_windows`.
    """
    if source.startswith("hub:"):
        hub_parts(source)
        return
    text = open_source(source, "calibration")
    pieces: Iterable[str | Sample] = text.documents if isinstance(text, RunningText) else text.samples
    first = next(iter(pieces), "")
    if isinstance(first, Sample):
        reader.inputs(first)
    elif beginning := first.lstrip()[:_BEGINNING]:
        reader.tokenize(beginning, text.name)
    else:
        raise CalibrationError(f"{text.name} holds no token")


def _amount(text: Source, tokens: int, windows: Sequence[CalibrationInput], window_length: int) -> str:
    kind = "full windows of" if isinstance(text, RunningText) else "windows of up to"
    return f"{text.name} has {tokens} tokens, which make {len(windows)} {kind} {window_length} tokens"


def _cut(
    text: Source, reader: Reader, num_windows: int | None, *, take_short: bool
) -> tuple[list[CalibrationInput], int]:
    """Windows and the number of tokens read; `take_short` = one short window of a running text that has no full one."""
    wanted = math.inf if num_windows is None else num_windows
    windows: list[CalibrationInput] = []
    if isinstance(text, Samples):
        for sample in text.samples:
            windows += reader.inputs(sample)
            if len(windows) >= wanted:
                break
        return windows[:num_windows], sum(window.tokens for window in windows)
    length = reader.window_length
    ids = _running_ids(text, reader, wanted * length)
    whole = len(ids) - len(ids) % length
    windows += reader.windows(ids[: whole or (len(ids) if take_short else 0)])
    return windows[:num_windows], len(ids)


def _running_ids(text: RunningText, reader: Reader, needed: float) -> list[int]:
    """Tokens of the joined documents, of as many as give `needed` tokens (infinity = all).

    Tokenizers may merge across a join, so the text read is always tokenized as one.
    """
    documents = iter(text.documents)
    read: list[str] = []
    ids: list[int] = []
    characters = _CHARACTERS_PER_TOKEN * needed
    while len(ids) < needed and (more := list(_take(documents, characters))):
        read += more
        ids = reader.tokenize("\n\n".join(read), text.name)
        characters = sum(map(len, read))
    return ids


def _take(documents: Iterator[str], characters: float) -> Iterator[str]:
    """At least one document, and then on until there are that many characters."""
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return
