"""The tokenizer of a model directory, as a GGUF file says it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import SpecialVocab

from hessquant.checkpoint.header import opened, read_json
from hessquant.errors import PlanError, SourceError
from hessquant.formats.gguf_vocabulary import Vocabulary, added_token, read_pieces, read_vocabulary
from hessquant.formats.sentencepiece import Piece, read_model

TOKENIZER_FILE, PIECES_FILE = "tokenizer.json", "tokenizer.model"
_CONFIG_FILE, _ADDED_FILE = "tokenizer_config.json", "added_tokens.json"
_MOST_BYTES = 100_000_000
_MEANINGLESS = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, OSError)
"""What reading a JSON of another form than expected raises, here and in the gguf package."""


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.

    Attributes:
        vocabulary: Its tokens.
        special: Merges, special tokens and chat template, as the gguf package writes them.
    """

    vocabulary: Vocabulary
    special: SpecialVocab


def read_tokenizer(directory: Path, size: int) -> Tokenizer:
    """Read a directory's tokenizer for a model with `size` rows of the embedding.

    Raises:
        SourceError: If there is none, or it cannot be read.
        PlanError: If llama.cpp has no tokenizer that does the same.
    """
    try:
        vocabulary = _read_vocabulary(directory, size)
        with _quiet():
            special = SpecialVocab(directory, load_merges=vocabulary.scores is None, n_vocab=size)
        _check_texts(special)
    except _MEANINGLESS as error:
        raise SourceError(f"the tokenizer of {directory} means nothing: {type(error).__name__}: {error}") from error
    flags = special.add_special_token
    if vocabulary.scores is None:
        if not special.merges:
            raise PlanError(f"the tokenizer of {directory} has no merges, without which llama.cpp does not open it")
        # Said in any case: some names of ways to split text stand for a token in front as well.
        for kind in ("bos", "eos"):
            flags.setdefault(kind, False)
    for kind, wanted in flags.items():
        # llama.cpp refuses to add a token that there is none of.
        flags[kind] = wanted and kind in special.special_token_ids
    return Tokenizer(vocabulary, special)


def _check_texts(special: SpecialVocab) -> None:
    """What the gguf package took over as it was must be text, or it fails when it is written."""
    template = special.chat_template
    named = [] if template is None else [template] if isinstance(template, str) else list(template)
    texts = [text for one in named for text in ([one] if isinstance(one, str) else [one["name"], one["template"]])]
    if not all(isinstance(text, str) for text in (*special.merges, *texts)):
        raise ValueError("a merge or a chat template is no text")


def _read_vocabulary(directory: Path, size: int) -> Vocabulary:
    file, pieces_file = directory / TOKENIZER_FILE, directory / PIECES_FILE
    if file.is_file():
        tokenizer = read_json(file)
        joined = tokenizer["model"].get("byte_fallback") and pieces_file.is_file()
        return read_vocabulary(tokenizer, size, _read_pieces(pieces_file)[0] if joined else None)
    if not pieces_file.is_file():
        raise SourceError(f"{directory} holds neither {TOKENIZER_FILE} nor {PIECES_FILE}, which a GGUF file needs")
    pieces, space_prefix = _read_pieces(pieces_file)
    said = _read_optional(directory / _CONFIG_FILE)
    listed = _read_optional(directory / _ADDED_FILE)
    added = {int(number): added_token(str(text), False) for text, number in listed.items()}
    for number, token in said.get("added_tokens_decoder", {}).items():
        added[int(number)] = added_token(str(token["content"]), bool(token.get("special")))
    prefix = said.get("add_prefix_space")
    return read_pieces(pieces, added, size, space_prefix if prefix is None else bool(prefix))


def _read_pieces(path: Path) -> tuple[list[Piece], bool]:
    with opened(path) as stream:
        content = stream.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise SourceError(f"{path} has more than {_MOST_BYTES} bytes")
    return read_model(content)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the gguf package's remarks; what they are about is checked here."""
    logger = logging.getLogger("gguf")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
