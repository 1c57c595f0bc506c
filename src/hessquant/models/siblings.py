"""Matrices that a short forward pass happens not to reach, though it reaches others like them.

Experts that are modules of their own are reached only when a token is routed to them, and a few tokens reach a few.
Those left out are known by their names, which differ in numbers only, beyond that of the block.
"""

import re
from collections.abc import Collection, Mapping, Sequence

_NUMBER = re.compile(r"(\d+)")


def block_of(name: str) -> str:
    """A name up to its first number, the block's; empty if it has none.

    >>> block_of("blocks.1.mlp.experts.12.up.weight"), block_of("embedding.weight")
    ('blocks.1', '')
    """
    found = _NUMBER.search(name)
    return "" if found is None else name[: found.end()]


def pattern(name: str) -> str:
    """A parameter's name with all numbers but the first, the block's, left open.

    >>> pattern("blocks.1.mlp.experts.12.up.weight")
    'blocks.1.mlp.experts.#.up.weight'
    """
    first, *rest = re.split(r"(?<=\d)(?!\d)", name, maxsplit=1)
    return first + "".join(_NUMBER.sub("#", part) for part in rest)


def numbers(name: str) -> tuple[int, ...]:
    """The numbers that the pattern leaves open."""
    return tuple(int(number) for number in _NUMBER.findall(name)[1:])


def unreached(reached: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Parameters that were not reached, each with one of its shape that was and whose name has the same pattern."""
    examples = {(pattern(name), shapes[name]): name for name in reversed(reached)}
    known = set(reached)
    return {
        name: examples[key]
        for name, shape in shapes.items()
        if len(shape) == 2 and name not in known and (key := (pattern(name), shape)) in examples
    }


def in_order(reached: Sequence[str], added: Collection[str]) -> list[str]:
    """All of these, those of like names together where the first of them was reached, by their numbers.

    >>> in_order(["a.0.q", "a.0.e.1.up", "a.0.e.1.down", "a.0.o"], ["a.0.e.0.up", "a.0.e.0.down"])
    ['a.0.q', 'a.0.e.0.up', 'a.0.e.0.down', 'a.0.e.1.up', 'a.0.e.1.down', 'a.0.o']
    """
    open_patterns = {pattern(name) for name in added}
    places = {found: place for place, found in enumerate(dict.fromkeys(map(pattern, reached)))}
    # Of one block: what differs in more than its number is not of one kind, but is reached in turns.
    clusters: dict[str, list[str]] = {}
    for name in [*reached, *added]:
        if pattern(name) in open_patterns:
            clusters.setdefault(pattern(name).partition("#")[0], []).append(name)
    ordered: list[str] = []
    for name in reached:
        start = pattern(name).partition("#")[0]
        if pattern(name) not in open_patterns:
            ordered.append(name)
        elif start in clusters:
            ordered += sorted(clusters.pop(start), key=lambda each: (numbers(each), places[pattern(each)]))
    return ordered
