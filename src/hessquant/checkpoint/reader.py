"""Reading a checkpoint lazily: headers first, each tensor when it is asked for.

Only safetensors is read. Pickle files can run code and are refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath, PureWindowsPath
from threading import Lock
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from hessquant.checkpoint.header import (
    DTYPES,
    READ_ERRORS,
    not_whole,
    opened,
    read_entries,
    read_json,
    size_of,
)
from hessquant.errors import SourceError
from hessquant.records import TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"


class TensorSource(Protocol):
    """What a checkpoint is written from: tensors that are known by name and read one by one, and a config."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of its `config.json`."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, as stored."""


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
        self._handles: dict[str, Any] = {}
        # Tensors of a block are read by several threads.
        self._lock = Lock()
        self._closed = False

    def read(self, info: TensorInfo) -> Tensor:
        """Read one tensor, as stored.

        Raises:
            SourceError: If the file cannot be read.
        """
        try:
            tensor: Tensor = self._handle(info.file).get_tensor(info.name)
        except READ_ERRORS as error:
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
        count = info.shape[0]
        rows = max(1, most_bytes * count // info.bytes)
        path = self._directory / info.file
        try:
            # Not by the library: to give a slice, it reads the tensor whole, and it ends the process if there is no
            # memory for that.
            with opened(path) as stream:
                stream.seek(_place(path, info))
                for start in range(0, count, rows):
                    yield _read_next(stream, info.dtype, (min(rows, count - start), *info.shape[1:]))
        except READ_ERRORS as error:
            raise _unreadable(info, error) from error

    def _handle(self, file: str) -> Any:
        with self._lock:
            if self._closed:
                raise SourceError(f"{self._directory / file} has been closed")
            if file not in self._handles:
                self._handles[file] = _open(self._directory / file)
            return self._handles[file]

    def close(self) -> None:
        """Close every file; tensors already read stay valid.

        Transformers' loading code leaves threads behind when it is interrupted. A file that one of them is reading
        closes when that read ends: here it is only let go of, since safetensors cannot close a file in use.
        """
        with self._lock:
            self._closed = True
            self._handles.clear()


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
        self.config: Mapping[str, Any] = read_json(directory / CONFIG_FILE) if config is None else dict(config)
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
    why = str(error) or type(error).__name__  # a MemoryError says nothing more
    return SourceError(f"{info.file}: tensor {info.name} cannot be read: {why}")


def _place(path: Path, info: TensorInfo) -> int:
    """Where a tensor's data begin in its file."""
    entry = read_entries(path).get(info.name)
    if entry is None or (entry.dtype, entry.shape) != (info.dtype, info.shape):
        raise OSError("the file has changed since its header was read")
    return entry.begin


def _read_next(stream: BufferedReader, dtype: str, shape: tuple[int, ...]) -> Tensor:
    content = torch.empty(size_of(dtype, shape), dtype=torch.uint8)
    if stream.readinto(content.numpy().data) != len(content):
        raise OSError("the file ends in the midst of it")
    return content.view(DTYPES[dtype]).reshape(shape)


def take_inventory(directory: Path) -> Inventory:
    """Read all headers of a checkpoint and compare them with its index, both ways.

    Raises:
        SourceError: If there is no checkpoint to open, or its index is not one.
    """
    try:
        if not directory.is_dir():
            raise SourceError(f"{directory} is not a directory")
        weight_map = _weight_map(directory)
    except OSError as error:
        raise SourceError(f"{directory} cannot be read: {error}") from error
    promised: dict[str, set[str]] = {SINGLE_FILE: set()} if weight_map is None else {}
    for name, file in (weight_map or {}).items():
        promised.setdefault(file, set()).add(name)
    tensors: dict[str, TensorInfo] = {}
    faults: list[str] = []
    for file in promised:
        try:
            found = _read_header(directory / file)
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
            for name in sorted(promised[file] - {info.name for info in found})
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
        # A file name and nothing else, on any system: an index must not reach outside its directory. (A file may be a
        # link that does: the hub's cache is made of those.)
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


def _read_header(path: Path) -> list[TensorInfo]:
    """The tensors of a file; the library has the last word on whether it is whole, ours names the tensor."""
    entries = read_entries(path)
    with _open(path):
        pass
    return [
        TensorInfo(name, entry.shape, entry.dtype, entry.end - entry.begin, path.name)
        for name, entry in sorted(entries.items())
    ]


def _open(path: Path) -> Any:
    try:
        # Read, not mapped: a read that fails is an error, where a page that cannot be had kills the process.
        return safe_open(path, framework="pt", backend="pread")
    except FileNotFoundError as error:
        raise SourceError(f"{path.name} is missing") from error
    except READ_ERRORS as error:
        raise not_whole(path, error) from error
