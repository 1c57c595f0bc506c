"""Text and token ids -> token windows. Windows are never padded; padding that comes in is stripped.

Text is tokenized with the tokenizer's defaults, as `tokenizer(text)["input_ids"]` gives it: where the
tokenizer begins a text with a special token, a running text has it once, a sample at its own start.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from hessquant.calibration.sources import Message, RunningText, Sample, Samples, Source, open_source
from hessquant.errors import CalibrationError, NotEnoughTextError
from hessquant.records import CalibrationRecord, TokenWindow

_CHARACTERS_PER_TOKEN = 4  # first guess of how much running text to read; wrong guesses cost time only


def calibration_windows(
    source: str, tokenizer: Any, *, num_windows: int, window_length: int, seed: int, allow_fewer: bool
) -> tuple[tuple[TokenWindow, ...], CalibrationRecord]:
    """Take the first windows of a text.

    A running text (built in, a .txt file, text rows of a hub data set) is cut into full windows in order. A sample (a
    row of a .jsonl file, a conversation) begins its own window and is never truncated: one longer than a window
    goes on in the next, and its last window may be short.

    Args:
        source: As `sources.open_source` takes it.
        tokenizer: A transformers tokenizer; it needs neither a pad nor an eos token.
        num_windows: Windows to take.
        window_length: Tokens per window.
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
    windows, available = _cut(text, tokenizer, num_windows, window_length, take_short=allow_fewer)
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
    windows, available = _cut(text, tokenizer, num_windows, window_length, take_short=False)
    if len(windows) < (num_windows or 1):
        raise NotEnoughTextError(
            f"{_amount(text, available, windows, window_length)}, fewer than the {num_windows or 1} needed; "
            "give more text, or a smaller --num-windows or --window-length"
        )
    return tuple(windows)


def refuse_unfit(windows: Sequence[TokenWindow], *, context: int | None, vocabulary: int) -> None:
    """Refuse windows that the model was not made for.

    Args:
        windows: Token windows.
        context: Positions that the model knows; None = no limit.
        vocabulary: Number of token ids.

    Raises:
        CalibrationError: If a window is longer than the context, or a token id is outside the vocabulary.
    """
    for index, window in enumerate(windows):
        if context is not None and len(window.ids) > context:
            raise CalibrationError(
                f"window {index} has {len(window.ids)} tokens, but the model's context is {context}; "
                f"take --window-length {context} or less"
            )
        strange = next((token for token in window.ids if not 0 <= token < vocabulary), None)
        if strange is not None:
            raise CalibrationError(
                f"window {index} holds token id {strange}, but the model's vocabulary is {vocabulary}; "
                "use the tokenizer that belongs to the model"
            )


def calibration_record(source: str, windows: Sequence[TokenWindow], tokens_available: int) -> CalibrationRecord:
    """Describe the windows.

    The digest is SHA-256 over, for each window in order, its length and then its ids, all as little-endian 32-bit
    unsigned integers.
    """
    digest = hashlib.sha256()
    for window in windows:
        digest.update(struct.pack(f"<{len(window.ids) + 1}I", len(window.ids), *window.ids))
    tokens = sum(len(window.ids) for window in windows)
    return CalibrationRecord(source, len(windows), tokens, tokens_available, digest.hexdigest())


def _amount(text: Source, tokens: int, windows: Sequence[TokenWindow], window_length: int) -> str:
    kind = "full windows of" if isinstance(text, RunningText) else "windows of up to"
    return f"{text.name} has {tokens} tokens, which make {len(windows)} {kind} {window_length} tokens"


def _cut(
    text: Source, tokenizer: Any, num_windows: int | None, window_length: int, *, take_short: bool
) -> tuple[list[TokenWindow], int]:
    """Windows and the number of tokens read; `take_short` = one short window of a running text that has no full one."""
    if isinstance(text, Samples):
        return _cut_samples(text, tokenizer, num_windows, window_length)
    ids = _running_ids(text, tokenizer, None if num_windows is None else num_windows * window_length)
    count = len(ids) // window_length
    if num_windows is not None:
        count = min(count, num_windows)
    kept = len(ids) if take_short and count == 0 else count * window_length
    return _split(ids[:kept], window_length), len(ids)


def _cut_samples(
    text: Samples, tokenizer: Any, num_windows: int | None, window_length: int
) -> tuple[list[TokenWindow], int]:
    windows: list[TokenWindow] = []
    available = 0
    for sample in text.samples:
        ids = _sample_ids(sample, tokenizer)
        available += len(ids)
        windows += _split(ids, window_length)
        if num_windows is not None and len(windows) >= num_windows:
            return windows[:num_windows], available
    return windows, available


def _split(ids: list[int], window_length: int) -> list[TokenWindow]:
    return [TokenWindow(tuple(ids[start : start + window_length])) for start in range(0, len(ids), window_length)]


def _running_ids(text: RunningText, tokenizer: Any, needed: int | None) -> list[int]:
    """Tokens of the joined documents, of as many as give `needed` tokens (None = all).

    Tokenizers may merge across a join, so the text read is always tokenized as one.
    """
    documents = iter(text.documents)
    if needed is None:
        return _tokenize("\n\n".join(documents), tokenizer)
    read: list[str] = []
    ids: list[int] = []
    wanted = _CHARACTERS_PER_TOKEN * needed
    while len(ids) < needed:
        more = list(_take(documents, wanted))
        if not more:
            break
        read += more
        ids = _tokenize("\n\n".join(read), tokenizer)
        wanted = sum(map(len, read))
    return ids


def _take(documents: Iterator[str], characters: int) -> Iterator[str]:
    """At least one document, and then on until there are that many characters."""
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return


def _tokenize(text: str, tokenizer: Any) -> list[int]:
    # verbose=False: a text longer than the model's context is meant, since it is cut afterwards.
    return list(tokenizer(text, verbose=False)["input_ids"])


def _sample_ids(sample: Sample, tokenizer: Any) -> list[int]:
    content = sample.content
    ids = _tokenize(content, tokenizer) if isinstance(content, str) else _render(content, sample.place, tokenizer)
    if not ids:
        raise CalibrationError(f"{sample.place}: holds no token")
    return ids


def _render(messages: list[Message], place: str, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"{place}: has 'messages', but the tokenizer has no chat template; "
            "use a model with one, or rows with 'text'"
        )
    # A template is a program that comes with the model; what it raises on messages it does not like is its own.
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    except Exception as error:
        raise CalibrationError(
            f"{place}: the chat template fails on these messages: {type(error).__name__}: {error}"
        ) from error
    return list(ids)
