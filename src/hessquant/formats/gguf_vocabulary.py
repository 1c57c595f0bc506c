"""A tokenizer as a GGUF file says it: out of tokenizer.json, by its structure and never by a model's name.

llama.cpp has two tokenizers for these models. "gpt2" merges byte-level tokens within words, and knows the ways of
splitting text into words by names; "llama" merges whatever joins to the token of the highest score, over all of the
text. A tokenizer that does something else has no form, and is refused by what it does.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gguf import TokenType

from hessquant.errors import PlanError
from hessquant.formats.sentencepiece import Piece

SPACE = "\u2581"
"""How sentencepiece and its likes write a space."""

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_START, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# How text is split -> name of it in llama.cpp, without and with tokens of whole words taken before any merge.
_SPLITS: Mapping[tuple[str, ...], tuple[str | None, str | None]] = {
    ("words",): ("gpt-2", None),
    ("digits", "words"): ("smollm", None),
    (f"{_CONTRACTION}|{_WORD}|\\p{{N}}{{1,3}}|{_REST}", "bytes"): ("smaug-bpe", "llama-bpe"),
    (f"{_CONTRACTION}|{_WORD}|\\p{{N}}|{_REST}", "bytes"): ("qwen2", None),
    (f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\\p{{N}}|{_REST_WITH_SLASH}", "bytes"): (None, "tekken"),
    (
        f"{_START}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
        f"|\\p{{N}}{{1,3}}|{_REST_WITH_SLASH}",
        "bytes",
    ): ("gpt-4o", None),
}

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_BESIDE = (
    "and llama.cpp would join text otherwise; put the sentencepiece model it was made of (tokenizer.model) beside it"
)
_UNREACHABLE, _ADDED, _PADDED = -1e6, -1000.0, -10000.0


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens by their ids, and what is done with them.

    Attributes:
        model: "gpt2" or "llama".
        pre: Name of the way text is split into words.
        texts: Token per id.
        kinds: TokenType per id.
        scores: Score per id; None where merges are listed instead.
        space_prefix: Whether text gets a space in front; None where the model never does it.
    """

    model: str
    pre: str
    texts: tuple[str, ...]
    kinds: tuple[int, ...]
    scores: tuple[float, ...] | None
    space_prefix: bool | None


def added_token(text: str, special: bool) -> Piece:
    """A token that is found in text before anything else is done."""
    # Some are meant for control and not marked so, as converters of llama.cpp take it.
    framed = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    special = special or text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
    if special or any(text.startswith(start) and text.endswith(end) for start, end in framed):
        return Piece(text, _ADDED, TokenType.CONTROL)
    # llama.cpp looks for them in the text as it came.
    return Piece(text.replace(SPACE, " "), _ADDED, TokenType.USER_DEFINED)


def read_vocabulary(tokenizer: Mapping[str, Any], size: int, pieces: Sequence[Piece] | None = None) -> Vocabulary:
    """Read a tokenizer.json.

    Args:
        tokenizer: Its content.
        size: Rows of the embedding; ids without a token get one that never comes up.
        pieces: Those of the sentencepiece model it was made of, where that is there.

    Raises:
        PlanError: If llama.cpp has no tokenizer that does the same.
    """
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        raise PlanError(f"tokenizers of type {model.get('type')!r} have no GGUF form here, only BPE")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise PlanError(f"tokenizers with {name} {model[name]!r:.50} have no GGUF form")
    texts = {int(number): str(text) for text, number in model["vocab"].items()}
    added = {
        int(token["id"]): added_token(str(token["content"]), bool(token.get("special")))
        for token in tokenizer.get("added_tokens") or ()
    }
    if model.get("byte_fallback"):
        prefix = _space_prefix(tokenizer)
        if pieces is None or any(texts.get(number, piece.text) != piece.text for number, piece in enumerate(pieces)):
            pieces = _ranked(model, texts, texts.keys() - added.keys())
        return read_pieces(pieces, added, size, prefix)
    pre = _name_of_split(tokenizer, bool(model.get("ignore_merges")))
    found = {number: Piece(text, 0.0, TokenType.NORMAL) for number, text in texts.items()}
    return replace(_vocabulary("gpt2", pre, found, added, size, None), scores=None)


def read_pieces(pieces: Sequence[Piece], added: Mapping[int, Piece], size: int, space_prefix: bool) -> Vocabulary:
    """Read a sentencepiece model on its own, with the tokens that were added to it by their ids.

    Raises:
        PlanError: If it has more tokens than the embedding has rows, or one twice.
    """
    found = {
        number: replace(piece, text=piece.text.replace(SPACE, " ")) if piece.kind == TokenType.USER_DEFINED else piece
        for number, piece in enumerate(pieces)
    }
    return _vocabulary("llama", "default", found, added, size, space_prefix)


