"""Where calibration and evaluation text comes from: built in, a file, or the Hugging Face Hub.

A source is either one running text, which is cut into windows from its start, or samples, each of which
begins a window of its own.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hessquant.calibration.builtin import Part, builtin_text
from hessquant.calibration.rows import OF_TEMPLATES, Sample, json_object, refuse_halves, sample_of_column, sample_of_row
from hessquant.errors import CalibrationError

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
    kind = path.suffix.lower()
    if kind not in (".txt", ".jsonl"):
        raise CalibrationError(f"cannot read text from {source!r}; accepted are {_ACCEPTED}")
    if not path.is_file():
        raise CalibrationError(f"there is no file {source!r}; accepted are {_ACCEPTED}")
    return RunningText(path.name, (_text(path),)) if kind == ".txt" else Samples(path.name, _samples(path))


def may_have_images(source: str) -> bool:
    """Whether a source names images, so that it must be read to know what the model will run on."""
    path = Path(source)
    return path.suffix.lower() == ".jsonl" and path.is_file() and any(_IMAGES in line for line in _lines(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise CalibrationError(f"cannot read {path} as UTF-8 text: line {line}: {error}") from error
    except OSError as error:
        raise CalibrationError(f"cannot read {path} as UTF-8 text: {error}") from error


def _samples(path: Path) -> Iterator[Sample]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield sample_of_row(json_object(line, place), place, path.parent)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as lines:
            yield from lines
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error}") from error


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


def hub_parts(source: str) -> tuple[str, str, str, str]:
    """Id, config, split and column of a data set, empty where they are not said.

    Raises:
        CalibrationError: If the name has another form.
    """
    name, config, split, column, *rest = (*source.removeprefix("hub:").split(":"), "", "", "")
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or any(rest):
        raise CalibrationError(f"{source!r} is not of the form hub:ID[:CONFIG[:SPLIT[:COLUMN]]]")
    return name, config, split, column


def _hub_samples(source: str) -> Iterator[Sample]:
    name, config, split, column = hub_parts(source)
    for number, row in enumerate(_stream(source, name, config or None, split or "train")):
        yield _hub_sample(row, column, f"{source}, row {number}")


def _hub_sample(row: Mapping[str, Any], column: str, place: str) -> Sample:
    """A row of a data set, which has columns for other uses: those that mean nothing here are left alone.

    Where no column is named, though, what belongs to a conversation is not dropped: it goes to the template, or is
    refused.
    """
    content = column or ("messages" if row.get("messages") is not None or "text" not in row else "text")
    if content not in row:
        columns, needed = ", ".join(map(repr, row)) or "nothing", repr(column) if column else "'text' or 'messages'"
        raise CalibrationError(f"{place}: found {columns}, needs {needed}")
    alone = column or isinstance(row[content], str)
    if not alone and row.get("images"):
        raise CalibrationError(
            f"{place}: has 'images', which are read from files alone; save the rows as a .jsonl file with paths, or "
            "name the column 'messages' to calibrate on the talk without them"
        )
    taken = {key: row[key] for key in (content, *(() if alone else OF_TEMPLATES)) if key in row}
    refuse_halves(taken, place)
    return sample_of_column(taken, content, place)


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
