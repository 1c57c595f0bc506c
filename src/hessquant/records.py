"""What the stages decide on and hand to each other: frozen, and free of tensors."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from hessquant.errors import GridError

Elements = Literal["integer", "e2m1"]

FLOATING = ("F64", "F32", "BF16", "F16")
"""Dtypes of plain weights, as safetensors spells them."""


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
        elements: What codes less their zeros are: integers, or numbers of the 4-bit float E2M1, by their rank.
        global_scale: What scales are stored times, where the dtype is E4M3: one number for all of a weight.
    """

    bits: int = 4
    group_size: int = -1
    symmetric: bool = True
    scale_dtype: str = "float16"
    elements: Elements = "integer"
    global_scale: float = 1.0

    @property
    def top(self) -> int:
        """Largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """Zero of a symmetric grid."""
        return 1 << (self.bits - 1)

    @property
    def is_float(self) -> bool:
        """Whether its steps are those of a float: wider, the farther from zero."""
        return self.elements == "e2m1"

    @property
    def has_global_scale(self) -> bool:
        """Whether its scales are stored times a number of the weight's own."""
        return self.scale_dtype == "float8_e4m3fn"

    @property
    def bits_per_group(self) -> int:
        """Bits that a group takes besides its codes: a scale, and on a grid of integers a zero."""
        return 8 if self.is_float else 16 + self.bits

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
        if self.is_float:
            return (
                f"{kind} {self.bits}-bit float, {self.scale_dtype[7:11].upper()} scales, group size {self.group_size}"
            )
        return f"{kind} {self.bits}-bit, group size {self.group_size}"


