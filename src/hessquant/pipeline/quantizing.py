"""Quantizing: source -> plan -> windows -> blocks -> checkpoint -> verification -> report."""

import json
import platform
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from hessquant import __version__
from hessquant.calibration.calibration import Calibration
from hessquant.checkpoint.audit import ScaleCheck, audit
from hessquant.checkpoint.output import RUN_MARK, QuantizedModel, holding, refuse_output
from hessquant.checkpoint.reader import WeightSource
from hessquant.checkpoint.sidecars import refuse_sidecars
from hessquant.config import Config
from hessquant.files import held_bytes
from hessquant.memory import map_large_blocks, peak_memory
from hessquant.models.source import ModelSource
from hessquant.models.stream import StreamedModel
from hessquant.pipeline.planning import planned
from hessquant.pipeline.publishing import REPORTS, digest, draft_of, is_complete, report_in, write_verified
from hessquant.planning.size import tokens_per_batch
from hessquant.ranks import Ranks, joined
from hessquant.records import Plan
from hessquant.report.degraded import degradations, text_degradations
from hessquant.results import SILENT, CalibrationRecord, ProcessRecord, Progress, RunReport
from hessquant.run.loop import Outcome, quantize_segments
from hessquant.run.store import RunStore

_FREE_OF_RESULT = (
    "activation_memory",
    "capture",
    "max_unquantized",
    "requantize",
    "serve",
    "target_bits",
    "target_bytes",
    "trust_remote_code",
)
"""Settings that do not change the result, so that a run may go on with others; a target does by its overrides."""

_OF_THE_PLACE = ("device", "forward_dtype")
"""Settings that the place where the model runs comes of, which is what the result depends on."""

_OF_THE_OUTPUT = ("format", "shard_bytes")
"""Settings that only say how the result is written, so that finished blocks serve others too."""


def quantize(
    model: str,
    out: Path | str,
    config: Config | None = None,
    *,
    calibration: str | Iterable[Any] = "builtin",
    run_dir: Path | str | None = None,
    keep_run: bool = False,
    progress: Progress | None = None,
) -> RunReport:
    """Quantize a model into a checkpoint directory.

    Processes that torchrun has started do it together: each calls this, and has the report (docs/scaling.md). What is
    asked for is the same in all, and `out` and the run directory are on a disk that all of them share.

    Finished blocks are kept in the run directory. When a run was interrupted, the same call goes on where it was; when
    `out` is its finished result already, the call only gives its report.

    Args:
        model: A directory, a hub id, a `file.gguf`, or "demo".
        out: Directory to write; absent, empty, or begun by this very run.
        config: Settings; the defaults are 4 bits, symmetric.
        calibration: "builtin", a .txt or .jsonl file, `hub:ID`; or items, each token ids (with the attention mask of
            their padding) or, under any names that the model's forward pass takes, the inputs of one pass as tensors,
            arrays or lists with a batch dimension and without padding. An encoder-decoder may have `input_ids` with
            `labels`.
        run_dir: Directory for finished blocks; None = `out` with ".run" at the end.
        keep_run: Leave it there when the run has ended well.
        progress: Told of the plan, every stage and every weight.

    Returns:
        The report, which is also in `out` as hessquant-report.json and as a page, hessquant-report.html.

    Raises:
        RefusedError: Before any work, if the job cannot be done as asked.
        FailedError: If it fails on the way; `out` then holds no config.json and does not pass for a checkpoint.
    """
    config, out = config or Config(), Path(out)
    kept_in = Path(run_dir) if run_dir else out.with_name(f"{out.name}.run")
    clocks = time.perf_counter(), time.process_time()
    map_large_blocks()
    with joined() as ranks:
        told = progress if progress and ranks.is_first else SILENT
        with planned(model, config, calibration, told, ranks) as (source, reader, inputs, config, plan):
            # The window length, so that the default is the same run as its value.
            config = replace(config, window_length=plan.window_length)
            job = _Job(source, reader, inputs, plan, config, told)
            job.progress.plan(plan)
            if ranks.is_first:
                _refuse_occupied(out, source)
            only_first = holding(out) if ranks.is_first else nullcontext()
            with RunStore(kept_in, keep=keep_run, ranks=ranks) as store, only_first:
                return job.done(out, store, clocks)


