"""A run's progress on the terminal: a bar where someone watches, a line now and then where nobody does."""

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, Self

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from hessquant.records import Plan
from hessquant.report.degraded import starving
from hessquant.report.units import format_bytes, format_ratio, format_seconds
from hessquant.results import LayerRecord

_LINES_PER_STAGE = 10
# Weights of a block differ in cost; the time left must average over whole blocks.
_SPEED_PERIOD_SECONDS = 600.0
_NAME_WIDTH = 26


def make_progress(console: Console, show: Callable[[Plan], None] | None = None) -> "BarProgress | LineProgress":
    """Choose the bar for a terminal, lines for a file or a pipe; enter the result to use it.

    Args:
        console: Where they are drawn.
        show: What is done with the plan.
    """
    return BarProgress(console, show) if console.is_terminal else LineProgress(console, show)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


class _Stages:
    """What both have in common: a stage that is done becomes a line on `console`, one that failed does not."""

    def __init__(self, console: Console, show: Callable[[Plan], None] | None = None) -> None:
        self._console, self._show = console, show
        self._name = ""
        self._started = 0.0
        self._first_experts: set[str] = set()
        self._experts: list[LayerRecord] = []

    def __enter__(self) -> Self:
        """Show nothing yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """End the last stage."""
        self._end(done=kind is None)

    def plan(self, plan: Plan) -> None:
        """Show it as was asked for."""
        if self._show is not None:
            self._show(plan)
        mixed = [target for target in plan.targets if target.may_be_skipped or target.module]
        self._first_experts = {target.name for target in mixed if target.block == mixed[0].block}

    def layer(self, record: LayerRecord) -> None:
        """Say it if the experts of the first block that has any see too few tokens."""
        if record.name in self._first_experts:
            self._experts.append(record)
            if len(self._experts) == len(self._first_experts) and (sentence := starving(self._experts)):
                self._print(sentence)

    def stage(self, name: str, steps: int) -> None:
        """End the stage before, and begin one of `steps` steps."""
        self._end(done=True)
        self._name, self._started = name, time.monotonic()

    def _end(self, *, done: bool) -> None:
        if self._name and done:
            self._print(f"{self._name}: done in {format_seconds(time.monotonic() - self._started)}")

    def _print(self, line: str) -> None:
        # Log files are read and searched by lines: never wrap one.
        self._console.print(Text(line), soft_wrap=True)


class BarProgress(_Stages):
    """Implements `hessquant.results.Progress` by one live bar on `console`."""

    def __init__(self, console: Console, show: Callable[[Plan], None] | None = None) -> None:
        super().__init__(console, show)
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

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """End the last stage, and give the terminal back."""
        super().__exit__(kind)
        self._bar.stop()

    def stage(self, name: str, steps: int) -> None:
        """Begin a new bar of `steps` steps."""
        super().stage(name, steps)
        self._bar.add_task(name, total=steps or None, weight="", error="", memory=format_bytes(resident_bytes()))
        self._bar.start()

    def advance(self, detail: str) -> None:
        """Move the bar on by one step and name it."""
        # The end of a name tells weights apart.
        name = detail.removesuffix(".weight")
        name = name if len(name) <= _NAME_WIDTH else "..." + name[3 - _NAME_WIDTH :]
        self._update(advance=1, weight=name, error="", memory=format_bytes(resident_bytes()))

    def layer(self, record: LayerRecord) -> None:
        """Show the error of the weight that was just quantized."""
        super().layer(record)
        self._update(error=f"{format_ratio(record.relative_to_rtn)} RTN")

    def _update(self, **shown: Any) -> None:
        for task in self._bar.task_ids:
            self._bar.update(task, **shown)

    def _end(self, *, done: bool) -> None:
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        super()._end(done=done)


class LineProgress(_Stages):
    """Implements `hessquant.results.Progress` by about ten plain lines per stage on `console`."""

    def stage(self, name: str, steps: int) -> None:
        """Print that a stage of `steps` steps begins."""
        super().stage(name, steps)
        self._steps, self._step = steps, 0
        self._errors: list[float] = []
        self._print(f"{name}: {steps} steps" if steps else f"{name}: begins")

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
            parts.append(f"mean error {format_ratio(fmean(self._errors))} of RTN's")
        self._print(f"{self._name}: {', '.join(filter(None, (*parts, format_bytes(resident_bytes()))))}")

    def layer(self, record: LayerRecord) -> None:
        """Take a weight's error into the mean that the next line gives."""
        super().layer(record)
        self._errors.append(record.relative_to_rtn)
