"""Make the tables of options in `docs/cli.md` of what the commands declare: `python docs/make_options.py`."""

import inspect
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

from typer.main import get_command

from hessquant import commands

PAGE = Path(__file__).with_name("cli.md")

_HEAD = "| option | default | meaning |\n|---|---|---|"
# By command, the one that shares its table; the command is named at options that only it has.
_TABLES = {"quantize": "plan", "evaluate": "evaluate"}


def page() -> str:
    """The whole page, its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, sharing in _TABLES.items():
        begin = f"<!-- options of {name}, by docs/make_options.py -->\n"
        # What only the one that shares it has comes last.
        shown = inspect.signature(getattr(commands, name)).parameters
        table = "\n".join([_HEAD, *_rows(name, sharing), *_rows(sharing, name, shown)])
        before, after = text.split(begin)
        text = before + begin + table + "\n\n" + after.partition("\n\n")[2]
    return text


def _rows(command: str, sharing: str, without: Collection[str] = ()) -> Iterator[str]:
    """A row per option, in the order of `--help`, but for some."""
    declared, shared = (inspect.signature(getattr(commands, name)).parameters for name in (command, sharing))
    for option in get_command(commands.app).commands[command].params:
        if option.param_type_name != "option" or option.name in ("as_json", "help", *without):
            continue
        kind, _, *more = get_args(declared[option.name].annotation)
        default = option.show_default if isinstance(option.show_default, str) else declared[option.name].default
        default = "off" if default is False else "" if default is None else default
        choices = "|".join(get_args(kind)) if get_origin(kind) is Literal else ""
        value = "" if kind is bool else f" {option.metavar or choices or ('F' if kind is float else 'N')}"
        spelled = f"`{option.opts[0]}{value}`".replace("|", "\\|") + ("" if option.name in shared else f" ({command})")
        yield f"| {spelled} | {default} | {' '.join(filter(None, [option.help, *more]))} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
