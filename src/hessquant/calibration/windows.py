"""Text and token ids -> token windows. Windows are never padded; padding that comes in is stripped.

Text is tokenized with the tokenizer's defaults, as `tokenizer(text)["input_ids"]` gives it: where the
tokenizer begins a text with a special token, a running text has it once, a sample at its own start.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from hessquant.calibration.batches import CalibrationInput
from hessquant.calibration.model_inputs import ModelInputs, id_rows
from hessquant.calibration.samples import Reader
from hessquant.calibration.sources import RunningText, Samples, Source, hub_parts, open_source
from hessquant.calibration.variety import variety_of
from hessquant.errors import CalibrationError, NotEnoughTextError
from hessquant.models.context import Context
from hessquant.records import TokenWindow
from hessquant.results import CalibrationRecord

# Where the digest goes on with something else than a window's length; no window is that long.
_TARGET, _SAMPLE = 2**32 - 1, 2**32 - 2
_BEGINNING = 4096  # characters of a file that a plan looks at
_CHARACTERS_PER_TOKEN = 4  # first guess of how much running text to read; wrong guesses cost time only


def calibration_windows(
    source: str,
    tokenizer: Any,
    *,
    num_windows: int,
    window_length: int,
    seed: int,
    allow_fewer: bool,
    encoder_decoder: bool = False,
    load_processor: Callable[[], Any] | None = None,
) -> tuple[tuple[CalibrationInput, ...], CalibrationRecord]:
    """Take the first windows of a text.

    A running text (built in, a .txt file, text rows of a hub data set) is cut into full windows in order. A sample (a
    row of a .jsonl file, a conversation) begins its own window and is never truncated: one longer than a window
    goes on in the next, and its last window may be short. For an encoder-decoder each of these is cut in half, into a
    source and a target; a pair (a row of a .jsonl file) is one window, and so is a row with images.

    Args:
        source: As `sources.open_source` takes it.
        tokenizer: A transformers tokenizer; it needs neither a pad nor an eos token.
        num_windows: Windows to take.
        window_length: Tokens per window.
        seed: Order of the built-in documents. No global random state is read or changed.
        allow_fewer: Take the windows there are when the text has fewer; one short window if none is full.
        encoder_decoder: Whether the model is one.
        load_processor: Gives the model's processor, for rows with images.

    Returns:
        The windows, and a record whose `tokens_available` counts the tokens of all text that was read; samples and
        hub data sets are read no further than needed.

    Raises:
        CalibrationError: If the text cannot be read or tokenized, or holds no token.
        NotEnoughTextError: If there are fewer windows than asked for and `allow_fewer` is false.
    """
    text = open_source(source, "calibration", seed)
    reader = Reader(tokenizer, window_length, encoder_decoder, load_processor)
    windows, available = _cut(text, reader, num_windows, take_short=allow_fewer)
    if not available:
        raise CalibrationError(f"{text.name} holds no token")
    if len(windows) < num_windows and not allow_fewer:
        raise NotEnoughTextError(
            f"{_amount(text, available, windows, window_length)}, fewer than the {num_windows} asked for; "
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
    made, available = _cut(text, Reader(tokenizer, window_length), num_windows, take_short=False)
    windows = tuple(window for window in made if isinstance(window, TokenWindow))
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
    if isinstance(text, RunningText):
        beginning = next(iter(text.documents))[:_BEGINNING]
        if not beginning.strip():
            raise CalibrationError(f"{text.name} holds no token")
        reader.tokenize(beginning, text.name)
        return
    first = next(iter(text.samples), None)
    if first is None:
        raise CalibrationError(f"{text.name} holds no token")
    reader.inputs(first)


def refuse_unfit(windows: Sequence[CalibrationInput], *, context: Context, vocabulary: int | None) -> None:
    """Refuse windows that the model was not made for.

    Args:
        windows: Calibration inputs.
        context: Positions that the model has.
        vocabulary: Number of token ids; None = not known.

    Raises:
        CalibrationError: If a window is longer than the context, or a token id is outside the vocabulary.
    """
    for index, window in enumerate(windows):
        place, read, written = _rows_of(window, index)
        for rows, limit in ((read, context.read), (written, context.written)):
            longest = max(map(len, rows), default=0)
            if limit is not None and longest > limit:
                what = (
                    f"take --window-length {limit} or less" if isinstance(window, TokenWindow) else "give shorter ones"
                )
                raise CalibrationError(f"{place} has {longest} tokens, but the model's context is {limit}; {what}")
        rows = [*read, *written]
        known = range(max(map(max, rows), default=0) + 1 if vocabulary is None else vocabulary)
        strange = next((token for row in rows for token in row if token not in known), None)
        if strange is not None:
            raise CalibrationError(
                f"{place} holds token id {strange}, but the model's vocabulary is {len(known)}; "
                "use the tokenizer that belongs to the model"
            )


def _rows_of(window: CalibrationInput, index: int) -> tuple[str, list[Sequence[int]], list[Sequence[int]]]:
    """How it is called, and the rows of token ids that are read and written."""
    if isinstance(window, TokenWindow):
        return f"window {index}", [window.ids], [window.target] if window.target else []
    read: list[Sequence[int]] = [row for name, row in id_rows(window) if name == "input_ids"]
    return window.place, read, [row for name, row in id_rows(window) if name != "input_ids"]


def calibration_record(source: str, windows: Sequence[CalibrationInput], tokens_available: int) -> CalibrationRecord:
    """Describe the windows.

    The digest is SHA-256 over, for each window in order, its length and then its ids, all as little-endian 32-bit
    unsigned integers. A target follows as 2^32 - 1, its length and its ids. A sample that is more than token ids is
    2^32 - 2 and the 32 bytes of its own digest, which is over names, dtypes, shapes and bytes (`ModelInputs.digest`).
    """
    digest = hashlib.sha256()
    for window in windows:
        if isinstance(window, ModelInputs):
            digest.update(struct.pack("<I", _SAMPLE) + window.digest())
            continue
        digest.update(struct.pack(f"<{len(window.ids) + 1}I", len(window.ids), *window.ids))
        if window.target:
            digest.update(struct.pack(f"<{len(window.target) + 2}I", _TARGET, len(window.target), *window.target))
    tokens = sum(window.tokens for window in windows)
    return CalibrationRecord(
        source, len(windows), tokens, tokens_available, digest.hexdigest(), **asdict(variety_of(windows))
    )


def _amount(text: Source, tokens: int, windows: Sequence[CalibrationInput], window_length: int) -> str:
    kind = "full windows of" if isinstance(text, RunningText) else "windows of up to"
    return f"{text.name} has {tokens} tokens, which make {len(windows)} {kind} {window_length} tokens"


def _cut(
    text: Source, reader: Reader, num_windows: int | None, *, take_short: bool
) -> tuple[list[CalibrationInput], int]:
    """Windows and the number of tokens read; `take_short` = one short window of a running text that has no full one."""
    if isinstance(text, Samples):
        return _cut_samples(text, reader, num_windows)
    length = reader.window_length
    ids = _running_ids(text, reader, None if num_windows is None else num_windows * length)
    count = len(ids) // length
    if num_windows is not None:
        count = min(count, num_windows)
    kept = len(ids) if take_short and count == 0 else count * length
    return list(reader.windows(ids[:kept])), len(ids)


def _cut_samples(text: Samples, reader: Reader, num_windows: int | None) -> tuple[list[CalibrationInput], int]:
    windows: list[CalibrationInput] = []
    available = 0
    for sample in text.samples:
        made = reader.inputs(sample)
        available += sum(window.tokens for window in made)
        windows += made
        if num_windows is not None and len(windows) >= num_windows:
            return windows[:num_windows], available
    return windows, available


def _running_ids(text: RunningText, reader: Reader, needed: int | None) -> list[int]:
    """Tokens of the joined documents, of as many as give `needed` tokens (None = all).

    Tokenizers may merge across a join, so the text read is always tokenized as one.
    """
    documents = iter(text.documents)
    if needed is None:
        return reader.tokenize("\n\n".join(documents), text.name)
    read: list[str] = []
    ids: list[int] = []
    wanted = _CHARACTERS_PER_TOKEN * needed
    while len(ids) < needed:
        more = list(_take(documents, wanted))
        if not more:
            break
        read += more
        ids = reader.tokenize("\n\n".join(read), text.name)
        wanted = sum(map(len, read))
    return ids


def _take(documents: Iterator[str], characters: int) -> Iterator[str]:
    """At least one document, and then on until there are that many characters."""
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return
