"""Reading a checkpoint lazily: headers first, each tensor when it is asked for.

Only safetensors is read. Pickle files can run code and are refused by name.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hessquant.errors import SourceError
from hessquant.records import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of the dtypes that torch holds as they are."""


@dataclass(frozen=True)
class Inventory:
    """What the headers of a checkpoint's files say.

    Attributes:
        tensors: Every tensor by name, in the order of the files.
        faults: One sentence per contradiction between index, files and headers.
    """

    tensors: Mapping[str, TensorInfo]
    faults: tuple[str, ...]


class ShardFiles:
    """Open safetensors files of one directory; a tensor is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        # Tensors of a block are read by several threads.
        self._lock = Lock()

    def read(self, info: TensorInfo) -> Tensor:
        """Read one tensor, as stored.

        Raises:
            SourceError: If the file cannot be read.
        """
        try:
            tensor: Tensor = self._handle(info.file).get_tensor(info.name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(info, error) from error
        return tensor

    def chunks(self, info: TensorInfo, most_bytes: int) -> Iterator[Tensor]:
        """Read one tensor in pieces along its first dimension, each of `most_bytes` or of one row.

        Raises:
            SourceError: If the file cannot be read.
        """
        if not info.shape or info.bytes <= most_bytes:
            yield self.read(info)
            return
        rows = max(1, most_bytes * info.shape[0] // info.bytes)
        for start in range(0, info.shape[0], rows):
            stop = min(start + rows, info.shape[0])
            try:
                piece: Tensor = self._handle(info.file).get_slice(info.name)[start:stop]
            except (SafetensorError, OSError) as error:
                raise _unreadable(info, error) from error
            yield piece

    def _handle(self, file: str) -> Any:
        with self._lock:
            if file not in self._handles:
                self._handles[file] = self._stack.enter_context(_open(self._directory / file))
            return self._handles[file]

    def close(self) -> None:
        """Close every file; tensors already read stay valid."""
        self._handles.clear()
        self._stack.close()


class CheckpointReader:
    """A sound safetensors checkpoint, open for reading.

    Attributes:
        directory: Where it lies.
        tensors: Every tensor by name.
        config: Its `config.json`, or what was given in its place.

    Args:
        directory: Where it lies.
        config: Read it by this config, whether it has a `config.json` or not.

    Raises:
        SourceError: If a file is missing, incomplete or contradicts the others.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None) -> None:
        inventory = take_inventory(directory)
        if inventory.faults:
            more = f" (and {len(inventory.faults) - 1} more faults)" if len(inventory.faults) > 1 else ""
            raise SourceError(f"{directory}: {inventory.faults[0]}{more}")
        self.directory = directory
        self.tensors: Mapping[str, TensorInfo] = inventory.tensors
        self.config = read_json(directory / CONFIG_FILE) if config is None else dict(config)
        self._files = ShardFiles(directory)

    def read(self, name: str) -> Tensor:
        """Read one tensor, as stored.

        Raises:
            SourceError: If there is no such tensor, or its file cannot be read.
        """
        info = self.tensors.get(name)
        if info is None:
            raise SourceError(f"{self.directory}: there is no tensor {name}")
        return self._files.read(info)

    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """Read one tensor in pieces, as `ShardFiles.chunks`."""
        return self._files.chunks(self.tensors[name], most_bytes)

    def close(self) -> None:
        """Close every file; tensors already read stay valid."""
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unreadable(info: TensorInfo, error: Exception) -> SourceError:
    return SourceError(f"{info.file}: tensor {info.name} cannot be read: {error}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        SourceError: If it is missing, malformed or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceError(f"{path} is missing; is this a model directory?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def take_inventory(directory: Path) -> Inventory:
    """Read all headers of a checkpoint and compare them with its index, both ways.

    Raises:
        SourceError: If there is no checkpoint to open, or its index is not one.
    """
    if not directory.is_dir():
        raise SourceError(f"{directory} is not a directory")
    weight_map = _weight_map(directory)
    files = list(dict.fromkeys(weight_map.values())) if weight_map is not None else [SINGLE_FILE]
    tensors: dict[str, TensorInfo] = {}
    faults: list[str] = []
    for file in files:
        try:
            found = _read_header(directory, file)
        except SourceError as error:
            faults.append(str(error))
            continue
        for info in found:
            if info.name in tensors:
                faults.append(f"tensor {info.name} is in both {tensors[info.name].file} and {file}")
                continue
            tensors[info.name] = info
            if weight_map is not None and info.name not in weight_map:
                faults.append(f"tensor {info.name} is in {file} but not in {INDEX_FILE}")
        faults.extend(
            f"{INDEX_FILE} says that {file} holds tensor {name}, but it does not"
            for name in sorted({n for n, f in (weight_map or {}).items() if f == file} - {info.name for info in found})
        )
    return Inventory(MappingProxyType(tensors), tuple(faults))


def _weight_map(directory: Path) -> dict[str, str] | None:
    """The index's tensor -> file map; None if the checkpoint is one file."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.exists():
        if not single.exists():
            raise SourceError(_nothing_to_read(directory))
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        # A file name and nothing else, on any system: an index must not reach outside its directory.
        if not isinstance(file, str) or file in ("", ".", "..") or PureWindowsPath(file).name != file:
            raise SourceError(f"{index} puts tensor {name} in {file!r}, which is not a plain file name")
        if PurePosixPath(file).suffix != ".safetensors":
            raise SourceError(f"{index} puts tensor {name} in {file}, which is not a safetensors file")
    if single.exists() and SINGLE_FILE not in weight_map.values():
        raise SourceError(
            f"{directory} holds both {SINGLE_FILE} and shards; clients differ in which they read: remove one"
        )
    return weight_map


def _nothing_to_read(directory: Path) -> str:
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickled:
        return f"{directory} holds only pickle weights ({pickled[0]}), which can run code; convert it to safetensors"
    return f"{directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}"


def _read_header(directory: Path, file: str) -> list[TensorInfo]:
    infos = []
    with _open(directory / file) as handle:
        for name in handle.keys():  # noqa: SIM118 -- not a dict
            header = handle.get_slice(name)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            if dtype not in DTYPE_BYTES:
                raise SourceError(f"{file}: tensor {name} has dtype {dtype}, which cannot be read")
            infos.append(TensorInfo(name, shape, dtype, math.prod(shape) * DTYPE_BYTES[dtype], file))
    return infos


def _open(path: Path) -> Any:
    try:
        # Read, not mapped: a read that fails is an error, where a page that cannot be had kills the process.
        return safe_open(path, framework="pt", backend="pread")
    except FileNotFoundError as error:
        raise SourceError(f"{path.name} is missing") from error
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path.name} is not a whole safetensors file ({error}); fetch it again") from error
