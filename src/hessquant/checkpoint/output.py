"""The output directory: refused, held and marked before anything is written to it, completed when all is verified."""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from hessquant.checkpoint.reader import CONFIG_FILE, TensorSource
from hessquant.checkpoint.sidecars import portable
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, OutputError
from hessquant.files import HeldFile, replacing
from hessquant.records import Plan

GGUF_FILE = "model.gguf"
"""The one file of a model in the gguf format."""

RUN_MARK = ".hessquant-run"
"""Names the run that is writing a directory; gone when the checkpoint is complete."""

LOCK_FILE = ".hessquant-lock"
"""Held by the process that works on a directory; gone when it is done."""


@dataclass(frozen=True)
class QuantizedModel:
    """What is written: a source with its targets replaced by quantized weights.

    Attributes:
        source: The checkpoint that the untouched tensors, the config and the files beside them come from.
        plan: What was decided.
        weights: Quantized weight per target name. Each is asked for when its turn has come, so a mapping that loads
            from disk keeps memory at one weight.
        output: Says the format and the size of its files.
        solved_with: Settings that the weights were solved with; None = not known.
        reports: Names of files that are written anew beside it, not copied from the source.
        version: Version to sign it with.
    """

    source: TensorSource
    plan: Plan
    weights: Mapping[str, QuantizedWeight]
    output: Config
    solved_with: Config | None
    reports: Collection[str]
    version: str

    @property
    def config(self) -> dict[str, Any]:
        """What its `config.json` says of the model: the source's, untied where the head gets a weight of its own.

        Where the source lay when it was saved is left out.
        """
        config = portable(self.source.config)
        return _untied(config) if self.plan.unties_head else config

    @cached_property
    def not_written(self) -> set[str]:
        """Tensors of the source that targets take the place of: stacks taken apart, other names of a target."""
        return {target.part_of for target in self.plan.targets} - {""} | set(self.plan.aliases)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _untied(value) for name, value in config.items() if name == "text_config"}
    # Stated even where it was not: some classes tie by default.
    return {**config, **inner, "tie_word_embeddings": False}


class Draft(Protocol):
    """A model on its way to a directory. Until it is revealed, no reader takes it for a checkpoint."""

    def write(self) -> None:
        """Write all but what makes it look complete.

        Raises:
            CheckpointError: If a weight has no place in the format, or the disk is full or fails.
        """

    def verify(self) -> int:
        """Check that what is written decodes to exactly what was solved, and that it holds nothing else.

        Returns:
            Quantized weights that were re-read and found equal.

        Raises:
            VerificationError: If anything differs; the message names the tensor.
        """

    def reveal(self) -> None:
        """Give it the last file, or the name, by which readers find it."""


class FormatDraft(Draft, Protocol):
    """One that is made in a format, of nothing but the model."""

    def __init__(self, out: Path, model: QuantizedModel) -> None:
        """Decide what is written where.

        Raises:
            PlanError: If the model has no form in the format.
            SourceError: If its files cannot be read.
            CheckpointError: If a weight has no place in the format.
        """

    @staticmethod
    def fault(source: TensorSource, plan: Plan) -> str | None:
        """Why a model has no form in the format, in one sentence, where that depends on more than its weights."""


@contextmanager
def holding(out: Path) -> Iterator[None]:
    """Inside, no other process works on an output directory, by whatever path it names it.

    The directory is made, since the lock is a file in it; where nothing is written to it, it goes again.

    Raises:
        OutputError: If another process works on it.
        CheckpointError: If it cannot be made or written to.
    """
    with writing(out):
        lock = HeldFile.take(out / LOCK_FILE)
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
    nearest = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
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


def _mark(out: Path) -> str | None:
    try:
        return (out / RUN_MARK).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def begin(out: Path, run: str) -> None:
    """Make a directory this run's; it does not pass for a checkpoint from now on.

    Raises:
        CheckpointError: If the disk is full or fails.
    """
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / RUN_MARK, run)
        withdraw(out)


@contextmanager
def completing(out: Path) -> Iterator[None]:
    """Inside, what makes a directory pass for a checkpoint appears; where anything fails, it goes again.

    Raises:
        CheckpointError: If the disk is full or fails.
    """
    with writing(out):
        try:
            yield
            (out / RUN_MARK).unlink()
        except OSError:
            withdraw(out)
            raise


def withdraw(out: Path) -> None:
    """Take away what makes a written directory pass for a sound checkpoint."""
    for name in (CONFIG_FILE, GGUF_FILE):
        (out / name).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell an operating system's error as one of ours."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: writing failed: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file; one that is there is whole."""
    with replacing(path) as stream:
        stream.write(text.encode())


def json_text(value: Mapping[str, Any]) -> str:
    """A value as the text of a JSON file."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
