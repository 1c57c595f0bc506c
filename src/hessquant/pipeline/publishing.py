"""The end of every run that makes a checkpoint: it is written and verified; what completes it comes last."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hessquant import __version__
from hessquant.checkpoint.gguf_contents import gguf_fault
from hessquant.checkpoint.gguf_verify import verify_gguf
from hessquant.checkpoint.gguf_writer import write_gguf
from hessquant.checkpoint.reader import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TensorSource
from hessquant.checkpoint.verify import verify
from hessquant.checkpoint.writer import (
    GGUF_FILE,
    begin,
    complete,
    complete_gguf,
    withdraw,
    write_checkpoint,
    write_text,
)
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, PlanError
from hessquant.records import Plan, Progress, RunReport
from hessquant.report.html import PAGE_NAME, to_html
from hessquant.report.json_report import REPORT_NAME, from_json, to_json

REPORTS = (REPORT_NAME, PAGE_NAME)
"""Files beside a checkpoint that are written anew, never copied."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that has been written and verified, but does not pass for one yet.

    Attributes:
        verified: Quantized weights that were re-read and decoded to the solver's values.
    """

    verified: int
    _out: Path
    _complete: Callable[[], None]

    def complete(self, report: RunReport | None) -> None:
        """Make it a checkpoint to any reader, with the report of the run that quantized, if there is one, beside it.

        Raises:
            CheckpointError: If the disk is full or fails, or files that were written are gone.
        """
        if report is not None:
            write_text(self._out / REPORT_NAME, to_json(report))
            write_text(self._out / PAGE_NAME, to_html(report))
        self._complete()
        if not is_complete(self._out):
            withdraw(self._out)
            raise CheckpointError(
                f"{self._out}: files that were written and verified are no longer there; see what removes them, and "
                "repeat the command"
            )


def write_verified(
    out: Path,
    source: TensorSource,
    source_directory: Path,
    plan: Plan,
    quantized: Mapping[str, QuantizedWeight],
    output: Config,
    *,
    solved_with: Config | None,
    run: str,
    progress: Progress,
) -> Written:
    """Write a checkpoint, and re-read it by another decoder.

    Arguments and errors are those of `checkpoint.writer.write_checkpoint`; `progress` is told of both stages.

    Raises:
        VerificationError: If what was written decodes to anything else.
    """
    progress.stage("write", 1)
    if output.format == "gguf":
        # One file for all, the tokenizer in it. No reader takes it for a model by this name.
        draft = out / f".{GGUF_FILE}.unverified"
        begin(out, run)
        write_gguf(draft, source, source_directory, plan, quantized, __version__)
        check = partial(verify_gguf, draft, source, plan, quantized)
        reveal = partial(complete_gguf, out, draft)
    else:
        written = write_checkpoint(
            out,
            source,
            source_directory,
            plan,
            quantized,
            output,
            solved_with=solved_with,
            reports=REPORTS,
            run=run,
            version=__version__,
        )
        check = partial(verify, out, written, quantized, source, plan)
        reveal = partial(complete, out, written)
    progress.advance(out.name)
    progress.stage("verify", 1)
    verified = check()
    progress.advance(out.name)
    return Written(verified, out, reveal)


def report_in(directory: Path) -> RunReport | None:
    """The report of the run that made a directory; None if it holds none that can be read."""
    try:
        return from_json((directory / REPORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def refuse_form(config: Config, source: TensorSource, source_directory: Path, plan: Plan) -> None:
    """Refuse a model that has no form in the format, where that depends on more than its weights.

    Raises:
        PlanError: Saying why.
    """
    fault = gguf_fault(source.config, source_directory, plan) if config.format == "gguf" else None
    if fault is not None:
        raise PlanError(f"the gguf format cannot hold this model: {fault}")


def is_complete(out: Path) -> bool:
    """Whether a directory holds what only `Written.complete` puts there, and all files of weights that go with it."""
    if (out / GGUF_FILE).is_file():
        return True
    try:
        index = json.loads((out / INDEX_FILE).read_text(encoding="utf-8"))
        files = {str(file) for file in index["weight_map"].values()}
    except FileNotFoundError:
        files = {SINGLE_FILE}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((out / name).is_file() for name in (CONFIG_FILE, *files))


def digest(value: object) -> str:
    """SHA-256 of what JSON makes of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
