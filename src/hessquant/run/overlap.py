"""What goes on beside the segment at work: the next one is read, and what was solved of the last one is stored."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from types import TracebackType
from typing import Self

Warm = Callable[[Sequence[str], Callable[[], bool]], None]

_PATIENCE = 1.0
"""Seconds that a process which is to end gives to what is being stored; the next one clears away what is left of it."""


class Overlap:
    """Two threads beside the caller's: one reads, one stores. Leaving it ends both.

    What is read ahead is not kept: it is in the system's cache then, which has room for it or has not, and a segment's
    weights are taken from there. So no more than one segment is in this process's memory.

    Args:
        warm: Reads tensors of the checkpoint and keeps nothing, until it is told to stop.
    """

    def __init__(self, warm: Warm) -> None:
        self._warm = warm
        self._reader = ThreadPoolExecutor(1, "hessquant-reads")
        self._storer = ThreadPoolExecutor(1, "hessquant-stores")
        self._stored: Future[None] | None = None
        self._stop = Event()

    def read_ahead(self, tensors: Sequence[str]) -> None:
        """Begin to read tensors of the checkpoint, after those that are being read; none waits for it."""
        # Whoever needs a tensor that cannot be read will read it himself, and say what is wrong.
        self._reader.submit(self._warm, tensors, self._stop.is_set)

    def store(self, work: Callable[[], None]) -> None:
        """Begin to store something, when what was to be stored before is; one thing waits in memory at most.

        Raises:
            CheckpointError: If that could not be stored.
        """
        if self._stored is not None:
            self._stored.result()
        self._stored = self._storer.submit(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See that all is stored, unless the process is to end; an error that is on its way comes before others."""
        self._stop.set()
        at_once = kind is not None and not issubclass(kind, Exception)
        self._reader.shutdown(wait=not at_once, cancel_futures=True)
        if at_once and self._stored is not None:
            wait([self._stored], _PATIENCE)
        self._storer.shutdown(wait=not at_once)
        if self._stored is not None and kind is None:
            self._stored.result()
