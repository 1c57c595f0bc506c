"""SIGINT and SIGTERM end a command within two seconds, with exit code 130 or 143, whatever it is doing.

Three rules make that hold at any moment:

- While libraries are being imported or compiled, and while nothing is under way that wants to end in order, the
  handler ends the process itself. An exception there would end in half-made modules, wrong errors or a crash.
- While a command works (`working`), the first signal raises KeyboardInterrupt, so that files that are half written
  go. Whatever other error that becomes in a library, and even if it is swallowed, the command counts as interrupted.
- A thread is told of the signal by the C part of Python's handler. If the process is still there after
  `PATIENCE_SECONDS`, because one long operation is under way or the exception was swallowed, the thread ends it.

Ending at once is safe: every file appears by rename, and locks are the system's, so this is no more than a kill.

Nothing is imported here that is not built into Python or loaded by the time any program starts. The module `signal`
itself takes some milliseconds to import, in which Ctrl-C would be a traceback; so its built-in half is used.
"""

import _signal as signal  # type: ignore[import-not-found]
import _thread
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Any, NoReturn

    from hessquant.peers import Failure

INTERRUPTED: int = 128 + signal.SIGINT
PATIENCE_SECONDS = 1.4

_REFUSED = 2  # RefusedError.exit_code, which takes an import

_IMPORTING = "<frozen importlib"
_COMPILING = ("numba", "llvmlite")
_SHOW_CURSOR = "\x1b[?25h"
_STDOUT, _STDERR = 1, 2
# What a pipe takes without waiting once it takes anything.
_LONGEST_WRITE = 512


class Interrupted(Exception):
    """A signal ended the command."""


class Interrupts:
    """What becomes of signals while one command runs, in the main thread; elsewhere nothing can be handled.

    Attributes:
        number: The first signal that came; None so far.
        describe: What to say of an interruption.
        error_json: Makes the object that `--json` prints of it, from the exception's name, the message and the code.
        reported: Whether standard output has its object already.
        speaks: Whether this process says what has become of a run; one of several processes does.
        elsewhere: What failed in another process, of which the signal is only the echo.

    Args:
        owns_process: Whether the process is there for this command, so that ending it is right. Where it is another
            program's, signals raise KeyboardInterrupt, and what was handled before is again when the command is done.
        as_json: Whether standard output is to hold one JSON object.
    """

    def __init__(self, *, owns_process: bool, as_json: bool) -> None:
        self.number: int | None = None
        self.describe: Callable[[], str] = lambda: "interrupted"
        self.error_json: Callable[[str, str, int], str] = _error_json
        self.reported = not as_json
        self.speaks: Callable[[], bool] = lambda: True
        self.elsewhere: Callable[[], Failure | None] = lambda: None
        self._owns_process = owns_process
        self._works = False
        self._leaving = _thread.allocate_lock()
        self._before: dict[int, Any] = {}
        self._install()

    @property
    def code(self) -> int:
        """Exit code of an interrupted command; without a signal, somebody raised KeyboardInterrupt."""
        return INTERRUPTED if self.number is None else 128 + self.number

    def _install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            # Ignored, as by nohup: that stays. None: a handler that is not Python's, and could not be put back.
            if before is None or before == signal.SIG_IGN:
                continue
            try:
                self._before[number] = signal.signal(number, self._on_signal)
            except ValueError:
                return  # not the main thread
        if self._owns_process:
            reading, writing = os.pipe()
            if os.name != "nt":
                os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            _thread.start_new_thread(self._watch, (reading,))
            sys.unraisablehook = self._on_unraisable

    def remove(self) -> None:
        """Handle signals as before, in a process that goes on."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: "FrameType | None") -> None:
        if self.number is not None:
            return  # the first one has its way, within PATIENCE_SECONDS
        self.number = number
        if self._owns_process and (not self._works or _is_loading(frame)):
            self._leave()
        raise KeyboardInterrupt

    def _on_unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """An exception that nobody can catch, of a `__del__` say: an interrupt among them still ends the command."""
        if self.number is None:
            sys.__unraisablehook__(unraisable)
        elif isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._leave()

    def _watch(self, reading: int) -> None:
        while True:
            for number in os.read(reading, _LONGEST_WRITE):
                if number in self._before:
                    time.sleep(PATIENCE_SECONDS)
                    self.number = self.number or number
                    self._leave()

    def ending(self) -> "tuple[str, str, int, str]":
        """Exception's name, message, exit code, and what to say of it."""
        failure = self.elsewhere()
        if failure is None:
            message = self.describe()
            return "KeyboardInterrupt", message, self.code, message
        word = "refused" if failure.code == _REFUSED else "failed"
        return failure.kind, str(failure), failure.code, f"{word}: {failure}"

    def _leave(self) -> "NoReturn":
        """End the process now, from any thread; says why, unless that is being said or nobody reads it."""
        kind, message, code, say = "KeyboardInterrupt", "interrupted", self.code, "interrupted"
        if self._leaving.acquire(blocking=False):
            speaks = True
            try:
                kind, message, code, say = self.ending()
                speaks = self.speaks()
            except Exception:
                message = "interrupted"
            if os.isatty(_STDERR):
                _write(_STDERR, _SHOW_CURSOR)  # a progress bar hides it
            if speaks:
                _write(_STDERR, f"hessquant: {say}\n")
            if speaks and not self.reported:
                _write(_STDOUT, f"{self.error_json(kind, message, code)}\n")
        os._exit(code)

    def told(self) -> bool:
        """Whether an interruption is being told of already; from now on it counts as told."""
        return not self._leaving.acquire(blocking=False)

    def end(self, code: int) -> "NoReturn":
        """End the process when its command is done: taking down what was imported takes long, and is no safe place."""
        for stream in (sys.stdout, sys.stderr):
            try:
                if stream is not None:
                    stream.flush()
            except (OSError, ValueError):
                code = code or 3
        os._exit(code)

    def __enter__(self) -> None:
        """Work that wants to end in order begins."""
        self._works = True

    def __exit__(
        self, kind: "type[BaseException] | None", error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        """It has ended.

        Raises:
            Interrupted: If a signal came, whatever a library made of it.
        """
        self._works = False
        if self.number is not None or isinstance(error, KeyboardInterrupt):
            raise Interrupted from None


def _is_loading(frame: "FrameType | None") -> bool:
    """Whether a module is being imported, or a function compiled, at any depth."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__")).partition(".")[0]
        if frame.f_code.co_filename.startswith(_IMPORTING) or module in _COMPILING:
            return True
        frame = frame.f_back
    return False


def _write(descriptor: int, text: str) -> None:
    """Write where it does not have to wait for a reader."""
    content = text.encode(errors="replace")
    try:
        while content and (os.name == "nt" or select.select([], [descriptor], [], 0.1)[1]):
            content = content[os.write(descriptor, content[:_LONGEST_WRITE]) :]
    except (OSError, ValueError):
        return


def _error_json(kind: str, message: str, code: int) -> str:
    """Until there is the real one, no message needs its characters escaped."""
    return f'{{"error": {{"type": "{kind}", "message": "{message}", "exit_code": {code}}}}}'
