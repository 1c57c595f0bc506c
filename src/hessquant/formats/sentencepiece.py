"""Pieces of a sentencepiece model file, read without its library: a protocol buffer of which two fields matter."""

import struct
from dataclasses import dataclass
from typing import Any

from hessquant.errors import SourceError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _PREFIX = 3, 3
_BPE, _NORMAL = 2, 1
_VARINT, _BYTES = 0, 2
_NUMBERS = {1: struct.Struct("<d"), 5: struct.Struct("<f")}


@dataclass(frozen=True)
class Piece:
    """One token.

    Attributes:
        text: Its text, with spaces as U+2581.
        score: Of two pieces that text can be joined to, the one with the higher score is.
        kind: 1 = normal, 2 = unknown, 3 = control, 4 = user defined, 5 = unused, 6 = byte; as in GGUF.
    """

    text: str
    score: float
    kind: int


def read_model(content: bytes) -> tuple[list[Piece], bool]:
    """Read a sentencepiece model: its pieces by their ids, and whether it puts a space in front of text.

    Raises:
        SourceError: If it is none, or not one of the BPE type.
    """
    try:
        model = _fields(content)
        found = [_fields(piece) for piece in model.get(_PIECES, ()) if isinstance(piece, bytes)]
        pieces = [
            Piece(_last(piece, _TEXT, b"").decode(), _last(piece, _SCORE, 0.0), _last(piece, _KIND, _NORMAL))
            for piece in found
        ]
        model_type = _last(_fields(_last(model, _TRAINER, b"")), _MODEL_TYPE, 1)
        prefix = bool(_last(_fields(_last(model, _NORMALIZER, b"")), _PREFIX, 1))
    except (ValueError, IndexError, struct.error) as error:
        raise SourceError(f"tokenizer.model is not a whole sentencepiece model ({error}); fetch it again") from error
    if not pieces:
        raise SourceError("tokenizer.model is not a sentencepiece model: it holds no pieces")
    if model_type != _BPE:
        raise SourceError(f"tokenizer.model is a sentencepiece model of type {model_type}, not BPE (2)")
    return pieces, prefix


def _last(fields: dict[int, list[Any]], number: int, default: Any) -> Any:
    """The last value of a field that is of the default's type, which counts; the default where there is none."""
    return next((value for value in reversed(fields.get(number, ())) if isinstance(value, type(default))), default)


def _fields(content: bytes) -> dict[int, list[Any]]:
    """The values of a message by the numbers of its fields: whole numbers, floats and bytes."""
    found: dict[int, list[Any]] = {}
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        value: int | float | bytes
        if key & 7 == _VARINT:
            value, place = _varint(content, place)
        elif key & 7 == _BYTES:
            length, place = _varint(content, place)
            value, place = content[place : place + length], place + length
            if place > len(content):
                raise ValueError(f"a field ends at byte {place}, the message at {len(content)}")
        elif key & 7 in _NUMBERS:
            (value,) = _NUMBERS[key & 7].unpack_from(content, place)
            place += _NUMBERS[key & 7].size
        else:
            raise ValueError(f"a field has wire type {key & 7}")
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """A whole number of up to ten bytes, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        octet = content[place]
        place += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value, place
    raise ValueError("a number has more than ten bytes")
