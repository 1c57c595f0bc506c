"""The order of the stages, and nothing else."""

import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from hessquant import __version__
from hessquant.calibration.batches import batches_of
from hessquant.calibration.collect import Stop
from hessquant.calibration.forward_once import run_block_once
from hessquant.calibration.passes import run_block_in_passes
from hessquant.calibration.prelude import record_arguments
from hessquant.calibration.token_ids import windows_from_ids
from hessquant.calibration.windows import calibration_record, calibration_windows, evaluation_windows, refuse_unfit
from hessquant.checkpoint.decode import decoded_state, quantization_of
from hessquant.checkpoint.files import replacing
from hessquant.checkpoint.inspect import inspect_checkpoint
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.checkpoint.verify import verify
from hessquant.checkpoint.writer import refuse_unless_empty, withdraw, write_checkpoint
from hessquant.config import Config
from hessquant.errors import CheckpointError
from hessquant.evaluate.evaluation import evaluate_model
from hessquant.models.load import build
from hessquant.models.probe import probe
from hessquant.models.source import ModelSource, load_config, load_tokenizer, resolve
from hessquant.planning import plan as planning
from hessquant.records import (
    CalibrationRecord,
    Evaluation,
    Inspection,
    LayerRecord,
    Plan,
    Progress,
    RunReport,
    Target,
    TokenWindow,
)
from hessquant.report.html import PAGE_NAME, to_html
from hessquant.report.json_report import REPORT_NAME, to_json
from hessquant.run.heap import map_large_blocks
from hessquant.run.solve import TargetSolver, degradations

# Large enough for full speed of the products, small enough that a batch's activations stay in cache.
_TOKENS_PER_BATCH = 2048


class _Silent:
    """Progress that nobody watches."""

    def stage(self, name: str, steps: int) -> None: ...

    def advance(self, detail: str) -> None: ...

    def layer(self, record: LayerRecord) -> None: ...


def make_plan(model: str, config: Config | None = None) -> Plan:
    """Decide what quantizing `model` would do, without reading a weight.

    Raises:
        RefusedError: If it would be refused; the subclass and the message say why.
    """
    config = config or Config()
    source = resolve(model, trust_remote_code=config.trust_remote_code)
    with CheckpointReader(source.directory) as reader:
        return planning.make_plan(source, reader.tensors, config)


