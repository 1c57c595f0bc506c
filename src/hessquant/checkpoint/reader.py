"""Reading a checkpoint lazily: headers first, each tensor when it is asked for.

Only safetensors is read. Pickle files can run code and are refused by name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from operator import itemgetter
from pathlib import Path, PurePosixPath, PureWindowsPath
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from hessquant.checkpoint.header import DTYPES, READ_ERRORS, not_whole, opened, read_entries, read_json, size_of
from hessquant.errors import SourceError
from hessquant.records import PLAIN, SourceForm, TensorInfo

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"

_WARMED = 1 << 20
"""Bytes that are read at once where nothing is kept."""


class TensorSource(Protocol):
    """What a checkpoint is written from: tensors that are known by name and read one by one, a config, other files."""

    @property
    def directory(self) -> Path:
        """Where the files beside its weights lie."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of its `config.json`."""

    def read(self, name: str) -> Tensor:
        """Read one tensor, in the dtype that `tensors` says."""


class WeightSource(TensorSource, Protocol):
    """What a model is quantized from: its tensors in 16 or 32 bit, however they are stored.

    This is the wall between the files of a source and everything else.
    """

    @property
    def form(self) -> SourceForm:
        """How they are stored, as far as that is not how they are seen."""

    @property
    def stored(self) -> "StoredFiles":
        """What is in the files: its config and its bytes are the source's identity."""

    def parts(self, name: str) -> tuple[str, ...]:
        """Names of the stored tensors that make one; its own where it is stored as it is seen."""

    def decode(self, name: str) -> Tensor:
        """Read one tensor exactly: float32 where it is dequantized, and else as stored."""

    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """The same in pieces along its first dimension, each of `most_bytes` or of what cannot be parted."""

    def warm(self, names: Iterable[str], stopped: Callable[[], bool]) -> None:
        """Read what makes these tensors and keep nothing (`CheckpointReader.warm`)."""


class StoredFiles(WeightSource, Protocol):
    """Files of weights that are open for reading, their tensors as they are stored."""

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """Read one tensor in pieces of so many rows."""


