"""One row of a .jsonl file or a hub data set -> a sample. What is not understood is refused, with its place.

A row that goes in without some of what it says is calibration on something else, and nothing would tell.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hessquant.errors import CalibrationError

Message = Mapping[str, Any]

_VARIABLES = "chat_template_kwargs"

OF_TEMPLATES = ("tools", "documents", _VARIABLES)
"""Keys of a conversation's row that are for the chat template."""

_KINDS = {
    "text": ("text", "images"),
    "messages": ("messages", "images", *OF_TEMPLATES),
    "source": ("source", "target"),
}
"""Keys that a row may have, by the one that says what it is."""

_KNOWN = tuple(dict.fromkeys(key for keys in _KINDS.values() for key in keys))


@dataclass(frozen=True)
class Sample:
    """What begins a window of its own.

    Attributes:
        place: Where it stands, for messages.
        content: A text or a conversation; of a pair, the source.
        target: What an encoder-decoder is to make of it; None where it is no pair.
        images: Files that belong to it.
        tools: Descriptions of tools, for the chat template.
        documents: Documents, likewise.
        template_variables: Other variables of the chat template by name.
    """

    place: str
    content: str | list[Message]
    target: str | None = None
    images: tuple[Path, ...] = ()
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    documents: list[Mapping[str, Any]] = field(default_factory=list)
    template_variables: Mapping[str, Any] = field(default_factory=dict)


def json_object(line: bytes, place: str) -> dict[str, Any]:
    """The object in a line of a .jsonl file.

    Raises:
        CalibrationError: If it is none, or says a key twice.
    """
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # also a UnicodeDecodeError
        raise CalibrationError(f"{place}: not a JSON object in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise CalibrationError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"the key {key!r} is there twice")
        row[key] = value
    return row


def sample_of_row(row: Mapping[str, Any], place: str, folder: Path) -> Sample:
    """A row of a .jsonl file; every key must have a meaning there. One whose value is null counts as absent.

    Args:
        row: The row.
        place: Where it stands.
        folder: What paths of images are relative to.

    Raises:
        CalibrationError: If the row cannot be used whole.
    """
    kinds = [kind for kind in _KINDS if row.get(kind) is not None]
    needed = "'text' or 'messages', or 'source' and 'target'"
    lacks_target = kinds == ["source"] and row.get("target") is None
    if lacks_target or not (kinds or (row.keys() & _KINDS.keys())):
        raise CalibrationError(f"{place}: found {_listed(row) or 'nothing'}, needs {needed}")
    if len(kinds) > 1:
        raise CalibrationError(
            f"{place}: has {' and '.join(map(repr, kinds))}, and only one of them can be calibrated on; "
            "remove the other"
        )
    unknown = [key for key in row if key not in _KNOWN]
    if unknown:
        raise CalibrationError(
            f"{place}: has {_listed(unknown)}, which is not understood; a row is {needed}, and may have 'images' or, "
            f"beside 'messages', {_listed(OF_TEMPLATES)}; remove it, or rename it if it is misspelt"
        )
    kind = kinds[0] if kinds else next(kind for kind in _KINDS if kind in row)
    idle = [key for key, value in row.items() if value is not None and key not in _KINDS[kind]]
    if idle:
        raise CalibrationError(f"{place}: has {_listed(idle)}, which means nothing beside {kind!r}; remove it")
    refuse_halves(row, place)
    if kind == "source":
        for key in _KINDS["source"]:
            fits = isinstance(row[key], str) and row[key].strip()
            _require(fits, row, key, "a text that is not empty", place)
        return Sample(place, row["source"], row["target"])
    if isinstance(row[kind], str) and not row[kind].strip():
        raise CalibrationError(f"{place}: the text is empty; remove the line or fill it")
    images = row.get("images") or []
    _require(_is_list_of(str, images) and all(images), row, "images", "a list of paths", place)
    return sample_of_column(row, kind, place, tuple(folder / image for image in images))


def sample_of_column(row: Mapping[str, Any], column: str, place: str, images: tuple[Path, ...] = ()) -> Sample:
    """The text or the conversation in one column of a row, with what the row has for the chat template.

    Raises:
        CalibrationError: If one of them has another form, or there is no conversation that a template could be for.
    """
    content = row[column]
    fits = isinstance(content, str) or (content and _is_list_of(Mapping, content))
    _require(fits, row, column, "a string or a list of messages", place)
    given = {key: row[key] for key in OF_TEMPLATES if key != column and row.get(key) is not None}
    if given and isinstance(content, str):
        raise CalibrationError(
            f"{place}: has {_listed(given)}, which is for a chat template, but its content is a text; give messages, "
            "or remove it"
        )
    tools, documents, variables = given.get("tools", []), given.get("documents", []), given.get(_VARIABLES, {})
    _require(isinstance(variables, Mapping), row, _VARIABLES, "an object", place)
    _require(_is_list_of(Mapping, tools), row, "tools", "a list of objects", place)
    _require(_is_list_of(Mapping, documents), row, "documents", "a list of objects", place)
    return Sample(place, content, None, images, tools, documents, variables)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _require(fits: object, row: Mapping[str, Any], key: str, form: str, place: str) -> None:
    if not fits:
        raise CalibrationError(f"{place}: {key!r} must be {form}, not {row[key]!r:.80}")


def refuse_halves(value: Any, place: str) -> None:
    """Refuse half of a character of two UTF-16 units, such as a cut emoji: no tokenizer takes it.

    Raises:
        CalibrationError: If there is one anywhere in the value.
    """
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, list):
            waiting += part
        elif isinstance(part, str):
            half = next((character for character in part if "\ud800" <= character <= "\udfff"), None)
            if half is not None:
                raise CalibrationError(
                    f"{place}: holds \\u{ord(half):04x}, half of a character, which is no text; remove it, or cut the "
                    "text elsewhere"
                )


def _listed(keys: Iterable[str]) -> str:
    # Keys come from a file: what is no character must not reach a terminal.
    return ", ".join(ascii(key) for key in keys)
