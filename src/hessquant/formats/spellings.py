"""The names that readers know one module by.

A checkpoint keeps the names it was made with. transformers renames on loading, and so do servers, each in its own way;
entries of a config are matched with the names that the reader has given, and regular expressions are never renamed.
What differs are the words that names begin with. They were read in vLLM 0.32.0 and SGLang 0.5.23 (`hf_to_vllm_mapper`
of their models), transformers 5.24 (conversion_mapping.py) and GPTQModel 7.7.0.
"""

import re
from collections.abc import Iterable

_WORDS = ("model", "language_model", "text_model", "llm", "thinker", "backbone", "transformer", "bert", "roberta")
_LEADING = re.compile(rf"(?:(?:{'|'.join(_WORDS)})\.)*")
_ALIKE_EVERYWHERE = ("", "model.", "transformer.")

ANY_PREFIX = f"(?:(?:{'|'.join(_WORDS)})\\.)*"
"""Regular expression: whatever words a reader may put before the names of the language model's part, and of others."""

_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


def without_prefix(name: str) -> str:
    """A name without the words that readers may change.

    >>> without_prefix("language_model.model.layers.0.mlp.up_proj"), without_prefix("model.visual.blocks.0.qkv")
    ('layers.0.mlp.up_proj', 'visual.blocks.0.qkv')
    """
    return name[_LEADING.match(name).end() :]  # type: ignore[union-attr]


def prefixes_vary(names: Iterable[str]) -> bool:
    """Whether readers may begin these names with other words: in models of several parts, and where loading renames."""
    prefixes = {name.removesuffix(without_prefix(name)) for name in names}
    return len(prefixes - {""}) > 1 or not prefixes <= set(_ALIKE_EVERYWHERE)


def spellings(known: Iterable[str], *, any_prefix: bool) -> tuple[str, ...]:
    """The names that some reader knows a module by, those of its checkpoint and of transformers' model first.

    >>> spellings(["model.language_model.layers.0.mlp.up_proj"], any_prefix=True)[-1]
    'language_model.model.layers.0.mlp.up_proj'
    """
    names = list(dict.fromkeys(known))
    others = [prefix + without_prefix(name) for name in names for prefix in _PREFIXES] if any_prefix else []
    return tuple(dict.fromkeys([*names, *others]))
