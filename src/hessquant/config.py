"""What a user asks for: one frozen record, checked when it is made.

A field says what is to be said of it, once. Its check, its option on the command line, that option's row in
`docs/cli.md`, and what `help(Config)` says of it are made of that.
"""

# ruff: noqa: RUF009 (the call in a field's place gives a `dataclasses.field`, which ruff does not see)

import textwrap
from dataclasses import Field, dataclass, field, fields
from math import inf
from numbers import Real
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

from hessquant.errors import ConfigError

Order = Literal["activation", "natural", "group"]
Scales = Literal["static", "dynamic"]
Format = Literal["gptq", "compressed-tensors", "gguf", "nvfp4", "mxfp4"]
CaptureMethod = Literal["auto", "once", "passes"]
Experts = Literal["routed", "all"]
TokenWeights = Literal["attention", "uniform"]
ForwardDtype = Literal["auto", "float32", "source"]
Client = Literal["vllm", "vllm-cpu", "vllm-gpu", "transformers", "sglang", "tensorrt-llm", "mlx-lm", "llama.cpp"]

CLIENTS: tuple[Client, ...] = get_args(Client)
"""What `Config.serve` may name; a client without its device means the client on each of them."""

AUTO_GROUP_SIZES = (128, 64, 32)

FLOAT_GROUP_SIZES: dict[str, int] = {"nvfp4": 16, "mxfp4": 32}
"""The one group size of each format whose weights are 4-bit floats."""

LONGEST_DEFAULT_WINDOW = 2048
"""Tokens per window where no length is asked for and the model has that context."""

T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """What is to be said of a field besides its name, type and default.

    Attributes:
        text: What it means, and of True as the default, what False means; `--help` says the first sentence.
        unset: What None stands for.
        bounds: The smallest and the largest number; None = it is no number. What the type names is taken too.
        choose: Asks for another number, or begins the list of choices; "" = as is usual.
        option: Its name on the command line; "" = made of the field's, None = it has none.
        metavar: What stands for the value there; None = the type. SIZE is read as bytes.
        example: A value as it is written there, if not as in Python.
    """

    text: str
    unset: str = ""
    bounds: tuple[float, float] | None = None
    choose: str = ""
    option: str | None = ""
    metavar: str | None = None
    example: str = ""


def setting_of(field: Field[Any]) -> Setting:
    """What a field says of itself.

    Raises:
        TypeError: If it says nothing.
    """
    said = field.metadata.get("setting")
    if not isinstance(said, Setting):
        raise TypeError(f"the field {field.name!r} says nothing of itself; give it a Setting")
    return said


def documented(record: type[T]) -> type[T]:
    """Add to a record's docstring what its fields say of themselves.

    Raises:
        TypeError: If one says nothing.
    """
    lines = [f"{record.__doc__}\n    Attributes:"]
    for each in fields(record):  # type: ignore[arg-type]
        said, text = setting_of(each), setting_of(each).text
        text = f"False = {text[0].lower()}{text[1:]}" if each.default is True else text
        text = f"{each.name}: {text}{f' None = {said.unset}.' if said.unset else ''}"
        lines.append(textwrap.fill(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 12))
    record.__doc__ = "\n".join(lines) + "\n"
    return record


def _said(default: T, text: str, **said: Any) -> T:
    value: T = field(default=default, metadata={"setting": Setting(text, **said)})
    return value


def _check(record: Any, where: str = "") -> None:
    """Refuse numbers out of bounds, and what a type that names its values does not name.

    Args:
        record: A `Config` or an `Override`.
        where: What messages say before a field's name.

    Raises:
        ConfigError: If there is such a value.
    """
    for each in fields(record):
        value, said, several = getattr(record, each.name), setting_of(each), get_origin(each.type) is tuple
        literals = [part for part in (each.type, *get_args(each.type)) if get_origin(part) is Literal]
        choices = [choice for literal in literals for choice in get_args(literal)]
        for part in value if several else (value,):
            if part in choices or (part is None and NoneType in get_args(each.type)):
                continue
            if said.bounds:
                least, most = said.bounds
                if not (isinstance(part, Real) and least <= float(part) <= most):
                    bounds = f"it must be at least {least}" if most == inf else f"choose {least} to {most}"
                    raise ConfigError(f"{where}{each.name} is {part!r}; {said.choose or bounds}")
            elif choices:
                verb, known = "names" if several else "is", said.choose or "choose one of"
                raise ConfigError(f"{where}{each.name} {verb} {part!r}; {known} {', '.join(choices)}")


