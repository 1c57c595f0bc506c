"""Files on disk: written so that one that is there is whole (temporary name, fsync, rename), and their size."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a stream whose bytes appear under `path` when all is written and on disk, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def held_bytes(directory: Path) -> int:
    """Bytes of all files in a directory and below; 0 if there is none."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def fsync_directory(directory: Path) -> None:
    """Make renames in a directory durable; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
