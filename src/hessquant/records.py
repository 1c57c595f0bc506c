"""What the stages hand to each other and to the report: frozen, and free of tensors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hessquant.errors import GridError


class Progress(Protocol):
    """What a run tells its caller while it works; the command line draws it."""

    def stage(self, name: str, steps: int) -> None:
        """A new stage of `steps` steps begins, e.g. ("quantize", 210)."""

    def advance(self, detail: str) -> None:
        """One step of the stage is done; `detail` names it, e.g. a weight."""

    def layer(self, record: "LayerRecord") -> None:
        """A weight has been quantized (follows its `advance`)."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint, known from the header of its file.

    Attributes:
        name: Name in the checkpoint.
        shape: Its dimensions.
        dtype: As safetensors spells it: "F32", "BF16", "F16", "I32" ...
        bytes: Its size on disk.
        file: File name within the checkpoint directory.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    file: str


@dataclass(frozen=True)
class Location:
    """Where rows of a checkpoint's matrix are in the model.

    Attributes:
        parameter: Name of the model's parameter.
        rows: How many rows.
        piece: Which of the matrices stacked in it; 0 where it is one matrix.
        transposed: Whether the parameter's matrices are stored [columns, rows].
        stacked: Whether the parameter holds several matrices, such as one per expert.
        first_row: The first of the rows, in that matrix.
        row_step: Their distance there; 2 where rows of two matrices alternate.
        to_row: The first of them in the checkpoint's matrix.
        to_step: Their distance there.
    """

    parameter: str
    rows: int
    piece: int = 0
    transposed: bool = False
    stacked: bool = False
    first_row: int = 0
    row_step: int = 1
    to_row: int = 0
    to_step: int = 1

    @property
    def module(self) -> str:
        """The module that owns a stack and runs its matrices; empty for a plain matrix."""
        return self.parameter.rpartition(".")[0] if self.stacked else ""


@dataclass(frozen=True)
class GridSpec:
    """The grid that a weight is on, or is to be put on.

    Attributes:
        bits: Bits per code, 2 to 8.
        group_size: Inputs per group; -1 = one group per row.
        symmetric: Zero fixed at 2^(bits-1) instead of one per group.
        scale_dtype: Floating dtype that scales are stored in, as torch names it.
    """

    bits: int = 4
    group_size: int = -1
    symmetric: bool = True
    scale_dtype: str = "float16"

    @property
    def top(self) -> int:
        """Largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """Zero of a symmetric grid."""
        return 1 << (self.bits - 1)

    def width(self, columns: int) -> int:
        """Inputs per group of a weight with `columns` inputs.

        Raises:
            GridError: If the group size does not divide the inputs.
        """
        if not self.divides(columns):
            raise GridError(f"group size {self.group_size} does not divide {columns} inputs")
        return columns if self.group_size == -1 else self.group_size

    def divides(self, columns: int) -> bool:
        """Whether all groups of so many inputs are whole."""
        return self.group_size == -1 or columns % self.group_size == 0

    def groups(self, columns: int) -> int:
        """Groups per row; a ragged last one counts."""
        return 1 if self.group_size == -1 else -(-columns // self.group_size)

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{kind} {self.bits}-bit, group size {self.group_size}"


@dataclass(frozen=True)
class Target:
    """One weight that will be quantized.

    Attributes:
        name: Its name in the checkpoint, e.g. `model.layers.0.mlp.up_proj.weight`.
        locations: Where its rows are in the model; together they are all of its rows.
        block: Index of the block that holds it; the head's is the number of blocks.
        rows: Outputs.
        columns: Inputs.
        grid: The grid that it is put on.
        transposed: Whether the checkpoint stores it [columns, rows].
        shares_input_with: The first target that is multiplied with the same input tensor, possibly itself.
        calls: Products with it in one forward pass; more than one where a layer is looped.
        part_of: Tensor of the source that holds it with others; empty if it has one of its own.
        may_be_skipped: Whether tokens may be routed past it, so that none may reach it.
        feeds_attention: Whether causal attention's queries, keys or values are made with it.
    """

    name: str
    locations: tuple[Location, ...]
    block: int
    rows: int
    columns: int
    grid: GridSpec
    transposed: bool
    shares_input_with: str
    calls: int = 1
    part_of: str = ""
    feeds_attention: bool = False
    may_be_skipped: bool = False

    @property
    def module(self) -> str:
        """The module that runs it together with other experts' matrices; empty for a plain matrix."""
        return self.locations[0].module

    @property
    def groups(self) -> int:
        """Groups per row."""
        return self.grid.groups(self.columns)