@documented
@dataclass(frozen=True, kw_only=True)
class Override:
    """Other settings for the weights that a pattern matches; None = as in the config.

    Raises:
        ConfigError: If a value means nothing, or nothing is set.
    """

    pattern: str = field(metadata={"setting": Setting("Of weight names, as in `Config.include`.")})
    bits: int | None = _said(None, "Bits per weight, 2 to 8.", bounds=(2, 8))
    group_size: int | Literal[-1] | None = _said(
        None,
        "Inputs that share a scale; -1 = one group per row.",
        bounds=(1, inf),
        choose="choose -1 or a positive number",
    )
    symmetric: bool | None = _said(None, "One fixed zero at mid-range, or a zero per group.")

    def __post_init__(self) -> None:
        where = f"override {self.pattern!r}"
        if (self.bits, self.group_size, self.symmetric) == (None, None, None):
            raise ConfigError(f"{where} sets nothing; give it bits, a group size or a symmetry")
        _check(self, f"{where}: ")


@documented
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one run. Every name is explained in `docs/glossary.md`.

    Raises:
        ConfigError: If a value means nothing.
    """

    bits: int = _said(4, "Bits per weight, 2 to 8. A format may accept fewer values.", bounds=(2, 8))
    group_size: int | Literal["auto", -1] = _said(
        "auto",
        "Inputs that share a scale; -1 = one group per row; auto = the largest of "
        f"{', '.join(map(str, AUTO_GROUP_SIZES))} that divides every target's inputs.",
        bounds=(1, inf),
        choose="choose 'auto', -1 or a positive number",
        metavar="auto|N|-1",
    )
    symmetric: bool = _said(True, "Fit a zero per group instead of one fixed zero at mid-range.", option="asymmetric")
    format: Format = _said(
        "gptq",
        "On-disk dialect of the result. Take compressed-tensors for asymmetric 4-bit weights in vLLM; gguf, one file "
        "OUT/model.gguf, for llama.cpp; nvfp4 or mxfp4 for weights that are 4-bit floats.",
    )
    order: Order = _said("activation", "Order in which columns are rounded.")
    scales: Scales = _said(
        "static",
        "Fix all scales before the sweep, or fit each group's when it is reached. Dynamic scales are fitted to the "
        "weights as compensated by then, and need order natural or group.",
    )
    scale_search: bool = _said(
        True,
        "Take each group's min-max scale instead of the best one. The best has the least weighted error.",
        option="no_scale_search",
    )
    refinement_rounds: int = _said(
        0,
        "Rounds of descent over scales and codes after the sweep. 0 = plain GPTQ; each round lowers the error on the "
        "calibration data, and costs about as much as a sweep and a half.",
        bounds=(0, inf),
    )
    damping: float = _said(
        0.01,
        "Fraction of the mean Hessian diagonal that is added to it, 0 to 1.",
        bounds=(0, 1),
        choose="choose a fraction from 0 to 1, for example 0.01",
    )
    block_size: int = _said(
        128, "Columns per lazy block of the sweep. The result does not depend on it.", bounds=(1, inf), option=None
    )
    num_windows: int = _said(128, "Calibration windows. A pair, or a row with images, is one.", bounds=(1, inf))
    window_length: int | None = _said(
        None,
        "Tokens per window. Of a pair, it is the most on either side.",
        unset=f"the smaller of {LONGEST_DEFAULT_WINDOW} and the model's context",
        bounds=(1, inf),
    )
    allow_fewer: bool = _said(False, "Take what there is when the text has too few windows. Otherwise that is refused.")
    include: tuple[str, ...] = _said(
        (),
        "Quantize these weights too. Each is a pattern of names; lm_head takes the head, and unties it where it shares "
        "the embedding's weight. What the model class does not build, such as layers to draft from, is rounded to "
        "nearest on searched scales, without calibration.",
        metavar="PATTERN",
    )
    exclude: tuple[str, ...] = _said((), "Leave these weights alone.", metavar="PATTERN")
    overrides: tuple[Override, ...] = _said(
        (),
        "Other settings for some weights. They are any of bits, group size and symmetry (symmetric or asymmetric); of "
        "several overrides that match, the later one counts.",
        option="override",
        metavar="PATTERN=SETTINGS",
        example="mlp.down_proj=bits:8,group:64",
    )
    target_bits: float | None = _said(
        None,
        "Choose bits and group size of each weight, so that stored they take no more than this on average. That is "
        "with scales, zeros and indices. Chosen is what the model's predictions lose least by, as estimated with 16 "
        "calibration windows, of what the clients open; what an override names stays as that says.",
        unset="bits and group size as they are set",
        bounds=(2, 16),
    )
    target_bytes: int | None = _said(
        None,
        "Choose them so that the tensors of the result take no more than this.",
        unset="any size",
        bounds=(1, inf),
        option="target_size",
        metavar="SIZE",
        example="5GB",
    )
    serve: tuple[Client, ...] = _said(
        (),
        f"Refuse what this client does not open: {', '.join(CLIENTS)}.",
        choose="known clients are",
        metavar="CLIENT",
    )
    seed: int = _said(0, "Seed of every random choice.")
    capture: CaptureMethod = _said(
        "auto",
        "Run each block once, in several passes that hold less, or whichever the memory allows. All give one result.",
    )
    experts: Experts = _said(
        "routed",
        "Fit each expert to the tokens routed to it, or to all of the calibration text. If few are routed, its Hessian "
        "is drawn toward that of all experts; all needs a module that is told which experts to run, and is refused "
        "otherwise. What an expert works on in the model stays as it is.",
    )
    token_weights: TokenWeights = _said(
        "attention",
        "Count a window's first token as often as attention reads it, or count all tokens alike. What is read is its "
        "key and value, and this is for the Hessians of the weights that make them.",
    )
    max_unquantized: float = _said(
        0.2,
        "Refuse to leave a larger share in 16 bit, embeddings and head apart; 0 to 1. It is a share of the weights' "
        "bytes; what is excluded does not count either.",
        bounds=(0, 1),
        choose="choose a share from 0 to 1, for example 0.2",
        metavar="SHARE",
    )
    requantize: bool = _said(
        False,
        "Take a source that is quantized to integers already, at a cost in quality. It is decoded first: gptq, awq, or "
        "compressed-tensors; one in FP8 or MXFP4 needs no leave.",
    )
    activation_memory: int | None = _said(
        None,
        "Bytes for the calibration tokens' activations; beyond that, those between blocks go to a file.",
        unset="a quarter of the machine's memory, or of its container's limit",
        bounds=(0, inf),
        metavar="SIZE",
        example="8GB",
    )
    shard_bytes: int = _said(
        4_000_000_000,
        "Largest size of an output file. One weight alone may be larger.",
        bounds=(1, inf),
        option="shard_size",
        metavar="SIZE",
    )
    device: str = _said(
        "auto",
        "Where to compute: an accelerator if torch has one, or a device as torch names it. A run goes on "
        "where it began, since others round otherwise.",
        metavar="auto|cpu|cuda|cuda:N|...",
    )
    forward_dtype: ForwardDtype = _said(
        "auto",
        "Run the model in float32, in its checkpoint's 16-bit dtype, or in whichever the device likes. That is float32 "
        "on the CPU and the checkpoint's on an accelerator; Hessians, factors and sweeps are float32 or float64 "
        "either way.",
    )
    trust_remote_code: bool = _said(False, "Let code that comes with the model run.")

    def __post_init__(self) -> None:
        _check(self)
        if self.scales == "dynamic" and self.order == "activation":
            raise ConfigError(
                "dynamic scales in activation order would need a permuted g_idx, which servers have "
                "dropped; use order 'group' or 'natural', or static scales"
            )
        width = FLOAT_GROUP_SIZES.get(self.format)
        self._refuse_targets(width is not None)
        if width is not None and not (self.bits == 4 and self.symmetric and self.group_size in ("auto", width)):
            kind = "symmetric" if self.symmetric else "asymmetric"
            raise ConfigError(
                f"the format {self.format} holds 4-bit floats in groups of {width} without zeros, and nothing else; "
                f"asked for are {self.bits} bits, {kind}, in groups of {self.group_size}: leave these settings out"
            )

    def _refuse_targets(self, floats: bool) -> None:
        if self.target_bits is not None and self.target_bytes is not None:
            raise ConfigError("target_bits and target_bytes both say how small it is to be; give one of them")
        if floats and (self.target_bits is not None or self.target_bytes is not None):
            raise ConfigError(f"the format {self.format} has one kind of grid, so there are no bits to divide")
