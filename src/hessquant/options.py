"""The options of the command line, declared once; those of `plan` and `quantize` become a `Config` here."""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from hessquant.config import CLIENTS, CaptureMethod, Config, Experts, Format, Order, Override, Scales, TokenWeights
from hessquant.errors import ConfigError

_DEFAULTS = Config()
_OVERRIDABLE = {"bits": "bits", "group": "group_size"}
_SYMMETRIES = {"symmetric": True, "asymmetric": False}

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Local directory, hub id, .gguf file, or 'demo'.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Serve = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CLIENT", help=f"Refuse what this client does not open: {', '.join(CLIENTS)}; may be repeated."
    ),
]
ShardSize = Annotated[str, typer.Option(metavar="SIZE", help="Largest size of an output file.")]
WindowLength = Annotated[
    int | None, typer.Option(help="Tokens per window. [default: the smaller of 2048 and the model's context]")
]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Let code that comes with MODEL run.")]


def build_config(
    bits: Annotated[int, typer.Option(help="Bits per weight, 2 to 8.")] = _DEFAULTS.bits,
    group_size: Annotated[
        str,
        typer.Option(
            metavar="auto|N|-1",
            help="Inputs that share a scale; -1 = one group per row; auto = the largest of 128, 64, 32 that fits.",
        ),
    ] = str(_DEFAULTS.group_size),
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Fit a zero per group.")] = False,
    format: Annotated[Format, typer.Option(help="On-disk dialect of the result.")] = _DEFAULTS.format,
    order: Annotated[Order, typer.Option(help="Order in which columns are rounded.")] = _DEFAULTS.order,
    scales: Annotated[
        Scales, typer.Option(help="Fix all scales before the sweep, or fit each group's when it is reached.")
    ] = _DEFAULTS.scales,
    no_scale_search: Annotated[
        bool, typer.Option("--no-scale-search", help="Take each group's min-max scale instead of the best one.")
    ] = False,
    damping: Annotated[
        float, typer.Option(help="Fraction of the mean Hessian diagonal that is added to it.")
    ] = _DEFAULTS.damping,
    refinement_rounds: Annotated[
        int, typer.Option(help="Rounds of descent over scales and codes after the sweep.")
    ] = _DEFAULTS.refinement_rounds,
    num_windows: Annotated[int, typer.Option(help="Calibration windows.")] = _DEFAULTS.num_windows,
    window_length: WindowLength = _DEFAULTS.window_length,
    allow_fewer: Annotated[
        bool, typer.Option("--allow-fewer", help="Take what there is when the text has too few windows.")
    ] = False,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Quantize these weights too; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave these weights alone; may be repeated.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=SETTINGS",
            help="Other settings for some weights, such as mlp.down_proj=bits:8,group:64; may be repeated.",
        ),
    ] = None,
    serve: Serve = None,
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = _DEFAULTS.seed,
    capture: Annotated[
        CaptureMethod,
        typer.Option(help="Run each block once, in several passes that hold less, or whichever the memory allows."),
    ] = _DEFAULTS.capture,
    experts: Annotated[
        Experts, typer.Option(help="Fit each expert to the tokens routed to it, or to all of the calibration text.")
    ] = _DEFAULTS.experts,
    token_weights: Annotated[
        TokenWeights,
        typer.Option(help="Count a window's first token as often as attention reads it, or count all tokens alike."),
    ] = _DEFAULTS.token_weights,
    max_unquantized: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="Refuse to leave a larger share in 16 bit, embeddings and head apart; 0 to 1."
        ),
    ] = _DEFAULTS.max_unquantized,
    activation_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for activations, such as 8GB; the rest goes to a file. [default: 1/4 of free]"
        ),
    ] = None,
    shard_size: ShardSize = "4GB",
    trust_remote_code: TrustRemoteCode = False,
) -> Config:
    """Turn the options that `plan` and `quantize` share into a config."""
    return Config(
        bits=bits,
        group_size=_group_size(group_size),
        symmetric=not asymmetric,
        format=format,
        order=order,
        scales=scales,
        scale_search=not no_scale_search,
        refinement_rounds=refinement_rounds,
        damping=damping,
        num_windows=num_windows,
        window_length=window_length,
        allow_fewer=allow_fewer,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        overrides=tuple(map(parse_override, override or ())),
        serve=tuple(serve or ()),
        seed=seed,
        capture=capture,
        experts=experts,
        token_weights=token_weights,
        max_unquantized=max_unquantized,
        activation_memory=None if activation_memory is None else parse_size("activation_memory", activation_memory),
        shard_bytes=parse_size("shard_size", shard_size),
        trust_remote_code=trust_remote_code,
    )


def takes_config(command: Callable[..., int]) -> Callable[..., int]:
    """Show typer the options of `build_config` in place of `command`'s parameter `config`.

    Typer reads signatures, so the command gets one that it does not have.
    """
    options = inspect.signature(build_config).parameters
    own = inspect.signature(command).parameters.values()
    shown = [part for parameter in own for part in (options.values() if parameter.name == "config" else [parameter])]

    @functools.wraps(command)
    def run(**given: Any) -> int:
        config = build_config(**{name: given.pop(name) for name in options})
        return command(config=config, **given)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in shown]
    )
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return run


class OnceEach(TyperCommand):
    """A command that refuses an option given twice, where it takes one value: the second would replace the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as ever, after a look at what is there."""
        order: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for option, count in Counter(parameter for parameter in order if _takes_one(parameter)).items():
            if count > 1:
                advice = "; texts cannot be mixed, join them in one file" if option.name == "calibration" else ""
                raise typer.BadParameter(f"is given {count} times, and takes one value{advice}", ctx=ctx, param=option)
        return super().parse_args(ctx, args)


def _takes_one(parameter: Any) -> bool:
    return parameter.param_type_name == "option" and not (parameter.multiple or parameter.is_flag or parameter.count)


def parse_size(name: str, text: str) -> int:
    """Bytes of a size such as 512MB or 4GB (powers of 1000), 4GiB (of 1024), or a plain number.

    Raises:
        ConfigError: If it is none of these.

    >>> parse_size("shard_size", "4GB"), parse_size("shard_size", "1.5 KiB")
    (4000000000, 1536)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"{name} is {text!r}; give bytes, or a size such as 512MB, 4GB or 4GiB")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def parse_override(text: str) -> Override:
    """An override as `--override` takes it.

    Raises:
        ConfigError: If it has another form.

    >>> parse_override("mlp.down_proj=bits:8,group:64")
    Override(pattern='mlp.down_proj', bits=8, group_size=64, symmetric=None)
    >>> parse_override("layers.0.*=asymmetric").symmetric
    False
    """
    pattern, _, settings = text.rpartition("=")
    values: dict[str, int | bool] = {}
    for setting in settings.split(","):
        name, _, number = setting.strip().partition(":")
        if name in _SYMMETRIES and not number:
            values["symmetric"] = _SYMMETRIES[name]
        elif name in _OVERRIDABLE and re.fullmatch(r"-?\d{1,9}", number):
            values[_OVERRIDABLE[name]] = int(number)
        else:
            raise ConfigError(
                f"override {text!r}: {setting!r} is no setting; the form is "
                "PATTERN=bits:N,group:N,symmetric (or asymmetric), any of the three"
            )
    if not pattern:
        raise ConfigError(f"override {text!r} names no weights; the form is PATTERN=bits:N,group:N")
    return Override(pattern=pattern, **values)  # type: ignore[arg-type]


def _group_size(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"group_size is {text!r}; choose 'auto', -1 or a positive number") from None