def quantize(
    model: str,
    out: Path | str,
    config: Config | None = None,
    *,
    calibration: str | Iterable[Any] = "builtin",
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> RunReport:
    """Quantize a model into a checkpoint directory.

    Args:
        model: A directory, a hub id, a `file.gguf`, or "demo".
        out: Directory to write; absent or empty.
        config: Settings; the defaults are 4 bits, symmetric.
        calibration: "builtin", a .txt or .jsonl file, `hub:ID`, or token ids as `windows_from_ids` takes them.
        progress: Told of every stage and every weight.
        on_plan: Called with the plan before any work.

    Returns:
        The report, which is also in `out` as hessquant-report.json and as a page, hessquant-report.html.

    Raises:
        RefusedError: Before any work, if the job cannot be done as asked.
        FailedError: If it fails on the way; `out` then holds no config.json and does not pass for a checkpoint.
    """
    config, out, progress = config or Config(), Path(out), progress or _Silent()
    started, cpu_started = time.perf_counter(), time.process_time()
    refuse_unless_empty(out)
    map_large_blocks()
    source = resolve(model, trust_remote_code=config.trust_remote_code)
    with CheckpointReader(source.directory) as reader:
        plan = planning.make_plan(source, reader.tensors, config)
        if on_plan is not None:
            on_plan(plan)
        windows, calibrated = _windows(source, calibration, config)
        _refuse_unfit(windows, source, config.trust_remote_code)
        progress.stage("load", 1)
        loaded = build(source, decoded_state(reader), trust_remote_code=config.trust_remote_code)
        progress.advance(source.name)
        solver, forwards = _quantize_blocks(loaded, source, plan, windows, config, progress)
        del loaded
        progress.stage("write", 1)
        size = write_checkpoint(out, reader, source.directory, plan, config, solver.quantized, version=__version__)
        progress.advance(out.name)
        with _withdrawn_on_failure(out):
            progress.stage("verify", 1)
            verified = verify(out, solver.quantized, reader, plan)
            progress.advance(out.name)
    report = RunReport(
        version=__version__,
        settings=asdict(config),
        plan=plan,
        calibration=calibrated,
        layers=tuple(solver.records),
        forwards_per_block=forwards,
        degraded=degradations(solver.records),
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        peak_memory_bytes=_peak_memory(),
        output_bytes=size,
        verified_tensors=verified,
        environment=_environment(),
    )
    with _withdrawn_on_failure(out):
        for name, text in ((REPORT_NAME, to_json(report)), (PAGE_NAME, to_html(report))):
            with replacing(out / name) as stream:
                stream.write(text.encode())
    return report


def evaluate(
    model: str,
    *,
    against: str | None = None,
    text: str | None = None,
    num_windows: int | None = None,
    window_length: int = 2048,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a model's perplexity, and how far it is from a base model.

    Args:
        model: As `quantize` takes it, or a quantized checkpoint, which is decoded here without another package.
        against: Base model for KL divergence and top-1 agreement.
        text: A text as `quantize` takes it for calibration; None = the held-out part of the built-in text.
        num_windows: Windows to use; None = all.
        window_length: Tokens per window.
        trust_remote_code: Allow code that comes with the model to run.
        progress: Told of every window.

    Raises:
        RefusedError: If a model or the text cannot be used.
        FailedError: If a checkpoint is malformed, or logits are not finite.
    """
    source = resolve(model, trust_remote_code=trust_remote_code)
    base = None if against is None else resolve(against, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    windows = evaluation_windows(text, tokenizer, num_windows=num_windows, window_length=window_length)
    _refuse_unfit(windows, source, trust_remote_code)
    return evaluate_model(
        _load(source, trust_remote_code),
        windows,
        name=model,
        text="builtin" if text is None else text if text.startswith("hub:") else Path(text).name,
        window_length=window_length,
        base=None if base is None else _load(base, trust_remote_code),
        base_name=against or "",
        progress=progress,
    )


def inspect(directory: Path | str) -> Inspection:
    """Say what a checkpoint directory holds and what is wrong with it.

    Raises:
        SourceError: If it cannot be opened as a checkpoint at all.
    """
    return inspect_checkpoint(Path(directory))


@contextmanager
def _withdrawn_on_failure(out: Path) -> Iterator[None]:
    """Whatever goes wrong, down to Ctrl-C, leave nothing that passes for a finished checkpoint."""
    try:
        yield
    except BaseException as error:
        withdraw(out)
        if isinstance(error, OSError):
            raise CheckpointError(f"{error.filename or out}: writing failed: {error.strerror or error}") from error
        raise


def _windows(
    source: ModelSource, calibration: str | Iterable[Any], config: Config
) -> tuple[tuple[TokenWindow, ...], CalibrationRecord]:
    if not isinstance(calibration, str):
        windows = windows_from_ids(calibration)
        return windows, calibration_record("python", windows, sum(len(window.ids) for window in windows))
    return calibration_windows(
        calibration,
        load_tokenizer(source, trust_remote_code=config.trust_remote_code),
        num_windows=config.num_windows,
        window_length=config.window_length,
        seed=config.seed,
        allow_fewer=config.allow_fewer,
    )


def _refuse_unfit(windows: tuple[TokenWindow, ...], source: ModelSource, trust_remote_code: bool) -> None:
    described = load_config(source, trust_remote_code=trust_remote_code).get_text_config()
    context = getattr(described, "max_position_embeddings", None)
    refuse_unfit(windows, context=context, vocabulary=described.vocab_size)


def _quantize_blocks(
    model: PreTrainedModel,
    source: ModelSource,
    plan: Plan,
    windows: tuple[TokenWindow, ...],
    config: Config,
    progress: Progress,
) -> tuple[TargetSolver, float]:
    """Quantize every target in place, block by block; the solver, and the forward passes per block."""

    def on_layer(record: LayerRecord) -> None:
        progress.advance(record.name)
        progress.layer(record)

    progress.stage("record", 1)
    model_config = load_config(source, trust_remote_code=config.trust_remote_code)
    seen = probe(source, model_config, trust_remote_code=config.trust_remote_code)
    batches = record_arguments(model, plan.blocks, seen.returns_tuple, batches_of(windows, _TOKENS_PER_BATCH))
    progress.advance(f"{len(windows)} windows")
    progress.stage("quantize", len(plan.targets))
    parameters = dict(model.named_parameters())
    solver = TargetSolver({target.name: target for target in plan.targets}, config, on_layer)
    run_block = run_block_once if config.capture == "once" else run_block_in_passes
    forwards = 0
    for index, name in enumerate(plan.blocks):
        forwards += run_block(
            model.get_submodule(name),
            index,
            batches,
            _stops([target for target in plan.targets if target.block == index]),
            parameters,
            lambda members, statistics: solver.solve(parameters, members, statistics),
        )
    return solver, forwards / len(plan.blocks)


def _stops(targets: list[Target]) -> tuple[Stop, ...]:
    members: dict[str, list[str]] = {}
    for target in targets:
        members.setdefault(target.shares_input_with, []).append(target.name)
    return tuple(Stop(tuple(names)) for names in members.values())


def _load(source: ModelSource, trust_remote_code: bool) -> PreTrainedModel:
    with CheckpointReader(source.directory) as reader:
        transposed: set[str] = set()
        if quantization_of(reader.config) is not None:
            model_config = load_config(source, trust_remote_code=trust_remote_code)
            seen = probe(source, model_config, trust_remote_code=trust_remote_code)
            transposed = {product.name for product in seen.products if product.transposed}
        state = decoded_state(reader, transposed=transposed)
    return build(source, state, trust_remote_code=trust_remote_code)


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def _environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": str(torch.get_num_threads()),
    }
