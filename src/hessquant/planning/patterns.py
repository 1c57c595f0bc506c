"""Patterns of weight names: those that `include` and `exclude` take, and those that messages name weights by."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import translate
from functools import lru_cache

from hessquant.errors import PatternError


def matches(pattern: str, name: str) -> bool:
    """Whether a shell-style pattern matches a tensor name or a dotted end of it, with or without `.weight`.

    >>> matches("mlp.down_proj", "model.layers.3.mlp.down_proj.weight")
    True
    >>> matches("model.layers.3.*", "model.layers.3.mlp.down_proj.weight")
    True
    >>> matches("proj", "model.layers.3.mlp.down_proj.weight")
    False
    """
    compiled = _compiled(pattern)
    return bool(compiled.match(name) or (name.endswith(".weight") and compiled.match(name.removesuffix(".weight"))))


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, (pattern, f"*.{pattern}"))))


def weight_pattern(name: str, blocks: Sequence[str]) -> str:
    """A weight's name with `*` for the number of its block."""
    for block in blocks:
        if name.startswith(f"{block}."):
            return f"{block.rpartition('.')[0]}.*{name.removeprefix(block)}"
    return name


def match_all(kind: str, patterns: Iterable[str], names: Collection[str]) -> dict[str, frozenset[str]]:
    """Names that each pattern matches; `kind` ("include", "exclude") is for the error.

    Raises:
        PatternError: If a pattern matches nothing.
    """
    matched = {}
    for pattern in patterns:
        matched[pattern] = frozenset(name for name in names if matches(pattern, name))
        if not matched[pattern]:
            near = difflib.get_close_matches(pattern, _spellings(names), n=3)
            hint = f"close to it: {', '.join(near)}" if near else f"a name looks like {min(names, default='(none)')}"
            raise PatternError(f"{kind} pattern {pattern!r} matches no tensor of the model; {hint}")
    return matched


def _spellings(names: Iterable[str]) -> list[str]:
    """What a user may have meant: beginnings and ends of names, `*` for the numbers in them."""
    pool: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() else part for part in name.removesuffix(".weight").split(".")]
        for length in range(1, len(parts) + 1):
            pool[".".join(parts[-length:])] = None
            pool[".".join(parts[:length])] = None
    return list(pool)
