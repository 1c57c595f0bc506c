"""Continuations of the base model and of the model beside each other, for the terminal."""

import unicodedata
from itertools import takewhile

from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from hessquant.measures import Continuation
from hessquant.results import Evaluation

_PARTED = "yellow"
_KEPT = "\n\t\u200c\u200d"  # the last two join parts of emoji and of some scripts' letters


def side_by_side(evaluation: Evaluation) -> Group:
    """Each prompt, and below it what the base model and the model make of it, marked from where they part."""
    base, continuations = evaluation.comparison, evaluation.continuations
    title = [Text("Continuations, the likeliest token each time", style="bold")]
    if base is not None:
        title.append(Text(_agreement(continuations), style="dim"))
    shown = (_shown(number, each) for number, each in enumerate(continuations, start=1))
    return Group(*title, *(Padding(each, (1, 0, 0, 0)) for each in shown))


def _agreement(continuations: tuple[Continuation, ...]) -> str:
    pairs = [(each.same_tokens or 0, max(each.tokens, each.base_tokens or 0)) for each in continuations]
    same, tokens = (sum(column) for column in zip(*pairs, strict=True))
    equal = sum(one == other for one, other in pairs)
    return (
        f"left the base model, right the model; {equal} of {len(pairs)} are the same to the end, and {same:,} of "
        f"{tokens:,} tokens come before the first that differs"
    )


def _shown(number: int, continuation: Continuation) -> Group:
    prompt, ours = Text(f"{number}. {_printable(continuation.prompt)}", style="dim"), _printable(continuation.text)
    if continuation.base_text is None:
        return Group(prompt, Text(ours))
    theirs = _printable(continuation.base_text)
    if continuation.same_tokens == continuation.tokens == continuation.base_tokens:
        return Group(prompt, Text.assemble(ours, (" (both)", "dim")))
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
    table = Table.grid(*(Column(ratio=1, overflow="fold") for _ in range(2)), padding=(0, 2), expand=True)
    table.add_row(*(Text.assemble(each[:same], (each[same:], _PARTED)) for each in (theirs, ours)))
    return Group(prompt, table)


def _printable(text: str) -> str:
    """A model may write anything: what could steer a terminal is shown as the sign for what is no character."""
    steering = ("Cc", "Cf", "Cs")
    return "".join(
        each if each in _KEPT or unicodedata.category(each) not in steering else "\ufffd" for each in text
    ).strip("\n")
