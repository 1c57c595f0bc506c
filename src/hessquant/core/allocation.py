"""Choosing one of several options for each of several things, at the least cost within a budget: by its Lagrangian.

Of each thing's options only those on the lower convex hull of (size, cost) are ever taken. The hulls' steps, the ones
that gain most per size first, give the best choice for every budget that ends with a step (Everett, Operations Research
11, 1963); between two such budgets the choice costs no more than the bound and the step that did not fit (Shoham and
Gersho, IEEE ASSP 36, 1988, allot bits so).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Option(NamedTuple):
    """One option of a thing: what it takes of the budget, and what it costs."""

    size: float
    cost: float


class Choice(NamedTuple):
    """What is chosen.

    Attributes:
        taken: Index of each thing's option.
        cost: Of all of them.
        bound: No choice within the budget costs less.
    """

    taken: list[int]
    cost: float
    bound: float


class _Step(NamedTuple):
    """From one option of a thing to the next on its hull."""

    slope: float
    thing: int
    to: int
    size: float


def allocate(things: Sequence[Sequence[Option]], budget: float) -> Choice:
    """Choose an option of each thing.

    Args:
        things: The options of each, at least one.
        budget: For the sizes of all of them; no less than the sum of the least.

    >>> allocate([[Option(1, 9.0), Option(2, 1.0)], [Option(1, 4.0), Option(2, 3.0)]], 3)
    Choice(taken=[1, 0], cost=5.0, bound=5.0)
    """
    hulls = [_hull(options) for options in things]
    taken = [hull[0] for hull in hulls]
    left = budget - sum(options[at].size for options, at in zip(things, taken, strict=True))
    steps = sorted(
        _Step((things[n][b].cost - things[n][a].cost) / size, n, b, size)
        for n, hull in enumerate(hulls)
        for a, b in pairwise(hull)
        for size in (things[n][b].size - things[n][a].size,)
    )
    stopped, bound = set[int](), None
    for step in steps:
        if step.thing in stopped:
            continue
        if step.size <= left:
            left -= step.size
            taken[step.thing] = step.to
            continue
        stopped.add(step.thing)
        if bound is None:
            # No other use of what is left gains more for its size than the first step that does not fit.
            bound = _cost(things, taken) + step.slope * left
    cost = _cost(things, taken)
    return Choice(taken, cost, cost if bound is None else bound)


def _cost(things: Sequence[Sequence[Option]], taken: Sequence[int]) -> float:
    return sum(options[at].cost for options, at in zip(things, taken, strict=True))


def _hull(options: Sequence[Option]) -> list[int]:
    """The options on the lower convex hull, from the smallest to the cheapest."""
    hull: list[int] = []
    for at in sorted(range(len(options)), key=lambda at: options[at]):
        if hull and options[at].cost >= options[hull[-1]].cost:
            continue
        while len(hull) > 1 and _slope(options, hull[-2], hull[-1]) >= _slope(options, hull[-1], at):
            hull.pop()
        hull.append(at)
    return hull


def _slope(options: Sequence[Option], first: int, second: int) -> float:
    return (options[second].cost - options[first].cost) / (options[second].size - options[first].size)
