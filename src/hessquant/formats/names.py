r"""The names that readers know one module by, and regular expressions that match some names and no others.

A checkpoint keeps the names it was made with. transformers renames on loading, and so do servers, each in its own way;
entries of a config are matched with the names that the reader has given, and regular expressions are never renamed.
What differs are the words that names begin with. They were read in vLLM 0.32.0 and SGLang 0.5.23 (`hf_to_vllm_mapper`
of their models), transformers 5.24 (conversion_mapping.py) and GPTQModel 7.7.0.

Names of like modules differ in numbers, that of the block or that of the expert, and in their last word. One expression
stands for all whose numbers are every combination of some, so that there are as few as the numbers allow.
"""

import re
from collections.abc import Iterable
from math import prod

from hessquant.errors import CheckpointError

HEAD = "lm_head"
"""What every reader calls the head, whatever is before it."""

_WORDS = ("model", "language_model", "text_model", "llm", "thinker", "backbone", "transformer", "bert", "roberta")
_ANY_PREFIX = f"(?:(?:{'|'.join(_WORDS)})\\.)*"
_LEADING = re.compile(_ANY_PREFIX)
_ALIKE_EVERYWHERE = {"", "model.", "transformer."}
_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")

_MOVED = re.compile(r"(.*\.attention)\.self(\.(?:query|key|value))")
"""What vLLM 0.32.0 knows as `attention.output.query` (models/bert.py, also for RoBERTa)."""

Numbers = tuple[str, ...]
Words = tuple[str | None, ...]


def module_of(weight_name: str) -> str:
    """The prefix X of a weight named `X.weight`.

    Raises:
        CheckpointError: If the name does not end in `.weight`, so that no reader would find its parts.
    """
    module, _, leaf = weight_name.rpartition(".")
    if not module or leaf != "weight":
        raise CheckpointError(f"{weight_name}: only weights named `<module>.weight` have a packed form; exclude it")
    return module


def moved(name: str) -> str | None:
    """What servers call a module that they say is in another one than it is; None for all others.

    >>> moved("encoder.layer.0.attention.self.query"), moved("layers.0.self_attn.q_proj")
    ('encoder.layer.0.attention.output.query', None)
    """
    found = _MOVED.fullmatch(name)
    return f"{found[1]}.output{found[2]}" if found else None


def without_prefix(name: str) -> str:
    """A name without the words that readers may change.

    >>> without_prefix("language_model.model.layers.0.mlp.up_proj"), without_prefix("model.visual.blocks.0.qkv")
    ('layers.0.mlp.up_proj', 'visual.blocks.0.qkv')
    """
    return _LEADING.sub("", name, count=1)


def prefixes_vary(names: Iterable[str]) -> bool:
    """Whether readers may begin these names with other words.

    They do so in models of several parts, where loading renames, and where names begin with no such word at all: such
    checkpoints hold a model without a head, an encoder for example, and servers put it into a module of theirs (vLLM
    0.32.0, models/bert.py: `model.encoder.layer.0`).
    """
    prefixes = {name.removesuffix(without_prefix(name)) for name in names if name != HEAD}
    return len(prefixes - {""}) > 1 or not prefixes <= _ALIKE_EVERYWHERE or prefixes == {""}


def spellings(known: Iterable[str], *, any_prefix: bool) -> tuple[str, ...]:
    """The names that some reader knows a module by, those of its checkpoint and of transformers' model first.

    >>> spellings(["model.language_model.layers.0.mlp.up_proj"], any_prefix=True)[-1]
    'language_model.model.layers.0.mlp.up_proj'
    """
    names = list(dict.fromkeys(known))
    others = [prefix + without_prefix(name) for name in names for prefix in _PREFIXES] if any_prefix else []
    return tuple(dict.fromkeys([*names, *others]))


def expressions(names: Iterable[str], *, any_prefix: bool = False, with_all_inside: bool = False) -> list[str]:
    r"""Expressions, anchored at both ends, that together match exactly these names.

    Args:
        names: Dotted names.
        any_prefix: Match them whatever words readers put before them.
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
    begin, end = ("^" + _ANY_PREFIX if any_prefix else "^"), (r"(?:\..+)?$" if with_all_inside else "$")
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
