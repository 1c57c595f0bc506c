"""The options of the command line that become a `Config`, made of what its fields say of themselves."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_origin

import typer
from typer.core import TyperCommand

from hessquant.config import Config, Override, setting_of
from hessquant.errors import ConfigError
from hessquant.measures import NEW_TOKENS, Trials

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

_OVERRIDABLE = {"bits": "bits", "group": "group_size"}
_SYMMETRIES = {"symmetric": True, "asymmetric": False}


_TRIALS: dict[str, Any] = {
    "generate": Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="[N]",
            help=f"Continue a dozen prompts by up to N tokens; {NEW_TOKENS} where no number is given.",
            show_default="no continuations",
        ),
        "Each token is the likeliest one. All of a model must fit in memory.",
    ],
    "prompts": Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Continue these prompts: the lines of a .txt file, or a .jsonl file's rows."),
        "A row has `text` or `messages`. Where the tokenizer has a chat template, a text is what a user says.",
    ],
    "tasks": Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Do these tasks of lm-eval, which is an extra."),
        "They may be groups or tags. All of a model must fit in memory.",
    ],
    "task_path": Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with files of tasks besides lm-eval's own.")
    ],
}

TRIALS: Mapping[str, inspect.Parameter] = {
    name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    for name, annotation in _TRIALS.items()
}
"""Parameters for typer by what `evaluate` may try besides."""


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


def taken_out(given: dict[str, Any], options: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """What a command is passed in place of `options` and `TRIALS`, whose values leave `given`.

    Raises:
        ConfigError: If a value means nothing.
    """
    settings: dict[str, Any] = {"config": config_of({name: given.pop(name) for name in options})}
    if TRIALS.keys() <= given.keys():
        settings["trials"] = trials_of({name: given.pop(name) for name in TRIALS})
    return settings


def trials_of(given: Mapping[str, Any]) -> Trials:
    """The trials that the values of `TRIALS` ask for; nothing where none is asked for.

    Raises:
        ConfigError: If no task is named.
    """
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if "tasks" in asked:
        asked["tasks"] = tuple(filter(None, map(str.strip, asked["tasks"].split(","))))
        if not asked["tasks"]:
            raise ConfigError(f"tasks is {given['tasks']!r}; give names with commas between them")
    return cast(Trials, asked)


def signature_of(command: Callable[..., int], options: Mapping[str, inspect.Parameter]) -> inspect.Signature:
    """What typer is to read of a command: `config` gives way to `options`, `trials` to theirs; `--json` comes last."""
    own, made = inspect.signature(command).parameters.items(), {"config": options, "trials": TRIALS}
    shown = [part for name, parameter in own for part in (made[name].values() if name in made else [parameter])]
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
    """A command that refuses an option given twice, where it takes one value: the second would replace the first.

    An option whose number may be left out, which typer does not have, is given that number before typer sees it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as ever, after a look at what is there."""
        args = list(_with_numbers(args))
        order: list[Any] = self.make_parser(ctx).parse_args(args=list(args))[2]
        for given, count in Counter(part for part in order if part.param_type_name == "option").items():
            if count > 1 and not (given.multiple or given.is_flag or given.count):
                advice = "; texts cannot be mixed, join them in one file" if given.name == "calibration" else ""
                raise typer.BadParameter(f"is given {count} times, and takes one value{advice}", ctx=ctx, param=given)
        return super().parse_args(ctx, args)


def _with_numbers(args: Sequence[str]) -> Iterator[str]:
    """The arguments, with the default number after a `--generate` that no number follows.

    >>> list(_with_numbers(["a", "--generate", "--json"])), list(_with_numbers(["--generate", "9", "a"]))
    (['a', '--generate', '48', '--json'], ['--generate', '9', 'a'])
    """
    options = args[: args.index("--")] if "--" in args else args
    for index, each in enumerate(args):
        yield each
        follows = args[index + 1] if index + 1 < len(args) else ""
        if each == "--generate" and index < len(options) and not re.fullmatch(r"[+-]?\d+", follows):
            yield str(NEW_TOKENS)


def parse_size(name: str, text: str) -> int:
    """Bytes of a size such as 512MB or 4GB (powers of 1000), 4GiB (of 1024), or a plain number.

    Raises:
        ConfigError: If it is none of these.

    >>> parse_size("shard_size", "4GB"), parse_size("shard_size", "1.5 KiB")
    (4000000000, 1536)
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if size is None:
        raise ConfigError(f"{name} is {text!r}; give bytes, or a size such as 512MB, 4GB or 4GiB")
    number, prefix, binary = size.groups()
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
