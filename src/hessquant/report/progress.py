"""A run's progress on the terminal: a bar where someone watches, a line now and then where nobody does."""

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from hessquant.report.units import format_bytes, format_ratio, format_seconds
from hessquant.results import LayerRecord

_STATM = Path("/proc/self/statm")
_LINES_PER_STAGE = 10
# Weights of a block differ in cost; the time left must average over whole blocks.
_SPEED_PERIOD_SECONDS = 600.0
_NAME_WIDTH = 26


def make_progress(console: Console) -> "BarProgress | LineProgress":
    """Choose the bar for a terminal, lines for a file or a pipe; enter the result to use it."""
    return BarProgress(console) if console.is_terminal else LineProgress(console)


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system has no /proc."""
    if not _STATM.exists():
        return None
    pages = int(_STATM.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class BarProgress:
    """Implements `hessquant.results.Progress` by one live bar on `console`; finished stages become lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=8)),
            TextColumn("{task.percentage:>3.0f}%", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[weight]}", markup=False, table_column=Column(no_wrap=True, min_width=_NAME_WIDTH)),
            TextColumn("{task.fields[error]}", markup=False, table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[memory]}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            speed_estimate_period=_SPEED_PERIOD_SECONDS,
        )
        self._task: TaskID | None = None
        self._name = ""
        self._started = 0.0

    def __enter__(self) -> Self:
        """Draw nothing yet: the bar appears with the first stage."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away; a stage that failed gets no "done" line."""
        self._close(finished=error is None)
        self._bar.stop()

    def stage(self, name: str, steps: int) -> None:
        """Begin a new bar of `steps` steps."""
        self._close(finished=True)
        self._name, self._started = name, time.monotonic()
        self._task = self._bar.add_task(name, total=steps or None, weight="", error="", memory=_memory())
        self._bar.start()

    def advance(self, detail: str) -> None:
        """Move the bar on by one step and name it."""
        if self._task is not None:
            self._bar.update(self._task, advance=1, weight=_short(detail), error="", memory=_memory())

    def layer(self, record: LayerRecord) -> None:
        """Show the error of the weight that was just quantized."""
        if self._task is not None:
            error = f"{format_ratio(record.relative_to_rtn)} RTN"
            self._bar.update(self._task, weight=_short(record.name), error=error)

    def _close(self, finished: bool) -> None:
        if self._task is None:
            return
        self._bar.remove_task(self._task)
        self._task = None
        if finished:
            self._console.print(_done(self._name, self._started))


class LineProgress:
    """Implements `hessquant.results.Progress` by about ten plain lines per stage on `console`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name = ""
        self._steps = 0
        self._step = 0
        self._started = 0.0
        self._errors: list[float] = []

    def __enter__(self) -> Self:
        """Print nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say that the last stage is done, unless it failed."""
        if self._name and error is None:
            self._print(_done(self._name, self._started))

    def stage(self, name: str, steps: int) -> None:
        """Print that a stage of `steps` steps begins."""
        if self._name:
            self._print(_done(self._name, self._started))
        self._name, self._steps, self._step = name, steps, 0
        self._started = time.monotonic()
        self._errors = []
        self._print(Text(f"{name}: {steps} steps" if steps else f"{name}: begins"))

    def advance(self, detail: str) -> None:
        """Count a step; print a line when it completes another tenth of the stage."""
        self._step += 1
        before, now = (step * _LINES_PER_STAGE // max(self._steps, 1) for step in (self._step - 1, self._step))
        if now == before or self._step >= self._steps:
            return
        elapsed = time.monotonic() - self._started
        left = elapsed / self._step * (self._steps - self._step)
        parts = [f"{100 * self._step // self._steps} %", f"{format_seconds(left)} left", detail]
        if self._errors:
            parts.append(f"mean error {format_ratio(sum(self._errors) / len(self._errors))} of RTN's")
        self._print(Text(f"{self._name}: {', '.join(part for part in (*parts, _memory()) if part)}"))

    def layer(self, record: LayerRecord) -> None:
        """Take a weight's error into the mean that the next line gives."""
        self._errors.append(record.relative_to_rtn)

    def _print(self, line: Text) -> None:
        # Log files are read and searched by lines: never wrap one.
        self._console.print(line, soft_wrap=True)


def _done(stage: str, started: float) -> Text:
    return Text(f"{stage}: done in {format_seconds(time.monotonic() - started)}")


def _memory() -> str:
    resident = resident_bytes()
    return "" if resident is None else format_bytes(resident)


def _short(name: str) -> str:
    """Keep the end of a name, which tells weights apart."""
    name = name.removesuffix(".weight")
    return name if len(name) <= _NAME_WIDTH else "..." + name[3 - _NAME_WIDTH :]
