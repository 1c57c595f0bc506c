"""The options of the command line that become a `Config`, made of what its fields say of themselves."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, get_origin

import typer
from typer.core import TyperCommand

from hessquant.config import Config, Override, setting_of
from hessquant.errors import ConfigError

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

_OVERRIDABLE = {"bits": "bits", "group": "group_size"}
_SYMMETRIES = {"symmetric": True, "asymmetric": False}


def options_of(*names: str, required: str = "") -> dict[str, inspect.Parameter]:
    """Parameters for typer by setting: of those named, or of all that have an option.

    Args:
        names: Settings.
        required: One of them, whose default does not count here.
    """
    return {
        each.name: _option(each, required=each.name == required)
        for each in fields(Config)
        if setting_of(each).option is not None and (not names or each.name in names)
    }


def config_of(given: Mapping[str, Any]) -> Config:
    """The config that the values of such parameters ask for.

    Raises:
        ConfigError: If a value means nothing.
    """
    return Config(**{each.name: _value(each, given[each.name]) for each in fields(Config) if each.name in given})


def signature_of(command: Callable[..., int], options: Mapping[str, inspect.Parameter]) -> inspect.Signature:
    """What typer is to read of a command: its parameter `config` gives way to `options`, and `--json` comes last."""
    own = inspect.signature(command).parameters.items()
    shown = [part for name, parameter in own for part in (options.values() if name == "config" else [parameter])]
    json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Json)
    return inspect.Signature([parameter.replace(kind=json.kind) for parameter in (*shown, json)])


def _option(each: Field[Any], *, required: bool) -> inspect.Parameter:
    """A field's option; besides what typer wants, its annotation has the other sentences, for the documentation."""
    said, default = setting_of(each), each.default
    kind: Any = each.type
    first, _, more = said.text.partition(". ")
    parts = [first.removesuffix("."), said.example and f"for example {said.example}"]
    if kind is bool:
        default = False
    elif get_origin(kind) is tuple:
        kind, default = list[str] | None, None
        parts.append("may be repeated")
    elif said.metavar in _READERS:
        kind = str | None
        default = f"{default // 10**9}GB" if isinstance(default, int) else default
    option = typer.Option(
        f"--{said.option or each.name}".replace("_", "-"),
        metavar=said.metavar,
        help=f"{'; '.join(filter(None, parts))}.",
        show_default=said.unset or not required,
    )
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[kind, option, more],
    )


def _value(each: Field[Any], given: Any) -> Any:
    """What the value of a field's option means."""
    if each.type is bool:
        return given != each.default
    said = setting_of(each)
    read: Callable[[str, Any], Any] = _READERS.get(said.metavar, lambda _, value: value)
    if get_origin(each.type) is tuple:
        return tuple(read(each.name, text) for text in given or ())
    return None if given is None else read(said.option or each.name, given)


class OnceEach(TyperCommand):
    """A command that refuses an option given twice, where it takes one value: the second would replace the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as ever, after a look at what is there."""
        order: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for given, count in Counter(part for part in order if part.param_type_name == "option").items():
            if count > 1 and not (given.multiple or given.is_flag or given.count):
                advice = "; texts cannot be mixed, join them in one file" if given.name == "calibration" else ""
                raise typer.BadParameter(f"is given {count} times, and takes one value{advice}", ctx=ctx, param=given)
        return super().parse_args(ctx, args)


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


# By what stands for the value; others are as they are given.
_READERS: dict[str | None, Callable[[str, str], Any]] = {
    "SIZE": parse_size,
    "auto|N|-1": lambda _, text: int(text) if re.fullmatch(r"[+-]?\d{1,9}", text) else text,
    "PATTERN=SETTINGS": lambda _, text: parse_override(text),
}
