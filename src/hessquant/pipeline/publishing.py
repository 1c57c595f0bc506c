"""The end of every run that makes a checkpoint: it is written and verified; what completes it comes last."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hessquant import __version__
from hessquant.checkpoint.gguf_contents import gguf_fault
from hessquant.checkpoint.gguf_verify import verify_gguf
from hessquant.checkpoint.gguf_writer import write_gguf
from hessquant.checkpoint.reader import CONFIG_FILE, TensorSource
from hessquant.checkpoint.verify import verify
from hessquant.checkpoint.writer import GGUF_FILE, RUN_MARK, begin, complete, write_checkpoint, writing
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import PlanError
from hessquant.files import fsync_directory
from hessquant.records import Plan, Progress


@dataclass(frozen=True)
class Written:
    """A checkpoint that has been written and verified.

    Attributes:
        verified: Quantized weights that were re-read and decoded to the solver's values.
        complete: Makes it a checkpoint to any reader; called when all else is in the directory.
    """

    verified: int
    complete: Callable[[], None]


def write_verified(
    out: Path,
    source: TensorSource,
    source_directory: Path,
    plan: Plan,
    quantized: Mapping[str, QuantizedWeight],
    output: Config,
    *,
    solved_with: Config | None,
    reports: Collection[str],
    run: str,
    progress: Progress,
) -> Written:
    """Write a checkpoint, and re-read it by another decoder.

    Args:
        out: Directory to write; made if need be.
        source: What the untouched tensors and the config come from.
        source_directory: Directory whose other files are copied.
        plan: What was decided.
        quantized: Weight per target name.
        output: Says the format and the size of its files.
        solved_with: Settings that the weights were solved with; None = not known.
        reports: Names of files that are written anew, not copied.
        run: The run's identity.
        progress: Told of both stages.

    Raises:
        CheckpointError: If a weight has no place in the format, or the disk is full or fails.
        VerificationError: If what was written decodes to anything else.
    """
    progress.stage("write", 1)
    if output.format == "gguf":
        return _write_gguf(out, source, source_directory, plan, quantized, run, progress)
    written = write_checkpoint(
        out,
        source,
        source_directory,
        plan,
        quantized,
        output,
        solved_with=solved_with,
        reports=reports,
        run=run,
        version=__version__,
    )
    progress.advance(out.name)
    progress.stage("verify", 1)
    verified = verify(out, written, quantized, source, plan)
    progress.advance(out.name)
    return Written(verified, partial(complete, out, written))


def refuse_form(config: Config, source: TensorSource, source_directory: Path, plan: Plan) -> None:
    """Refuse a model that has no form in the format, where that depends on more than its weights.

    Raises:
        PlanError: Saying why.
    """
    fault = gguf_fault(source.config, source_directory, plan) if config.format == "gguf" else None
    if fault is not None:
        raise PlanError(f"the gguf format cannot hold this model: {fault}")


def is_complete(out: Path) -> bool:
    """Whether a directory holds what only `Written.complete` puts there."""
    return (out / CONFIG_FILE).is_file() or (out / GGUF_FILE).is_file()


def _write_gguf(
    out: Path,
    source: TensorSource,
    source_directory: Path,
    plan: Plan,
    quantized: Mapping[str, QuantizedWeight],
    run: str,
    progress: Progress,
) -> Written:
    """One file for all; the tokenizer is in it, so nothing else is copied."""
    begin(out, run)
    # No reader takes it for a model by this name.
    draft = out / f".{GGUF_FILE}.unverified"
    write_gguf(draft, source, source_directory, plan, quantized, __version__)
    progress.advance(out.name)
    progress.stage("verify", 1)
    verified = verify_gguf(draft, source, plan, quantized)
    progress.advance(out.name)

    def complete_file() -> None:
        with writing(out):
            draft.replace(out / GGUF_FILE)
            fsync_directory(out)
            (out / RUN_MARK).unlink()

    return Written(verified, complete_file)


def digest(value: object) -> str:
    """SHA-256 of what JSON makes of a value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
