"""Where calibration and evaluation text comes from: built in, a file, or the Hugging Face Hub.

A source is either one running text, which is cut into windows from its start, or samples, each of which
begins a window of its own.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hessquant.calibration.builtin import Part, builtin_text
from hessquant.errors import CalibrationError

Message = Mapping[str, Any]

_IMAGES = b'"images"'
_ACCEPTED = "'builtin', a .txt file, a .jsonl file, or hub:ID[:CONFIG[:SPLIT[:COLUMN]]]"


@dataclass(frozen=True)
class RunningText:
    """Documents that are joined by blank lines and cut as one text.

    Attributes:
        name: Name for records and messages; no folders.
        documents: The documents in order, read lazily.
    """

    name: str
    documents: Iterable[str]


@dataclass(frozen=True)
class Sample:
    """What begins a window of its own.

    Attributes:
        place: Where it stands, for messages.
        content: A text or a conversation; of a pair, the source.
        target: What an encoder-decoder is to make of it; None where it is no pair.
        images: Files that belong to it.
    """

    place: str
    content: str | list[Message]
    target: str | None = None
    images: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Samples:
    """Samples in order, read lazily, under a name for records and messages."""

    name: str
    samples: Iterable[Sample]


Source = RunningText | Samples


def open_source(source: str, part: Part, seed: int = 0) -> Source:
    """Find the text that `source` names.

    Args:
        source: "builtin", a .txt file, a .jsonl file, or "hub:ID[:CONFIG[:SPLIT[:COLUMN]]]".
        part: Which part of the built-in text; no other source has parts.
        seed: Order of the built-in documents; files and hub data sets are read in order.

    Raises:
        CalibrationError: If there is no such source, or it cannot be read. Samples are read lazily, so a bad one
            raises when it is reached.
    """
    if source == "builtin":
        return RunningText("builtin", (builtin_text(part, seed),))
    if source.startswith("hub:"):
        return _hub(source)
    path = Path(source)
    reader = {".txt": _text_file, ".jsonl": _jsonl_file}.get(path.suffix.lower())
    if reader is None:
        raise CalibrationError(f"cannot read text from {source!r}; accepted are {_ACCEPTED}")
    if not path.is_file():
        raise CalibrationError(f"there is no file {source!r}; accepted are {_ACCEPTED}")
    return reader(path)


def _text_file(path: Path) -> Source:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read {path} as UTF-8 text: {error}") from error
    return RunningText(path.name, (text,))


def _jsonl_file(path: Path) -> Source:
    return Samples(path.name, _jsonl_samples(path))


def _jsonl_samples(path: Path) -> Iterator[Sample]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield _sample(_json_object(line, place), place, path.parent)
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error}") from error


def may_have_images(source: str) -> bool:
    """Whether a source names images, so that it must be read to know what the model will run on."""
    path = Path(source)
    if path.suffix.lower() != ".jsonl" or not path.is_file():
        return False
    try:
        with path.open("rb") as lines:
            return any(_IMAGES in line for line in lines)
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error}") from error


def _sample(row: Mapping[str, Any], place: str, folder: Path) -> Sample:
    if {"source", "target"} <= row.keys() and not {"text", "messages"} & row.keys():
        return Sample(place, _text(row, "source", place), _text(row, "target", place))
    content = _content(row, place, alternative=", or 'source' and 'target'")
    if isinstance(content, str) and not content.strip():
        raise CalibrationError(f"{place}: the text is empty; remove the line or fill it")
    images = row.get("images") or []
    if not isinstance(images, list) or not all(isinstance(image, str) and image for image in images):
        raise CalibrationError(f"{place}: 'images' must be a list of paths, not {images!r:.80}")
    return Sample(place, content, images=tuple(folder / image for image in images))


def _text(row: Mapping[str, Any], column: str, place: str) -> str:
    text = row[column]
    if not isinstance(text, str) or not text.strip():
        raise CalibrationError(f"{place}: {column!r} must be a text that is not empty, not {text!r:.80}")
    return text


def _json_object(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # also a UnicodeDecodeError
        raise CalibrationError(f"{place}: not a JSON object in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise CalibrationError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


def _content(
    row: Mapping[str, Any], place: str, column: str | None = None, alternative: str = ""
) -> str | list[Message]:
    """The text or the conversation in a row: `column` if it is given, else "messages", else "text"."""
    needed = f"'text' or 'messages'{alternative}" if column is None else repr(column)
    if column is None:
        column = "messages" if "messages" in row else "text"
    if column not in row:
        found = ", ".join(map(repr, row)) or "nothing"
        raise CalibrationError(f"{place}: found {found}, needs {needed}")
    content = row[column]
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(message, Mapping) for message in content):
        return content
    raise CalibrationError(f"{place}: {column!r} must be a string or a list of messages, not {content!r:.80}")


def _hub(source: str) -> Source:
    """Text rows of a hub data set are a running text (many sets have a row per line); conversations are samples."""
    rows = _hub_samples(source)
    first = next(rows, None)
    if first is None:
        raise CalibrationError(f"{source}: the data set has no rows")
    rows = itertools.chain((first,), rows)
    if isinstance(first.content, str):
        return RunningText(source, _texts(rows))
    return Samples(source, rows)


def _texts(samples: Iterable[Sample]) -> Iterator[str]:
    for sample in samples:
        if not isinstance(sample.content, str):
            raise CalibrationError(f"{sample.place}: a conversation among rows of text")
        yield sample.content


def _hub_samples(source: str) -> Iterator[Sample]:
    name, config, split, column, *rest = (*source.removeprefix("hub:").split(":"), "", "", "")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or any(rest):
        raise CalibrationError(f"{source!r} is not of the form hub:ID[:CONFIG[:SPLIT[:COLUMN]]]")
    for number, row in enumerate(_stream(source, name, config or None, split or "train")):
        place = f"{source}, row {number}"
        yield Sample(place, _content(row, place, column or None))


def _stream(source: str, name: str, config: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise CalibrationError(f"{source} needs the datasets library: pip install 'hessquant[hub]'") from error
    # The library raises whatever its storage and network layers raise, so every exception is taken for a reason.
    try:
        yield from datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:
        raise CalibrationError(
            f"cannot read {source} from the hub: {type(error).__name__}: {error}; "
            "check the name and the network, or save the text as a .txt or .jsonl file and name that"
        ) from error
