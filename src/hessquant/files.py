"""Files on disk: written so that one that is there is whole (temporary name, fsync, rename), their size, and locks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

_TRIES = 100


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


class HeldFile:
    """A lock file that this process holds until it is released, or until the process ends, however it ends.

    The system's lock is on the file, not on its name. One that was removed between being opened and being locked keeps
    nobody out: so it is looked whether the name still leads to what was locked.
    """

    def __init__(self, path: Path, lock: FileLock, *, found: bool, made: list[Path]) -> None:
        self._path, self._lock, self._found, self._made = path, lock, found, made

    @classmethod
    def take(cls, path: Path) -> "HeldFile | None":
        """Lock a file, which is made with its folders if need be; None if another process holds it.

        Raises:
            OSError: If it cannot be made.
        """
        folder = path.absolute().parent
        made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
        gone: OSError | None = None
        for _ in range(_TRIES):
            gone = None
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock, found = _Lock(path), path.exists()
                lock.acquire(timeout=0)
            except Timeout:
                return None
            except (FileNotFoundError, FileExistsError) as error:
                gone = error  # its last holder has removed the folder meanwhile, or it is no folder
                continue
            except OSError:
                _remove_empty(made)
                raise
            if lock.has_its_name():
                return cls(path, lock, found=found, made=made)
            lock.release()
        if gone is not None:
            raise gone
        return None  # others come and go

    def release(self, *, as_found: bool) -> None:
        """Let go of it and remove it, and the folders that were made for it if nothing else is in them.

        What cannot be removed is only in the way, and is taken over by the next.

        Args:
            as_found: Leave one that was there before, of a process that was killed: nothing was done here.
        """
        in_use = False
        try:
            if not (as_found and self._found):
                # While it is held: removed later, it could be the lock of a process that has come meanwhile.
                self._path.unlink(missing_ok=True)
        except OSError as error:
            in_use = isinstance(error, PermissionError)
        self._lock.release()
        if in_use:
            # Windows removes no open file: now not ours, and after the release not that of another process.
            with suppress(OSError):
                self._path.unlink()
        _remove_empty(self._made)


class _Lock(FileLock):
    def has_its_name(self) -> bool:
        held = self._context.lock_file_fd
        try:
            return held is not None and os.path.samestat(os.fstat(held), os.stat(self.lock_file))  # noqa: PTH116
        except FileNotFoundError:
            return False


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, innermost first, as long as nothing is in them."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()
