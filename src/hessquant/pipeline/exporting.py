"""Exporting: a finished checkpoint -> plan -> the same codes in another format."""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from hessquant import __version__
from hessquant.checkpoint.gguf_base import GgufBase
from hessquant.checkpoint.gguf_map import map_rows
from hessquant.checkpoint.gguf_onto_base import BasedGgufDraft
from hessquant.checkpoint.inspect import inspect_checkpoint
from hessquant.checkpoint.output import Draft, QuantizedModel, holding, refuse_output
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.sidecars import refuse_sidecars
from hessquant.checkpoint.unpacked import UnpackedCheckpoint
from hessquant.config import Config
from hessquant.core.grid import QuantizedWeight
from hessquant.errors import CheckpointError, ConfigError, PlanError, SourceError
from hessquant.formats import OUTPUTS
from hessquant.formats.names import module_of
from hessquant.models.source import ModelSource, title_of
from hessquant.pipeline.publishing import REPORTS, digest, draft_of, refuse_form, report_in, write_verified
from hessquant.planning.plan import plan_export
from hessquant.records import Plan
from hessquant.report.json_report import built
from hessquant.results import SILENT, ExportReport, Progress, RunReport


def export(
    checkpoint: Path | str,
    out: Path | str,
    config: Config,
    *,
    base: Path | str | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a quantized checkpoint in another format, without quantizing again.

    Args:
        checkpoint: A directory in one of our dialects, whoever wrote it.
        out: Directory to write; absent, empty, or begun by the same export.
        config: Says the format, the size of output files, and which servers must open it; nothing else counts.
        base: For the gguf format, llama.cpp's conversion of the model before it was quantized: what is written is this
            file with the quantized weights in it. None = a GGUF file is made of the checkpoint alone.
        progress: Told of the plan and of every stage.

    Returns:
        What was done. The report of the run that quantized, if there is one, is in `out` too.

    Raises:
        RefusedError: Before anything is written, if the format cannot hold the checkpoint exactly.
        FailedError: If it fails on the way; `out` then does not pass for a checkpoint.
    """
    out, checkpoint, progress = Path(out), Path(checkpoint), progress or SILENT
    started = time.perf_counter()
    onto = _opened(base, config)
    with CheckpointReader(checkpoint) as reader:
        unpacked = UnpackedCheckpoint(reader)
        source = ModelSource(str(checkpoint), checkpoint, config.trust_remote_code)
        plan = plan_export(source, unpacked.tensors, unpacked.packed, config)
        if onto is None:
            refuse_form(config.format, unpacked, plan)
        progress.plan(plan)
        run = _identity(reader, config, onto)
        refuse_sidecars(checkpoint, out, REPORTS)
        # Looked at before anything is made, and again when no other process can change it.
        refuse_output(out, run, plan.output_bytes)
        with holding(out):
            refuse_output(out, run, plan.output_bytes)
            _refuse_faulty(checkpoint, config)
            _refuse_inexact(unpacked, config, progress)
            solved = report_in(checkpoint)
            result = QuantizedModel(unpacked, plan, unpacked, config, _solved_with(solved), REPORTS, __version__)
            draft, size = _drafted(out, result, unpacked, onto, progress)
            plan = replace(plan, output_bytes=size)
            refuse_output(out, run, size)
            written = write_verified(out, draft, run, progress)
            written.complete(None if solved is None else _retold(solved, plan, config, written.verified))
    return ExportReport(
        version=__version__,
        plan=plan,
        source_format=unpacked.settings.variant,
        format=config.format,
        verified_tensors=written.verified,
        output_bytes=plan.output_bytes,
        seconds=time.perf_counter() - started,
    )


def _identity(reader: CheckpointReader, config: Config, onto: GgufBase | None) -> str:
    """Of what is in the files, but for the values: all is written again anyway."""
    held = [asdict(info) for info in reader.tensors.values()]
    written_onto = [] if onto is None else [onto.identity()]
    return digest(["export", __version__, config.format, config.shard_bytes, reader.config, held, *written_onto])


def _solved_with(solved: RunReport | None) -> Config | None:
    """Settings of a run; those of another version's that we have no name for are left out."""
    return None if solved is None else built(Config, solved.settings)


def _drafted(
    out: Path, result: QuantizedModel, unpacked: UnpackedCheckpoint, onto: GgufBase | None, progress: Progress
) -> tuple[Draft, int]:
    """What is to be written, and the bytes of its tensors."""
    if onto is None:
        return draft_of(out, result), result.plan.output_bytes
    draft = BasedGgufDraft(out, result, onto, map_rows(onto, unpacked, progress))
    return draft, draft.bytes


def _opened(base: Path | str | None, config: Config) -> GgufBase | None:
    if base is None:
        return None
    if config.format != "gguf":
        raise ConfigError(f"a base is for the gguf format; leave --base out for {config.format}")
    return GgufBase(Path(base))


def _refuse_faulty(checkpoint: Path, config: Config) -> None:
    """What `inspect` finds fault with is not written on: the codes would be exact, and what they stand for is not."""
    faults = inspect_checkpoint(checkpoint, trust_remote_code=config.trust_remote_code).faults
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise SourceError(f"{checkpoint.name} cannot be exported, since inspect finds fault with it: {faults[0]}{more}")


def _refuse_inexact(weights: Mapping[str, QuantizedWeight], config: Config, progress: Progress) -> None:
    """Read every weight once before any is written: its values may have no place in the format."""
    progress.stage("read", len(weights))
    for name in weights:
        try:
            OUTPUTS[config.format].stored_scales(weights[name].grid)
        except CheckpointError as error:
            named = str(error).removeprefix(f"{module_of(name)}: ")
            raise PlanError(f"{name} cannot be written as {config.format}: {named}") from error
        progress.advance(name)


def _retold(solved: RunReport, plan: Plan, config: Config, verified: int) -> RunReport:
    """The report of the run that quantized, of the checkpoint as it is now."""
    return replace(
        solved,
        settings={**solved.settings, "format": config.format, "shard_bytes": config.shard_bytes},
        plan=replace(plan, source=title_of(solved.plan.source), memory_bytes=solved.plan.memory_bytes),
        output_bytes=plan.output_bytes,
        verified_tensors=verified,
    )
