"""The end of every run that makes a checkpoint: it is written and verified; what completes it comes last."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hessquant.checkpoint.gguf_writer import GgufDraft
from hessquant.checkpoint.output import (
    GGUF_FILE,
    Draft,
    FormatDraft,
    QuantizedModel,
    begin,
    completing,
    withdraw,
    write_text,
    writing,
)
from hessquant.checkpoint.reader import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, TensorSource
from hessquant.checkpoint.writer import SafetensorsDraft
from hessquant.errors import CheckpointError, PlanError
from hessquant.formats import DIALECTS
from hessquant.records import Plan
from hessquant.report.html import PAGE_NAME, to_html
from hessquant.report.json_report import REPORT_NAME, from_json, to_json
from hessquant.results import Progress, RunReport

REPORTS = (REPORT_NAME, PAGE_NAME)
"""Files beside a checkpoint that are written anew, never copied."""


_DRAFTS: Mapping[str, type[FormatDraft]] = {**dict.fromkeys(DIALECTS, SafetensorsDraft), "gguf": GgufDraft}
"""By the name that `--format` takes."""


@dataclass(frozen=True)
class Written:
    """A checkpoint that has been written and verified, but does not pass for one yet.

    Attributes:
        verified: Quantized weights that were re-read and decoded to the solver's values.
    """

    verified: int
    _out: Path
    _draft: Draft

    def complete(self, report: RunReport | None) -> None:
        """Make it a checkpoint to any reader, with the report of the run that quantized, if there is one, beside it.

        Raises:
            CheckpointError: If the disk is full or fails, or files that were written are gone.
        """
        if report is not None:
            for name, text in ((REPORT_NAME, to_json(report)), (PAGE_NAME, to_html(report))):
                with writing(self._out / name):
                    write_text(self._out / name, text)
        with completing(self._out):
            self._draft.reveal()
        if not is_complete(self._out):
            withdraw(self._out)
            raise CheckpointError(
                f"{self._out}: files that were written and verified are no longer there; see what removes them, and "
                "repeat the command"
            )


def draft_of(out: Path, model: QuantizedModel) -> Draft:
    """A model on its way to a directory, in the format that is asked for."""
    return _DRAFTS[model.output.format](out, model)


def write_verified(out: Path, draft: Draft, run: str, progress: Progress) -> Written:
    """Write a checkpoint, and re-read it by another decoder.

    Args:
        out: Directory to write; made if need be.
        draft: What is written there.
        run: The run's identity; the directory carries it until it is complete.
        progress: Told of both stages.

    Raises:
        CheckpointError: If a weight has no place in the format, or the disk is full or fails.
        VerificationError: If what was written decodes to anything else.
    """
    progress.stage("write", 1)
    begin(out, run)
    draft.write()
    progress.advance(out.name)
    progress.stage("verify", 1)
    verified = draft.verify()
    progress.advance(out.name)
    return Written(verified, out, draft)


def report_in(directory: Path) -> RunReport | None:
    """The report of the run that made a directory; None if it holds none that can be read."""
    try:
        return from_json((directory / REPORT_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def refuse_form(output_format: str, source: TensorSource, plan: Plan) -> None:
    """Refuse a model that has no form in the format, where that depends on more than its weights.

    Raises:
        PlanError: Saying why.
    """
    fault = _DRAFTS[output_format].fault(source, plan)
    if fault is not None:
        raise PlanError(f"the {output_format} format cannot hold this model: {fault}")


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