@dataclass(frozen=True)
class Target:
    """One weight that will be quantized.

    Attributes:
        name: Its name in the checkpoint, e.g. `model.layers.0.mlp.up_proj.weight`.
        locations: Where its rows are in the model; together they are all of its rows.
        block: Index of the block that holds it; the head's is the number of blocks. Weights that the model class does
            not build have those after it: one number for each part, such as a draft layer, that they are in.
        rows: Outputs.
        columns: Inputs.
        grid: The grid that it is put on.
        transposed: Whether the checkpoint stores it [columns, rows].
        shares_input_with: The first target that is multiplied with the same input tensor, possibly itself.
        calls: Products with it in one forward pass; more than one where a layer is looped.
        part_of: Tensor of the source that holds it with others; empty if it has one of its own.
        may_be_skipped: Whether tokens may be routed past it, so that none may reach it.
        feeds_attention: Whether causal attention's queries, keys or values are made with it.
        built: Whether the model class builds it. One that it does not build sees no inputs, and is not calibrated; its
            location is its own tensor.
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
    built: bool = True

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
class SourceForm:
    """How the weights of a source are stored, where that is not plain 16 or 32 bit.

    Attributes:
        title: What the form is, in words; empty if all is plain.
        dequantized: Names of the tensors that are dequantized as they are read.
        dropped: Stored tensors that have no place in the result, and why.
        parts_bytes: Bytes of what is stored of those tensors that are dequantized at the same time, at most.
        values_bytes: Bytes of their values in float32.
    """

    title: str = ""
    dequantized: frozenset[str] = frozenset()
    dropped: tuple[Untouched, ...] = ()
    parts_bytes: int = 0
    values_bytes: int = 0


PLAIN = SourceForm()
"""That of a source whose tensors are seen as they are stored."""


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
class ExpertLoad:
    """How many calibration tokens an expert of a mixture can expect.

    Attributes:
        module: What runs the experts, with `*` for its block's number.
        experts: How many there are.
        chosen: To how many of them a token goes.
        tokens: Tokens of each if every window is full and all are chosen alike.
        enough: With fewer, most of an expert's Hessian is that of all of them.
        windows: Windows with which even an expert that is chosen half as often as the mean has enough.
    """

    module: str
    experts: int
    chosen: int
    tokens: int
    enough: int
    windows: int


@dataclass(frozen=True)
class StageCost:
    """What one kind of work is estimated to take.

    Attributes:
        name: What it is.
        seconds: With all processes: those of the one that has most of it.
        seconds_of_one: With one process.
        seconds_undivided: Of these, what every process, or the first alone, does however many there are.
    """

    name: str
    seconds: float
    seconds_of_one: float
    seconds_undivided: float


@dataclass(frozen=True)
class RunCost:
    """What a run over several processes is estimated to take (docs/scaling.md).

    Attributes:
        processes: How many there are.
        rates: Whose speed each process is taken to have.
        measured: Whether that speed was measured, and not assumed.
        seconds: Time of the run.
        seconds_of_one: With one process.
        seconds_undivided: Of these, what no number of processes makes less.
        stages: The same by kind of work; they add up to it.
        received_bytes: Bytes that the process with most of it receives from others.
        read_bytes: Bytes of the source that each process reads.
        first_read_bytes: Bytes of it that the first reads, which audits it besides.
        memory_bytes: Estimated peak of each process's memory, where the model runs.
    """

    processes: int
    rates: str
    measured: bool
    seconds: float
    seconds_of_one: float
    seconds_undivided: float
    stages: tuple[StageCost, ...]
    received_bytes: int
    read_bytes: int
    first_read_bytes: int
    memory_bytes: int = 0

    @property
    def speed_up(self) -> float:
        """How many times as fast as one process."""
        return self.seconds_of_one / self.seconds

    @property
    def limit(self) -> float:
        """What no number of processes exceeds: exchanges cost nothing there, and what is divided takes no time."""
        return self.seconds_of_one / self.seconds_undivided

    @property
    def largest(self) -> StageCost:
        """The kind of work that takes most."""
        return max(self.stages, key=lambda stage: stage.seconds)


@dataclass(frozen=True)
class Allocation:
    """What is expected of bits that were divided over weights by a target.

    Attributes:
        predicted_kl: KL divergence from the original model's predictions, in nats per token, that the weights whose
            bits were chosen are expected to cost; estimated before any of them is quantized.
        bits: What all quantized weights take as they are stored, in bits per weight.
        bound: No division of the same size is expected to cost less.
        uniform_kl: Expected where all of them have the bits and the group size of the settings.
        uniform_bits: Bits per weight then.
        tokens: Calibration tokens that it is estimated from.
    """

    predicted_kl: float
    bits: float
    bound: float
    uniform_kl: float
    uniform_bits: float
    tokens: int


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
        source_bytes: Bytes of all source tensors; of those that are dequantized, in 16 bit.
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
        place: The device that the model runs on and the dtype that it computes in; empty where it does not run.
        device_memory_bytes: Estimated peak of the memory of an accelerator that the model runs on; 0 without one.
        device_memory: Bytes that it has; 0 without one, or where that does not matter.
        expert_load: Of the experts that can expect the fewest tokens; None where none is quantized, all see all
            tokens, or nothing says how many are chosen.
        source_form: How the source's weights are stored, in words; empty if they are plain 16 or 32 bit.
        dropped: Tensors of the source that have no place in the result, and why.
        cost: What a run over several processes is estimated to take, where it was asked for.
        allocation: What is expected of bits that were chosen by a target; None where there was none.
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
    place: str = ""
    device_memory_bytes: int = 0
    device_memory: int = field(default=0, compare=False)
    expert_load: ExpertLoad | None = None
    source_form: str = ""
    dropped: tuple[Untouched, ...] = ()
    # Of a run and not of the plan: any number of processes does the same.
    cost: RunCost | None = field(default=None, compare=False)
    allocation: Allocation | None = None

    @property
    def fits(self) -> bool:
        """Whether the machine, and its accelerator, hold what the run is estimated to take."""
        on_host = not self.machine_memory or self.memory_bytes <= self.machine_memory
        return on_host and self.fits_device

    @property
    def fits_device(self) -> bool:
        """Whether the accelerator holds its part; it does if there is none."""
        return not self.device_memory or self.device_memory_bytes <= self.device_memory


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
