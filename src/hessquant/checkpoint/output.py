"""The output directory before anything is written to it: refused, held, marked."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hessquant.errors import CheckpointError, OutputError
from hessquant.files import HeldFile

RUN_MARK = ".hessquant-run"
"""Names the run that is writing a directory; gone when the checkpoint is complete."""

LOCK_FILE = ".hessquant-lock"
"""Held by the process that works on a directory; gone when it is done."""


@contextmanager
def holding(out: Path) -> Iterator[None]:
    """Inside, no other process works on an output directory, by whatever path it names it.

    The directory is made, since the lock is a file in it; where nothing is written to it, it goes again.

    Raises:
        OutputError: If another process works on it.
        CheckpointError: If it cannot be made or written to.
    """
    try:
        lock = HeldFile.take(out / LOCK_FILE)
    except OSError as error:
        raise CheckpointError(f"{error.filename or out}: writing failed: {error.strerror or error}") from error
    if lock is None:
        raise OutputError(f"{out} is being written by another process; wait for it, or choose another output")
    failed = True
    try:
        yield
        failed = False
    finally:
        lock.release(as_found=failed)


def refuse_output(out: Path, run: str | None, needed_bytes: int) -> None:
    """Check that an output directory can be made, or is empty, or was begun by the run that goes on.

    Args:
        out: The directory.
        run: The run's identity, which a directory that it began carries; None = any run's will do.
        needed_bytes: What will be written.

    Raises:
        OutputError: If it holds anything else, is no directory, cannot be written to, or has too little room.
    """
    nearest = nearest_existing(out)
    if not nearest.is_dir():
        raise OutputError(f"{nearest} is a file, so {out} cannot be a directory; choose another output")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{nearest} cannot be written to; choose another output or change its permissions")
    try:
        names = {path.name for path in out.iterdir()} if nearest == out else set()
    except OSError as error:
        raise OutputError(f"{out} cannot be read: {error.strerror}; choose another output") from error
    # A mark that was cut off while it was written is nobody's, and a lock says nothing of what is here.
    held = min(names - {f".{RUN_MARK}.partial", LOCK_FILE}, default=None)
    mark = _mark(out)
    if held is not None and (mark is None or run not in (None, mark)):
        raise OutputError(f"{out} is not empty (it holds {held}); remove it or choose another output")
    free = shutil.disk_usage(nearest).free
    if free < needed_bytes:
        raise OutputError(f"{needed_bytes} bytes will be written to {out}, but {free} are free; make room there")


def nearest_existing(path: Path) -> Path:
    """The path itself, or the first of its parents that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _mark(out: Path) -> str | None:
    try:
        return (out / RUN_MARK).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
