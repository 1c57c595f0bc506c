"""Headers of safetensors files and other JSON, from anywhere: checked by ourselves, so that an error names the tensor.

The library has the last word on whether a file is whole. It accepts a name twice, and does not say which tensor is bad.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from hessquant.errors import SourceError
from hessquant.records import TensorInfo

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

DTYPE_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Bytes per element of the dtypes that torch holds as they are."""

_MOST_JSON_BYTES = 100_000_000
"""What safetensors allows a header; no index and no config comes near it."""

_TOO_LARGE = 1 << 64

READ_ERRORS = (SafetensorError, OSError, MemoryError, RuntimeError)
"""Of reading a file; torch tells by the last that there is no memory."""


def read_entries(path: Path) -> dict[str, tuple[int, TensorInfo]]:
    """Every tensor of a safetensors file by name, with the byte that its data begin at; they leave no hole in the file.

    Raises:
        SourceError: If it is not so, or a dtype is not known; names the tensor.
    """
    try:
        with opened(path) as stream:
            size = path.stat().st_size
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(_MOST_JSON_BYTES, size - 8):
                raise ValueError(f"it has {size} bytes, and its header would have {length}")
            header = _parsed(stream.read(length), _named_once)
        described = header.items() if isinstance(header, dict) else ()
        entries = {name: _entry(path, name, what, 8 + length) for name, what in described if name != "__metadata__"}
        _check_places(entries.values(), 8 + length, size)
    except FileNotFoundError as error:
        raise SourceError(f"{path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise not_whole(path, error) from error
    return entries


def _entry(path: Path, name: str, described: Any, start: int) -> tuple[int, TensorInfo]:
    match described:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]} if all(
            type(number) is int and 0 <= number < _TOO_LARGE for number in (*shape, begin, end)
        ):
            if dtype not in DTYPE_BYTES:
                raise SourceError(f"{path.name}: tensor {name} has dtype {dtype}, which cannot be read")
            size = size_of(dtype, shape)
            if size != end - begin:
                raise ValueError(f"tensor {name} has {end - begin} bytes, but needs {size} by its dtype and shape")
            return start + begin, TensorInfo(name, tuple(shape), dtype, size, path.name)
    raise ValueError(f"what its header says of tensor {name} means nothing")


def _check_places(entries: Iterable[tuple[int, TensorInfo]], start: int, size: int) -> None:
    due = start
    for begin, info in sorted(entries, key=lambda entry: (entry[0], entry[1].bytes)):
        if begin != due:
            raise ValueError(f"tensor {info.name} begins at byte {begin}, but byte {due} is the next")
        due += info.bytes
        if due > size:
            raise ValueError(f"tensor {info.name} ends at byte {due}, the file at {size}")
    if due != size:
        raise ValueError(f"its last {size - due} bytes belong to no tensor")


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; where they are more than there can be, some number that is too large, at once."""
    size = DTYPE_BYTES[dtype]
    for count in shape:
        size = min(size * count, _TOO_LARGE)
    return size


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 [count]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _parsed(content: bytes, make_object: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """JSON that is text throughout; a surrogate on its own is JSON, but can be neither shown nor written."""
    value = json.loads(content.decode(), object_pairs_hook=make_object)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys; of two, some readers take the first and some the last."""
    named = dict(pairs)
    if len(named) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"its header names {name} twice")
    return named


def opened(path: Path) -> BufferedReader:
    """A file open for reading; not a pipe or a device, which might never end."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a regular file")
    return path.open("rb")


def not_whole(path: Path, error: Exception) -> SourceError:
    """The error for a file that cannot be read as safetensors."""
    return SourceError(f"{path.name} is not a whole safetensors file ({error}); fetch it again")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        SourceError: If it is missing, malformed or holds something else.
    """
    try:
        with opened(path) as stream:
            content = stream.read(_MOST_JSON_BYTES + 1)
        if len(content) > _MOST_JSON_BYTES:
            raise ValueError(f"it has more than {_MOST_JSON_BYTES} bytes")
        value = _parsed(content)
    except FileNotFoundError as error:
        raise SourceError(f"{path} is missing; is this a model directory?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value
