"""What came of a stage, for its caller and for the report: frozen, and free of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hessquant.measures import Continuation, TaskScore, WindowMeasures
from hessquant.records import GridSpec, Plan, TensorInfo


class Progress(Protocol):
    """What a run tells its caller while it works; the command line draws it."""

    def plan(self, plan: Plan) -> None:
        """What will be done, before any of it is."""

    def stage(self, name: str, steps: int) -> None:
        """A new stage of `steps` steps begins, e.g. ("quantize", 210)."""

    def advance(self, detail: str) -> None:
        """One step of the stage is done; `detail` names it, e.g. a weight."""

    def layer(self, record: "LayerRecord") -> None:
        """A weight has been quantized (follows its `advance`)."""


class _Silent:
    def plan(self, plan: Plan) -> None: ...

    def stage(self, name: str, steps: int) -> None: ...

    def advance(self, detail: str) -> None: ...

    def layer(self, record: "LayerRecord") -> None: ...


SILENT: Progress = _Silent()
"""Progress that nobody watches."""


@dataclass(frozen=True)
class CalibrationRecord:
    """Where the calibration tokens came from.

    Attributes:
        source: `builtin`, a file name, or a hub id. Never a path with folders.
        windows: Windows used; samples of other inputs count as one each.
        tokens: Tokens in them; of a sample without input_ids, the positions of its first input.
        tokens_available: Tokens of all that was read.
        digest: SHA-256 over the token ids and other inputs, so that two runs can be compared.
        distinct_windows: Windows without those that repeat another; None in reports that did not count them.
        distinct_tokens: Different token ids in them; None likewise.
        passages: Runs of 8 tokens in them, each place counted; None likewise.
        distinct_passages: Different ones among those; None likewise.
    """

    source: str
    windows: int
    tokens: int
    tokens_available: int
    digest: str
    distinct_windows: int | None = None
    distinct_tokens: int | None = None
    passages: int | None = None
    distinct_passages: int | None = None


@dataclass(frozen=True)
class LayerRecord:
    """What happened to one weight. Losses are tr((W-Q) H (W-Q)^T) with H the mean over tokens.

    Attributes:
        name: Parameter name.
        rows: Outputs.
        columns: Inputs.
        bits: Bits per code.
        group_size: Inputs per group; -1 = one group per row.
        tokens: Tokens that its Hessian saw.
        shares_hessian_with: The target whose Hessian was used (itself when its own).
        pooled_share: Weight of all experts' common Hessian in it, 0 to 1; 0 where it is the weight's own alone.
        method: "gptq", or "rtn" where every row fell back to rounding.
        loss: Loss of the written weights.
        rtn_loss: Loss of plain round-to-nearest on the min-max grid.
        output_energy: tr(W H W^T), so that loss / output_energy is the relative output error.
        expected_loss: What the theory expects of the sweep on this grid (`core.objective`).
        floor: What no column order can be expected to beat (`core.objective`).
        damping: Damping asked for.
        damping_used: Damping that the factorisation succeeded with.
        factorizations: Attempts that took.
        dead_columns: Inputs that the calibration data never excited.
        fallback_rows: Rows where round-to-nearest was better and was kept.
        zero_groups: Groups of all-zero weights.
        tiny_groups: Groups whose scale was raised to the smallest the stored dtype holds.
        seconds: Wall time of the solve.
        effective_rank: Inputs that say something of their own (`core.factor`), at most `columns`; None in reports that
            did not count them.
        built: Whether the model class builds it; if not, it was not calibrated, and losses are those of the identity as
            Hessian: of the weight itself.
    """

    name: str
    rows: int
    columns: int
    bits: int
    group_size: int
    tokens: int
    shares_hessian_with: str
    pooled_share: float
    method: Literal["gptq", "rtn"]
    loss: float
    rtn_loss: float
    output_energy: float
    expected_loss: float
    floor: float
    damping: float
    damping_used: float
    factorizations: int
    dead_columns: int
    fallback_rows: int
    zero_groups: int
    tiny_groups: int
    seconds: float
    effective_rank: int | None = None
    built: bool = True

    @property
    def relative_to_rtn(self) -> float:
        """Loss divided by round-to-nearest's; 1 where both are zero."""
        return self.loss / self.rtn_loss if self.rtn_loss > 0 else 1.0

    @property
    def relative_output_error(self) -> float | None:
        """Loss divided by the output energy; None where the layer has no output that is known, or none at all."""
        return self.loss / self.output_energy if self.built and self.output_energy > 0 else None


