"""How the processes of one run learn that one of them has failed, so that all end within seconds, with one message.

Who fails says so in the store that all of them reach, before it leaves. Who dies without a word is missed: by its
process id on this machine, by its heartbeat on another. A thread of each process looks for both. Where it finds
something, the process ends as on SIGTERM (`hessquant.interrupts`): in order if it can, and soon if it is stuck waiting
for who will not come. The lowest rank that is left speaks for all.

Knows no torch: the command line asks at any moment.
"""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from hessquant.errors import HessquantError, PeerError

_INTERVAL = 0.2
"""Seconds between two looks."""

_HEARTBEAT_PATIENCE, _BROKEN_PATIENCE = 30.0, 3.0
"""Seconds that another machine's process may be silent: as a rule, and once an exchange with it has failed."""

_TOLD_PATIENCE, _END_PATIENCE = 10.0, 3.0
"""Seconds that who has failed waits for the speaker to know, and that a process which is stuck gets to end."""

INTERRUPTED = "KeyboardInterrupt"


class Store(Protocol):
    """What all processes of a run read and write; torch's `TCPStore` is one. Raises RuntimeError if it is gone."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """A value; waits for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether there are values for all of these."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if there is another or, for an empty one, none; the value afterwards."""


@dataclass(frozen=True)
class Failure:
    """Why a run ended.

    Attributes:
        rank: The process that failed first.
        kind: Name of the exception's class.
        message: What it says.
        code: Exit code of every process.
    """

    rank: int
    kind: str
    message: str
    code: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


class Peers:
    """The other processes of a run, as long as it goes on.

    Attributes:
        failure: Why the run ends; None so far.

    Args:
        store: Reached by all, with keys of this run alone.
        rank: Number of this process.
        count: How many there are; all of them make one of these.
    """

    def __init__(self, store: Store, rank: int, count: int) -> None:
        self.failure: Failure | None = None
        self._store, self._rank, self._count = store, rank, count
        self._speaker = 0
        self._gone: set[int] = set()
        self._ended = threading.Event()
        here = _machine()
        store.set(f"beat/{rank}", "")
        store.set(f"at/{rank}", json.dumps([here, os.getpid()]))
        at = {other: json.loads(store.get(f"at/{other}")) for other in range(count) if other != rank}
        self._pids = {other: pid for other, (machine, pid) in at.items() if machine == here}
        now = time.monotonic()
        self._beats = {other: (b"", now) for other in at if other not in self._pids}
        self._thread = threading.Thread(target=self._watch, name="hessquant-peers", daemon=True)
        self._thread.start()

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that says what has become of the run."""
        return self._rank == self._speaker

    def end(self) -> None:
        """Look for the others no longer."""
        self._ended.set()
        self._thread.join()

    def fail(self, error: BaseException) -> Failure:
        """Say that this process fails; gives what failed first, here or elsewhere.

        Args:
            error: Why. If it is that others cannot be reached, what became of them is looked for.
        """
        self._ended.set()
        lost = isinstance(error, PeerError)
        until = time.monotonic() + (2 * _BROKEN_PATIENCE if lost else 0)
        while not self._look(_BROKEN_PATIENCE if lost else _HEARTBEAT_PATIENCE) and time.monotonic() < until:
            time.sleep(_INTERVAL)
        interrupted = isinstance(error, KeyboardInterrupt)
        code = 130 if interrupted else error.exit_code if isinstance(error, HessquantError) else 3
        kind = INTERRUPTED if interrupted else type(error).__name__
        said = str(error) if isinstance(error, HessquantError) else f"{kind}: {error}"
        failure = self.failure or self._declare(Failure(self._rank, kind, "interrupted" if interrupted else said, code))
        self._settle(failure)
        return failure

    def _settle(self, failure: Failure) -> None:
        """Settle who says it: the lowest rank that is left. Who has failed stays until one takes notice, or says it."""
        until = time.monotonic() + _TOLD_PATIENCE
        stays = failure.rank == self._rank and failure.kind != INTERRUPTED
        try:
            while True:
                if self._store.check(["speaker"]):
                    self._speaker = int(self._store.get("speaker"))
                    return
                if self._is_lowest() or time.monotonic() > until:
                    self._speaker = int(self._store.compare_set("speaker", "", str(self._rank)))
                    return
                if not stays:
                    return
                time.sleep(_INTERVAL / 2)
                self._look(_HEARTBEAT_PATIENCE)
        except RuntimeError:  # the store went with the first machine: each other one says so
            self._speaker = min([self._rank, *(set(self._pids) - self._gone)])

    def _is_lowest(self) -> bool:
        return self._rank == min(set(range(self._count)) - self._gone, default=self._rank)

    def _declare(self, failure: Failure) -> Failure:
        """Make a failure the one that the run ends of, if there was none before; gives that one."""
        with suppress(RuntimeError):  # the store went with the first machine: there is nobody to tell
            failure = Failure(**json.loads(self._store.compare_set("failed", "", json.dumps(asdict(failure)))))
        self.failure = failure
        return failure

    def _look(self, patience: float) -> bool:
        """Look for a failure; whether there is one."""
        self._gone |= {other for other, pid in self._pids.items() if not _is_alive(pid)}
        try:
            if self._store.check(["failed"]):
                self.failure = Failure(**json.loads(self._store.get("failed")))
                return True
            now = time.monotonic()
            self._store.set(f"beat/{self._rank}", str(now))
            for other, (beat, since) in self._beats.items():
                heard = self._store.get(f"beat/{other}")
                self._beats[other] = (beat, since) if heard == beat else (heard, now)
                if now - self._beats[other][1] > patience:
                    self._gone.add(other)
        except RuntimeError:
            message = "the store of its machine cannot be reached any more; see what became of that machine"
            self._declare(Failure(0, PeerError.__name__, message, PeerError.exit_code))
            return True
        if self._gone:
            message = "it ended without a word: killed, by a lack of memory perhaps, or its machine is lost"
            self._declare(Failure(min(self._gone), PeerError.__name__, message, PeerError.exit_code))
        return bool(self._gone)

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            if self._look(_HEARTBEAT_PATIENCE) and self.failure and not self._ended.is_set():
                self._settle(self.failure)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(_END_PATIENCE)
                # Nobody handles it, or an exchange that waits for the other has held it up.
                os._exit(self.failure.code)


_PEERS: list[Peers] = []


def remember(peers: Peers) -> None:
    """Let `failure` and `speaks` be about the processes of this run from now on."""
    _PEERS[:] = [peers]


def failure() -> Failure | None:
    """Why this run ended, if a process of several has failed and was not interrupted; looks once more."""
    if not _PEERS:
        return None
    found = _PEERS[0].failure or _PEERS[0].fail(KeyboardInterrupt())
    return None if found.kind == INTERRUPTED else found


def speaks() -> bool:
    """Whether this process is the one that says what has become of the run; a process by itself is."""
    if _PEERS:
        return _PEERS[0].speaks
    return int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("RANK", "0") == "0"


def processes_here() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 1


def _machine() -> str:
    """Where process ids mean the same."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        # One that has ended is there until whoever started it has taken notice.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return True
