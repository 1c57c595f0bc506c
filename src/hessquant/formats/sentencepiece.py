"""Pieces of a sentencepiece model file, read without its library: a protocol buffer of which two fields matter."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from hessquant.errors import SourceError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _PREFIX = 3, 3
_BPE, _NORMAL = 2, 1
_VARINT, _WORD64, _BYTES, _WORD32 = 0, 1, 2, 5


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


@dataclass(frozen=True)
class Pieces:
    """A model's pieces by their ids, and whether it puts a space in front of text."""

    pieces: tuple[Piece, ...]
    space_prefix: bool


def read_model(content: bytes) -> Pieces:
    """Read a sentencepiece model.

    Raises:
        SourceError: If it is none, or not one of the BPE type.
    """
    pieces: list[Piece] = []
    model_type, prefix = 1, True
    try:
        for field, value in _fields(content):
            if field == _PIECES and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif field == _TRAINER and isinstance(value, bytes):
                model_type = next((v for f, v in _fields(value) if f == _MODEL_TYPE and isinstance(v, int)), model_type)
            elif field == _NORMALIZER and isinstance(value, bytes):
                prefix = bool(next((v for f, v in _fields(value) if f == _PREFIX and isinstance(v, int)), prefix))
    except (ValueError, IndexError, struct.error) as error:
        raise SourceError(f"tokenizer.model is not a whole sentencepiece model ({error}); fetch it again") from error
    if not pieces:
        raise SourceError("tokenizer.model is not a sentencepiece model: it holds no pieces")
    if model_type != _BPE:
        raise SourceError(f"tokenizer.model is a sentencepiece model of type {model_type}, not BPE (2)")
    return Pieces(tuple(pieces), prefix)


def _piece(content: bytes) -> Piece:
    text, score, kind = "", 0.0, _NORMAL
    for field, value in _fields(content):
        if field == _TEXT and isinstance(value, bytes):
            text = value.decode()
        elif field == _SCORE and isinstance(value, float):
            score = value
        elif field == _KIND and isinstance(value, int):
            kind = value
    return Piece(text, score, kind)


def _fields(content: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Number and value of every field of a message."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        field, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, place = _varint(content, place)
            yield field, value
        elif wire == _WORD32:
            yield field, struct.unpack_from("<f", content, place)[0]
            place += 4
        elif wire == _WORD64:
            yield field, struct.unpack_from("<d", content, place)[0]
            place += 8
        elif wire == _BYTES:
            length, place = _varint(content, place)
            if place + length > len(content):
                raise ValueError(f"a field ends at byte {place + length}, the message at {len(content)}")
            yield field, content[place : place + length]
            place += length
        else:
            raise ValueError(f"a field has wire type {wire}")


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        octet = content[place]
        place += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value, place
    raise ValueError("a number has more than ten bytes")