@dataclass(frozen=True)
class ProcessRecord:
    """What a run took one of its processes, as far as the last block; the first goes on to write.

    Attributes:
        rank: Its number.
        seconds: Wall time.
        cpu_seconds: CPU time.
        exchange_seconds: Wall time in exchanges with the others, most of it waiting for them.
        peak_memory_bytes: Largest resident set.
    """

    rank: int
    seconds: float
    cpu_seconds: float
    exchange_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class RunReport:
    """The whole truth about one run; `hessquant-report.json` is this record.

    Attributes:
        version: Version of Hessquant.
        run: Digest of everything that the result depends on; the same for a run that was resumed.
        settings: The config as asked for.
        plan: What was decided before.
        calibration: Tokens used.
        layers: One record per target, in the order they were quantized.
        capture: Whether each block was run once, or in several passes.
        forwards_per_block: Forward passes of a block per calibration window, replays of finished
            blocks after an interruption included.
        resumed_blocks: Blocks that an earlier, interrupted run had finished.
        mapped_activation_bytes: Bytes of activations between blocks that were kept in files.
        degraded: One sentence per thing that is less than asked for; empty when all went well.
        seconds: Wall time of this process's part of the run.
        cpu_seconds: CPU time, likewise.
        peak_memory_bytes: Largest resident set of the process.
        output_bytes: Bytes of the tensors written.
        verified_tensors: Quantized weights that were re-read and decoded to the solver's values.
        environment: Versions of what the numbers can depend on, and the thread count.
        retreats: A sentence each time that the device was too small for how batches were run; the result is none the
            worse.
        processes: One record per process, where there were several; the other figures are then the first one's.
    """

    version: str
    run: str
    settings: Mapping[str, object]
    plan: Plan
    calibration: CalibrationRecord
    layers: tuple[LayerRecord, ...]
    capture: Literal["once", "passes"]
    forwards_per_block: float
    resumed_blocks: int
    mapped_activation_bytes: int
    degraded: tuple[str, ...]
    seconds: float
    cpu_seconds: float
    peak_memory_bytes: int
    output_bytes: int
    verified_tensors: int
    environment: Mapping[str, str] = field(default_factory=dict)
    retreats: tuple[str, ...] = ()
    processes: tuple[ProcessRecord, ...] = ()


@dataclass(frozen=True)
class ExportReport:
    """What an export did.

    Attributes:
        version: Version of Hessquant.
        plan: What was decided; its source is the checkpoint, and each packed weight counts as 16 bit in its sizes.
        source_format: What the checkpoint is in, e.g. "gptq_v2".
        format: What was written.
        verified_tensors: Quantized weights that were re-read and decoded to the same values.
        output_bytes: Bytes of the tensors written.
        seconds: Wall time.
    """

    version: str
    plan: Plan
    source_format: str
    format: str
    verified_tensors: int
    output_bytes: int
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """A model against a base model on the same tokens.

    Attributes:
        base: The base model as the user named it.
        base_perplexity: Its perplexity.
        kl_divergence: Mean over predicted tokens of KL(base || model), in nats.
        top1_agreement: Share of predicted tokens where both put the same token first.
        whole: Why the whole base model was in memory; empty if its blocks were run one by one.
        base_perplexity_error: Standard error over windows; None for one window, as all errors.
        kl_error, top1_error: Likewise.
        perplexity_ratio, ratio_error: The model's perplexity divided by the base's, and its standard error.
    """

    base: str
    base_perplexity: float
    kl_divergence: float
    top1_agreement: float
    whole: str = ""
    base_perplexity_error: float | None = None
    kl_error: float | None = None
    top1_error: float | None = None
    perplexity_ratio: float | None = None
    ratio_error: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Perplexity of one model; float32, non-overlapping windows, each window's first token not predicted.

    Attributes:
        model: The model as the user named it.
        text: Where the text came from.
        perplexity: exp of the mean negative log-likelihood per predicted token.
        nll: That mean, in nats.
        tokens: Predicted tokens.
        windows: Windows used.
        window_length: Tokens per window.
        comparison: Against a base model, if one was given.
        whole: Why the whole model was in memory; empty if its blocks were run one by one.
        perplexity_error: Standard error over windows, by the delta method; None for one window, as the next.
        nll_error: That of the mean.
        per_window: The means of each window that has a token to predict.
        continuations: What the model makes of prompts, where that was asked for.
        tasks: Scores in lm-eval's tasks, likewise.
    """

    model: str
    text: str
    perplexity: float
    nll: float
    tokens: int
    windows: int
    window_length: int
    comparison: Comparison | None = None
    whole: str = ""
    perplexity_error: float | None = None
    nll_error: float | None = None
    per_window: tuple[WindowMeasures, ...] = ()
    continuations: tuple[Continuation, ...] = ()
    tasks: tuple[TaskScore, ...] = ()


@dataclass(frozen=True)
class InspectedWeight:
    """One quantized weight found in a checkpoint; `grid` is None where its values are floats, as in FP8."""

    name: str
    rows: int
    columns: int
    grid: GridSpec | None
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint directory holds.

    Attributes:
        directory: Its name.
        format: "gptq", "gptq_v2" or another in words, or "none" when nothing is quantized.
        weights: Quantized weights.
        untouched: Every other tensor.
        bits_per_weight: Mean bits per quantized weight, scales and zeros included; 0 when none.
        total_bytes: Bytes of all tensors.
        faults: One sentence per thing that is wrong; empty when the checkpoint is sound.
        unchecked: Why it was not compared with the model that its config names; empty if it was.
    """

    directory: str
    format: str
    weights: tuple[InspectedWeight, ...]
    untouched: tuple[TensorInfo, ...]
    bits_per_weight: float
    total_bytes: int
    faults: tuple[str, ...]
    unchecked: str = ""
