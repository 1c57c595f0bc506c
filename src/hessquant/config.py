"""What a user asks for: one frozen record, checked when it is made."""

from dataclasses import dataclass
from typing import Literal, get_args

from hessquant.errors import ConfigError

Order = Literal["activation", "natural", "group"]
Scales = Literal["static", "dynamic"]
Format = Literal["gptq", "compressed-tensors", "gguf"]
CaptureMethod = Literal["auto", "once", "passes"]
Experts = Literal["routed", "all"]
TokenWeights = Literal["attention", "uniform"]

CLIENTS = ("vllm", "vllm-cpu", "vllm-gpu", "transformers", "sglang", "llama.cpp")
"""What `Config.serve` may name; a client without its device means the client on each of them."""

AUTO_GROUP_SIZES = (128, 64, 32)

LONGEST_DEFAULT_WINDOW = 2048
"""Tokens per window where no length is asked for and the model has that context."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """Other settings for the weights that a pattern matches; None = as in the config.

    Attributes:
        pattern: Of weight names, as in `Config.include`.
        bits: Bits per code.
        group_size: Inputs that share a scale; -1 = one group per row.
        symmetric: One fixed zero at mid-range, or a zero per group.

    Raises:
        ConfigError: If a value means nothing, or nothing is set.
    """

    pattern: str
    bits: int | None = None
    group_size: int | None = None
    symmetric: bool | None = None

    def __post_init__(self) -> None:
        where = f"override {self.pattern!r}"
        if (self.bits, self.group_size, self.symmetric) == (None, None, None):
            raise ConfigError(f"{where} sets nothing; give it bits, a group size or a symmetry")
        if self.bits is not None:
            _check_bits(f"{where}: bits", self.bits)
        if self.group_size is not None:
            _check_group_size(f"{where}: group_size", self.group_size)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one run. Every name is explained in `docs/glossary.md`.

    Attributes:
        bits: Bits per code, 2 to 8 (a format may accept fewer values).
        group_size: Inputs that share a scale; -1 = one group per row; "auto" = the largest of
            128, 64, 32 that divides every target's inputs.
        symmetric: One fixed zero at mid-range, or a zero per group.
        format: On-disk dialect of the result.
        order: Order in which columns are rounded.
        scales: "static" fixes every scale before the sweep; "dynamic" fits a group's scales when
            the sweep reaches it, to the weights as compensated by then.
        scale_search: Search each group's scale for the least weighted error, or take min-max.
        refinement_rounds: Rounds of descent over scales and codes after the sweep; 0 = plain GPTQ.
        damping: Fraction of the mean Hessian diagonal that is added to the diagonal.
        block_size: Columns per lazy block of the sweep.
        num_windows: Calibration windows.
        window_length: Tokens per calibration window; None = the smaller of 2048 and the model's context.
        allow_fewer: Take what there is when the text has too few windows.
        include: Patterns of weight names to quantize besides the default targets.
        exclude: Patterns of weight names to leave alone.
        overrides: Other settings for some weights; of several that match, the later one counts.
        serve: Clients that must open the result; the plan is refused where one is known not to.
        seed: Seed of every random choice.
        capture: "once" runs each block once (DESIGN "forward once"); "passes" runs it several
            times, stopping early, and holds less in memory; "auto" takes "once" where `activation_memory`
            allows it. The result is the same.
        experts: Tokens that an expert is fitted to: those "routed" to it, or "all" of the calibration text. What it
            works on in the model stays as it is.
        token_weights: What a calibration token counts in a Hessian: "attention" counts a window's first one once per
            token that reads its key and value, in the weights that make them; "uniform" counts all alike.
        max_unquantized: Largest share of the weights' bytes that may stay in 16 bit, 0 to 1; embeddings and head do
            not count.
        activation_memory: Bytes that activations of the calibration tokens may take in memory; those between
            blocks go to a file beyond that. None = a quarter of the machine's, or of its container's limit.
        shard_bytes: Largest size of an output file, unless one weight alone is larger.
        trust_remote_code: Allow code that comes with the model to run.

    Raises:
        ConfigError: If a value means nothing.
    """

    bits: int = 4
    group_size: int | Literal["auto"] = "auto"
    symmetric: bool = True
    format: Format = "gptq"
    order: Order = "activation"
    scales: Scales = "static"
    scale_search: bool = True
    refinement_rounds: int = 0
    damping: float = 0.01
    block_size: int = 128
    num_windows: int = 128
    window_length: int | None = None
    allow_fewer: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    serve: tuple[str, ...] = ()
    seed: int = 0
    capture: CaptureMethod = "auto"
    experts: Experts = "routed"
    token_weights: TokenWeights = "attention"
    max_unquantized: float = 0.2
    activation_memory: int | None = None
    shard_bytes: int = 4_000_000_000
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("order", self.order, get_args(Order)),
            ("scales", self.scales, get_args(Scales)),
            ("format", self.format, get_args(Format)),
            ("capture", self.capture, get_args(CaptureMethod)),
            ("experts", self.experts, get_args(Experts)),
            ("token_weights", self.token_weights, get_args(TokenWeights)),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        _check_clients(self.serve)
        _check_bits("bits", self.bits)
        if self.group_size != "auto":
            _check_group_size("group_size", self.group_size)
        if not 0 <= self.max_unquantized <= 1:
            raise ConfigError(f"max_unquantized is {self.max_unquantized}; choose a share from 0 to 1, for example 0.2")
        if not 0 <= self.damping <= 1:
            raise ConfigError(f"damping is {self.damping}; choose a fraction from 0 to 1, for example 0.01")
        for name, count, least in (
            ("block_size", self.block_size, 1),
            ("num_windows", self.num_windows, 1),
            ("window_length", 1 if self.window_length is None else self.window_length, 1),
            ("shard_bytes", self.shard_bytes, 1),
            ("refinement_rounds", self.refinement_rounds, 0),
            ("activation_memory", self.activation_memory or 0, 0),
        ):
            if count < least:
                raise ConfigError(f"{name} is {count}; it must be at least {least}")
        if self.scales == "dynamic" and self.order == "activation":
            raise ConfigError(
                "dynamic scales in activation order would need a permuted g_idx, which servers have "
                "dropped; use order 'group' or 'natural', or static scales"
            )


def _check_bits(name: str, bits: int) -> None:
    if not 2 <= bits <= 8:
        raise ConfigError(f"{name} is {bits}; choose 2 to 8")


def _check_group_size(name: str, group_size: int) -> None:
    if group_size < 1 and group_size != -1:
        raise ConfigError(f"{name} is {group_size}; choose -1 or a positive number")


def _check_clients(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in CLIENTS:
            raise ConfigError(f"serve names {name!r}; known clients are {', '.join(CLIENTS)}")