@dataclass(frozen=True)
class Inventory:
    """What the headers of a checkpoint's files say.

    Attributes:
        tensors: Every tensor by name, in the order of the files.
        faults: One sentence per contradiction between index, files and headers.
    """

    tensors: Mapping[str, TensorInfo]
    faults: tuple[str, ...]


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """A safetensors checkpoint, open for reading; a tensor is read when it is asked for.

    Attributes:
        directory: Where it lies.
        tensors: Every tensor by name.
        config: Its `config.json`, or what was given in its place.
        faults: One sentence per contradiction between index, files and headers; none unless `faulty`.
        form: That tensors are seen as they are stored.

    Args:
        directory: Where it lies.
        config: Read it by this config, whether it has a `config.json` or not.
        faulty: Open it with whatever faults there are.

    Raises:
        SourceError: If a file is missing, incomplete or contradicts the others.
    """

    form: SourceForm = PLAIN

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None, *, faulty: bool = False) -> None:
        inventory = take_inventory(directory)
        self.directory, self.tensors, self.faults = directory, inventory.tensors, inventory.faults
        if self.faults and not faulty:
            more = f" (and {len(self.faults) - 1} more faults)" if len(self.faults) > 1 else ""
            raise SourceError(f"{directory}: {self.faults[0]}{more}")
        self.config: Mapping[str, Any] = read_json(directory / CONFIG_FILE) if config is None else dict(config)
        self._handles: dict[str, Any] = {}
        # Tensors of a block are read by several threads.
        self._lock = Lock()
        self._closed = False

    def read(self, name: str) -> Tensor:
        """Read one tensor, as stored.

        Raises:
            SourceError: If there is no such tensor, or its file cannot be read.
        """
        info = self.tensors.get(name)
        if info is None:
            raise SourceError(f"{self.directory}: there is no tensor {name}")
        with _naming(info):
            tensor: Tensor = self._handle(info.file).get_tensor(name)
        return tensor

    @property
    def stored(self) -> "CheckpointReader":
        """Itself."""
        return self

    def parts(self, name: str) -> tuple[str, ...]:
        """Its own name."""
        return (name,)

    def decode(self, name: str) -> Tensor:
        """Read one tensor, as stored (`read`)."""
        return self.read(name)

    def chunks(self, name: str, most_bytes: int) -> Iterator[Tensor]:
        """Read one tensor in pieces along its first dimension, each of `most_bytes` or of one row.

        Raises:
            SourceError: If its file cannot be read.
        """
        info = self.tensors[name]
        if not info.shape or info.bytes <= most_bytes:
            yield self.read(name)
            return
        yield from self.pieces(name, max(1, most_bytes * info.shape[0] // info.bytes))

    def pieces(self, name: str, rows: int) -> Iterator[Tensor]:
        """Read one tensor, which has dimensions, in pieces of so many along its first one.

        Raises:
            SourceError: If its file cannot be read.
        """
        info = self.tensors[name]
        count = info.shape[0]
        path = self.directory / info.file
        # Not by the library: to give a slice, it reads the tensor whole, and it ends the process if there is no memory
        # for that.
        with _naming(info), opened(path) as stream:
            begin, now = read_entries(path).get(name, (0, None))
            if now != info:
                raise OSError("the file has changed since its header was read")
            stream.seek(begin)
            for start in range(0, count, rows):
                yield _read_next(stream, info.dtype, (min(rows, count - start), *info.shape[1:]))

    def warm(self, names: Iterable[str], stopped: Callable[[], bool]) -> None:
        """Read tensors and keep nothing, so that the system has them in its cache, if there is room.

        Args:
            names: Those tensors.
            stopped: Whether to leave off; asked for every `_WARMED` bytes.

        Raises:
            SourceError: If a file is not what it was.
            OSError: If it cannot be read.
        """
        of_file: dict[str, list[str]] = {}
        for name in names:
            of_file.setdefault(self.tensors[name].file, []).append(name)
        scratch = memoryview(bytearray(_WARMED))
        for file, members in of_file.items():
            path = self.directory / file
            entries = read_entries(path)
            with opened(path) as stream:
                for begin, info in sorted((entries[name] for name in members), key=itemgetter(0)):
                    stream.seek(begin)
                    for start in range(0, info.bytes, _WARMED):
                        if stopped():
                            return
                        stream.readinto(scratch[: info.bytes - start])

    def _handle(self, file: str) -> Any:
        with self._lock:
            if self._closed:
                raise SourceError(f"{self.directory / file} has been closed")
            if file not in self._handles:
                self._handles[file] = _open(self.directory / file)
            return self._handles[file]

    def close(self) -> None:
        """Close every file; tensors already read stay valid.

        Transformers' loading code leaves threads behind when it is interrupted. A file that one of them is reading
        closes when that read ends: here it is only let go of, since safetensors cannot close a file in use.
        """
        with self._lock:
            self._closed = True
            self._handles.clear()

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _naming(info: TensorInfo) -> Iterator[None]:
    """Tell an error of reading a tensor as one of ours."""
    try:
        yield
    except READ_ERRORS as error:
        why = str(error) or type(error).__name__  # a MemoryError says nothing more
        raise SourceError(f"{info.file}: tensor {info.name} cannot be read: {why}") from error


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
            held = _read_header(directory / file)
        except SourceError as error:
            faults.append(str(error))
            continue
        for name, info in held.items():
            if name in tensors:
                faults.append(f"tensor {name} is in both {tensors[name].file} and {file}")
                continue
            tensors[name] = info
            if weight_map is not None and name not in weight_map:
                faults.append(f"tensor {name} is in {file} but not in {INDEX_FILE}")
        faults.extend(
            f"{INDEX_FILE} says that {file} holds tensor {name}, but it does not"
            for name in sorted(promised[file] - held.keys())
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


def _read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file; the library has the last word on whether it is whole, ours names the tensor."""
    entries = read_entries(path)
    with _open(path):
        return {name: info for name, (_, info) in sorted(entries.items())}


def _open(path: Path) -> Any:
    try:
        # Read, not mapped: a read that fails is an error, where a page that cannot be had kills the process.
        return safe_open(path, framework="pt", backend="pread")
    except FileNotFoundError as error:
        raise SourceError(f"{path.name} is missing") from error
    except READ_ERRORS as error:
        raise not_whole(path, error) from error
