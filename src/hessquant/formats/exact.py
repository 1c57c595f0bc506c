"""Regular expressions that match some names and no others, as few as their numbers allow.

Names of like modules differ in numbers, that of the block or that of the expert, and in their last word. One expression
stands for all whose numbers are every combination of some.
"""

import re
from collections.abc import Iterable
from math import prod

from hessquant.formats.spellings import ANY_PREFIX, without_prefix

Numbers = tuple[str, ...]
Words = tuple[str | None, ...]


def expressions(names: Iterable[str], *, any_prefix: bool = False, with_all_inside: bool = False) -> list[str]:
    r"""Expressions, anchored at both ends, that together match exactly these names.

    Args:
        names: Dotted names.
        any_prefix: Match them whatever words readers put before them (`formats.spellings`).
        with_all_inside: Match the names of all that is inside them, too.

    >>> expressions(["layers.0.mlp.up", "layers.2.mlp.up", "head"])
    ['^layers\\.(?:0|2)\\.mlp\\.up$', '^head$']
    """
    kinds: dict[tuple[Words, str], dict[Numbers, None]] = {}
    for name in dict.fromkeys(map(without_prefix, names) if any_prefix else names):
        *parts, leaf = name.split(".")
        words = tuple(None if part.isdigit() else part for part in parts)
        kinds.setdefault((words, leaf), {})[tuple(part for part in parts if part.isdigit())] = None
    leaves: dict[tuple[Words, tuple[Numbers, ...]], list[str]] = {}
    for (words, leaf), numbers in kinds.items():
        leaves.setdefault((words, tuple(numbers)), []).append(leaf)
    begin, end = ("^" + ANY_PREFIX if any_prefix else "^"), (r"(?:\..+)?$" if with_all_inside else "$")
    return [
        begin + _expression(words, choices, alike) + end
        for (words, found), alike in leaves.items()
        for choices in _combinations(found)
    ]


def _combinations(found: Iterable[Numbers]) -> list[tuple[Numbers, ...]]:
    """Sets of numbers, place by place, every combination of which is among these, and that between them make all."""
    found = list(found)
    choices = tuple(tuple(dict.fromkeys(place)) for place in zip(*found, strict=True))
    if len(found) == prod(map(len, choices)):
        return [choices]
    # Those that differ in the first number only; then those that have the same first numbers, again.
    firsts: dict[Numbers, list[str]] = {}
    for first, *rest in found:
        firsts.setdefault(tuple(rest), []).append(first)
    rests: dict[Numbers, list[Numbers]] = {}
    for tail, heads in firsts.items():
        rests.setdefault(tuple(heads), []).append(tail)
    return [(heads, *tail) for heads, tails in rests.items() for tail in _combinations(tails)]


def _expression(words: Words, choices: tuple[Numbers, ...], leaves: list[str]) -> str:
    numbers = iter(choices)
    parts = [_one_of(next(numbers)) if word is None else re.escape(word) for word in words]
    return r"\.".join([*parts, _one_of(tuple(map(re.escape, leaves)))])


def _one_of(alternatives: tuple[str, ...]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"