@dataclass(frozen=True)
class _Job:
    """What is done, and on what: known once it is planned."""

    source: ModelSource
    reader: WeightSource
    inputs: Calibration
    plan: Plan
    config: Config
    progress: Progress

    def done(self, out: Path, store: RunStore, clocks: tuple[float, float]) -> RunReport:
        """Do what is not done yet; all processes have the report."""
        reader, plan, config, ranks = self.reader, self.plan, self.config, store.ranks
        finished = report_in(out) if ranks.is_first and is_complete(out) else None
        batches = self.inputs.batches(tokens_per_batch(self.source.place))
        streamed = StreamedModel(self.source, reader.tensors, reader.decode)
        scales = ScaleCheck(plan.targets, reader.tensors, config)
        # Of several processes the first alone looks at all weights, and alone writes: a disk is read once.
        looked_at = ranks.tell(audit(reader, self.progress, scales) if ranks.is_first else "")
        identity = _identity(plan, config, self.inputs.record, looked_at)
        store.begin({name: value for name, value in identity.items() if name not in _OF_THE_OUTPUT})
        run = digest(identity)
        finished = ranks.tell(finished if finished is not None and finished.run == run else None)
        if finished is not None:
            if ranks.is_first:
                (out / RUN_MARK).unlink(missing_ok=True)
            return finished
        if ranks.is_first:
            _refuse_no_room(out, run, plan, config, store)
        outcome = quantize_segments(streamed, plan, batches, config, store, self.progress, reader.warm)
        spent = _spent(ranks, clocks)
        report = self._written(out, run, outcome, spent, clocks) if ranks.is_first else None
        return ranks.tell(cast(RunReport, report))

    def _written(
        self, out: Path, run: str, outcome: Outcome, processes: tuple[ProcessRecord, ...], clocks: tuple[float, float]
    ) -> RunReport:
        """Write what was solved, and say what came of it."""
        result = QuantizedModel(self.reader, self.plan, outcome.weights, self.config, self.config, REPORTS, __version__)
        written = write_verified(out, draft_of(out, result), run, self.progress)
        report = _report(run, self.plan, self.config, self.inputs.record, outcome, written.verified, clocks)
        report = replace(report, processes=processes)
        written.complete(report)
        return report


def _spent(ranks: Ranks, clocks: tuple[float, float]) -> tuple[ProcessRecord, ...]:
    """What the loop took each process of several; nothing of one alone, of which the report tells."""
    if ranks.count == 1:
        return ()
    seconds, cpu_seconds = time.perf_counter() - clocks[0], time.process_time() - clocks[1]
    own = ProcessRecord(ranks.rank, seconds, cpu_seconds, ranks.spent.seconds, peak_memory())
    return tuple(ranks.tell_all(own))


def _refuse_occupied(out: Path, source: ModelSource) -> None:
    """Looked at before anything is made, and again when no other process can change it."""
    if not is_complete(out):
        refuse_output(out, None, 0)
    refuse_sidecars(source.directory, out, REPORTS)


def _identity(plan: Plan, config: Config, calibrated: CalibrationRecord, source_digest: str) -> dict[str, str]:
    """What the result depends on, by name: runs that agree in all of it give the same bytes."""
    planned = [asdict(target) for target in plan.targets], [asdict(tensor) for tensor in plan.untouched]
    said_otherwise = (*_FREE_OF_RESULT, *_OF_THE_PLACE)
    settings = {name: json.dumps(value) for name, value in asdict(config).items() if name not in said_otherwise}
    return {
        "version": __version__,
        "source": source_digest,
        "plan": digest(planned),
        "calibration tokens": calibrated.digest,
        "place": plan.place,
        **settings,
    }


def _refuse_no_room(out: Path, run: str, plan: Plan, config: Config, store: RunStore) -> None:
    """The checkpoint, and a byte per code in the run directory, must fit as if both were on one disk."""
    to_write = plan.output_bytes + sum(target.rows * target.columns for target in plan.targets)
    needed = to_write - held_bytes(out) - held_bytes(store.directory)
    # While a shard is replaced by its like, both are there.
    refuse_output(out, run, needed + min(held_bytes(out), config.shard_bytes))


def _report(
    run: str,
    plan: Plan,
    config: Config,
    calibrated: CalibrationRecord,
    outcome: Outcome,
    verified: int,
    clocks: tuple[float, float],
) -> RunReport:
    return RunReport(
        version=__version__,
        run=run,
        settings=asdict(config),
        # The report goes with the checkpoint to other machines, to which this one's memory is nothing.
        plan=replace(plan, machine_memory=0, device_memory=0, remedies=()),
        calibration=calibrated,
        layers=outcome.records,
        capture=outcome.capture,
        forwards_per_block=outcome.forwards_per_block,
        resumed_blocks=outcome.resumed_blocks,
        mapped_activation_bytes=outcome.mapped_activation_bytes,
        retreats=outcome.retreats,
        degraded=(*text_degradations(outcome.records, calibrated), *degradations(outcome.records)),
        seconds=time.perf_counter() - clocks[0],
        cpu_seconds=time.process_time() - clocks[1],
        peak_memory_bytes=peak_memory(),
        output_bytes=plan.output_bytes,
        verified_tensors=verified,
        environment={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "threads": str(torch.get_num_threads()),
        },
    )