def _vocabulary(
    model: str, pre: str, pieces: dict[int, Piece], added: Mapping[int, Piece], size: int, space_prefix: bool | None
) -> Vocabulary:
    """Tokens of every id below `size`."""
    for number, token in added.items():
        unknown = number in pieces and pieces[number].kind == TokenType.UNKNOWN
        pieces[number] = replace(pieces[number], score=_ADDED) if unknown else token
    if max(pieces, default=0) >= size:
        raise PlanError(f"the tokenizer has a token of id {max(pieces)}, but the embedding has {size} rows")
    if min(pieces, default=0) < 0:
        raise PlanError(f"the tokenizer has a token of id {min(pieces)}")
    every = [pieces.get(number) or Piece(f"[PAD{number}]", _PADDED, TokenType.UNUSED) for number in range(size)]
    seen: dict[str, int] = {}
    for number, piece in enumerate(every):
        if seen.setdefault(piece.text, number) != number:
            raise PlanError(
                f"tokens {seen[piece.text]} and {number} are both {piece.text!r:.100}, which llama.cpp does not open"
            )
    texts, scores, kinds = zip(*((piece.text, piece.score, int(piece.kind)) for piece in every), strict=True)
    return Vocabulary(model, pre, texts, kinds, scores, space_prefix)


def _ranked(model: Mapping[str, Any], texts: Mapping[int, str], normal: set[int]) -> list[Piece]:
    """Pieces that make joining by score the same as merging by rank."""
    scores = _scores(texts, normal, model["merges"])
    pieces = []
    for number in range(max(texts) + 1):
        text = texts.get(number, f"[PAD{number}]")
        if number not in texts:
            kind = TokenType.UNUSED
        elif text == model.get("unk_token"):
            kind = TokenType.UNKNOWN
        else:
            kind = TokenType.BYTE if _BYTE.fullmatch(text) else TokenType.NORMAL
        pieces.append(Piece(text, scores.get(number, _UNREACHABLE), kind))
    return pieces


def _scores(texts: Mapping[int, str], normal: set[int], merges: Sequence[Any]) -> dict[int, float]:
    """Scores that make joining by score the same as merging by rank.

    Raises:
        PlanError: If none do: llama.cpp joins whatever makes a token, so every way to make one must be a merge.
    """
    numbers = {texts[number]: number for number in normal}
    ranks: dict[tuple[str, str], int] = {}
    for rank, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault((left, right), rank)
    first: dict[str, int] = {}
    latest = ""
    for (left, right), rank in ranks.items():
        made = left + right
        if first.setdefault(made, rank) != rank and made != latest:
            raise PlanError(f"the tokenizer's merges to {made!r} are not one after another, {_BESIDE}")
        latest = made
    # Bytes are what is left when nothing joins; they are never made of their letters.
    whole = {text for text in numbers if not _BYTE.fullmatch(text)}
    for text in whole:
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair[0] in whole and pair[1] in whole and pair not in ranks:
                raise PlanError(
                    f"the tokenizer has no merge of {pair[0]!r} and {pair[1]!r}, though they make a token, {_BESIDE}"
                )
    return {numbers[text]: -float(rank) for text, rank in first.items() if text in numbers}


def _space_prefix(tokenizer: Mapping[str, Any]) -> bool:
    """Whether text gets a space in front; spaces must be written as `SPACE`, and nothing else be done."""
    prefix = False
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        match step:
            case {"type": "Prepend", "prepend": "\u2581"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}:
                pass
            case _:
                raise PlanError(f"tokenizers that normalize by {_shown(step)} have no GGUF form")
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match step:
            case {"type": "Metaspace", "replacement": "\u2581", "split": False, "prepend_scheme": scheme}:
                prefix = scheme != "never"
            case {"type": "Split", "pattern": {"String": " "}}:
                pass  # there are no spaces any more
            case _:
                raise PlanError(f"tokenizers that split by {_shown(step)} and fall back to bytes have no GGUF form")
    return prefix


def _name_of_split(tokenizer: Mapping[str, Any], whole_words: bool) -> str:
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":  # which llama.cpp leaves to whoever writes the text
            raise PlanError(f"tokenizers that normalize by {_shown(step)} have no GGUF form")
    split: list[str] = []
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match step:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                split.append(pattern)
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}:
                split.append(pattern)  # what is kept and what is removed are the same when the pattern covers all
            case {"type": "Digits", "individual_digits": True}:
                split.append("digits")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                split.append("words" if step.get("use_regex", True) else "bytes")
            case _:
                raise PlanError(f"tokenizers that split text by {_shown(step)} have no GGUF form")
    name = _SPLITS.get(tuple(split), (None, None))[whole_words]
    if name is None:
        raise PlanError(
            f"llama.cpp has no name that is known here for splitting text by {split!r:.300}"
            + (" and taking whole words first" if whole_words else "")
        )
    return name


def _steps(stated: Any, key: str) -> list[Mapping[str, Any]]:
    """Steps of a normalizer or a pre-tokenizer, those of a sequence one by one."""
    if stated is None:
        return []
    if stated.get("type") == "Sequence":
        return [inner for step in stated[key] for inner in _steps(step, key)]
    return [stated]


def _shown(step: Mapping[str, Any]) -> str:
    return f"{dict(step)!r:.200}"