@dataclass(frozen=True)
class Untouched:
    """One tensor that is copied as it is, and why.

    Attributes:
        name: Its name in the checkpoint.
        shape: Its dimensions.
        dtype: As safetensors spells it.
        bytes: Its size on disk.
        reason: Why it is left as it is.
        parameter: Name of the model's parameter that it ends in; empty if the class knows none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    reason: str
    parameter: str = ""


@dataclass(frozen=True)
class ServerVerdict:
    """Whether one client opens the planned checkpoint.

    Attributes:
        server: Its name, version and device, for people.
        opens: What is known.
        reason: Why, or what it needs.
        basis: How that is known.
        client: Its name as `--serve` takes it, e.g. "vllm-cpu".
        tensor_parallel: Largest tensor-parallel size (a power of two up to 64) that it can take; None where it does not
            open the checkpoint or divides no quantized weights.
        limited_by: The weight, with `*` for its block's number, that keeps that size from being twice as large; empty
            where none does.
    """

    server: str
    opens: Literal["yes", "no", "unknown"]
    reason: str
    basis: Literal["measured", "documented", "not run"]
    client: str = ""
    tensor_parallel: int | None = None
    limited_by: str = ""

    def is_named(self, names: Iterable[str]) -> bool:
        """Whether one of these names means it: its own, or that of a client without the device."""
        return any(self.client == name or self.client.startswith(f"{name}-") for name in names)


@dataclass(frozen=True)
class Remedy:
    """Settings with which a run fits a machine that cannot hold it as planned.

    Attributes:
        options: What to add to the command.
        memory_bytes: Estimated peak of anonymous memory then.
    """

    options: str
    memory_bytes: int


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before a weight is read.

    Attributes:
        source: The model as the user named it, without the folders that it lies in.
        architecture: Class that the model's config asks for.
        blocks: Module names of the blocks, in order.
        whole: Why the blocks cannot be run one by one, so that the whole model is in memory; empty if they can.
        returns_tuple: Per block, whether its output is a tuple.
        hidden_size: Width of the hidden state that passes through the blocks.
        targets: Weights to quantize, in the order the forward pass reaches them.
        untouched: Every other tensor of the checkpoint.
        unties_head: Whether the head was tied to the embedding and gets a weight of its own.
        group_size: Group size of the targets, "auto" resolved.
        bits_per_weight: Mean bits of a target's weights with scales and zeros.
        unquantized_share: Share of the source's weight bytes that stays as it is, 0 to 1.
        unquantized_matrices: The same, embeddings and head apart.
        source_bytes: Bytes of all source tensors.
        output_bytes: Bytes of all output tensors.
        memory_bytes: Estimated peak of anonymous memory.
        tensor_parallel: Largest tensor-parallel size (a power of two up to 64) that the shapes allow.
        servers: Verdict per client.
        tensor_parallel_limit: The weight, with `*` for its block's number, that keeps it from being twice as large;
            empty where none does.
        aliases: Tensors of the source that are another name of a target's parameter; it is written under one only.
        least_memory_bytes: `memory_bytes` if all activations that can be were in files; 0 where nothing is calibrated.
        machine_memory: Bytes of memory of the machine, or what its container may have of it; 0 where that does not
            matter.
        remedies: What makes the run fit where `memory_bytes` is more than that; each does by itself.
        window_length: Tokens per calibration window, the default resolved; None where nothing is calibrated.
        context: Positions that the model has; None where it has no limit, or none that its config says.
    """

    source: str
    architecture: str
    blocks: tuple[str, ...]
    whole: str
    returns_tuple: tuple[bool, ...]
    hidden_size: int
    targets: tuple[Target, ...]
    untouched: tuple[Untouched, ...]
    unties_head: bool
    group_size: int
    bits_per_weight: float
    unquantized_share: float
    unquantized_matrices: float
    source_bytes: int
    output_bytes: int
    memory_bytes: int
    tensor_parallel: int
    servers: tuple[ServerVerdict, ...]
    tensor_parallel_limit: str = ""
    aliases: tuple[str, ...] = field(default=(), compare=False)
    least_memory_bytes: int = 0
    # Of the machine and not of the plan: where it is made does not make it another.
    machine_memory: int = field(default=0, compare=False)
    remedies: tuple[Remedy, ...] = field(default=(), compare=False)
    window_length: int | None = None
    context: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the machine holds what the run is estimated to take."""
        return not self.machine_memory or self.memory_bytes <= self.machine_memory


@dataclass(frozen=True)
class TokenWindow:
    """Token ids of one calibration or evaluation window; no padding, ever.

    Attributes:
        ids: What the model reads; for an encoder-decoder, the source.
        target: What an encoder-decoder is to write; empty for every other model.
    """

    ids: tuple[int, ...]
    target: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens on both sides."""
        return len(self.ids) + len(self.target)


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
        expected_loss: What the theory expects of the sweep on this grid (`core.bounds`).
        floor: What no column order can be expected to beat (`core.bounds`).
        damping: Damping asked for.
        damping_used: Damping that the factorisation succeeded with.
        factorizations: Attempts that took.
        dead_columns: Inputs that the calibration data never excited.
        fallback_rows: Rows where round-to-nearest was better and was kept.
        zero_groups: Groups of all-zero weights.
        tiny_groups: Groups whose scale was raised to the smallest the stored dtype holds.
        seconds: Wall time of the solve.
        effective_rank: Inputs that say something of their own (`core.rank`), at most `columns`; None in reports that
            did not count them.
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

    @property
    def relative_to_rtn(self) -> float:
        """Loss divided by round-to-nearest's; 1 where both are zero."""
        return self.loss / self.rtn_loss if self.rtn_loss > 0 else 1.0


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
    """

    base: str
    base_perplexity: float
    kl_divergence: float
    top1_agreement: float


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
    """

    model: str
    text: str
    perplexity: float
    nll: float
    tokens: int
    windows: int
    window_length: int
    comparison: Comparison | None = None


@dataclass(frozen=True)
class InspectedWeight:
    """One quantized weight found in a checkpoint."""

    name: str
    rows: int
    columns: int
    grid: GridSpec
    bytes: int


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint directory holds.

    Attributes:
        directory: Its name.
        format: "gptq", "gptq_v2", or "none" when nothing is quantized.
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
