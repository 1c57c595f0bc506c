"""Prompts to continue: built in or from a file, as texts or conversations -> token ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hessquant.calibration.rows import Message, Sample
from hessquant.calibration.samples import Reader
from hessquant.calibration.sources import RunningText, open_source
from hessquant.calibration.templates import rendered
from hessquant.errors import CalibrationError
from hessquant.models.context import context_of
from hessquant.models.source import ModelSource

BUILTIN = (
    "The lighthouse keeper counted the boats every evening. That night there was one more than",
    "Why does ice float on water?",
    "def is_prime(number):\n    ",
    "What to take along on a walk in the mountains:\n1.",
    "17 + 25 = 42\n34 + 28 = 62\n46 + 39 =",
    "A baker has 3 trays of 12 rolls each and sells 20 of the rolls. How many are left?",
    "A hash table is",
    "Dear neighbour,\n\nI am writing to you because of the tree that",
    "If all ravens are black, and this bird is not black, then this bird",
    '{"city": "Lisbon", "country": "Portugal"}\n{"city": "Oslo", "country":',
    "English: The train leaves at nine.\nFrench:",
    "To change a bicycle's inner tube, first",
)
"""A dozen: prose, questions, code, a list, sums, a definition, a letter, a conclusion, data, a translation, advice."""

_GENERATION = "add_generation_prompt"


@dataclass(frozen=True)
class Prompt:
    """What a model is to continue.

    Attributes:
        text: The prompt for readers; of a conversation, each message with its role.
        ids: Its tokens, those of the chat template among them.
        place: Where it stands, for messages.
    """

    text: str
    ids: tuple[int, ...]
    place: str


def prompts_of(file: Path | str | None, models: Sequence[ModelSource], new_tokens: int) -> tuple[Prompt, ...]:
    """Read prompts. Where the first model's tokenizer has a chat template, a text is what a user says.

    Args:
        file: A .txt file with a prompt per line, or a .jsonl file with `text` or `messages` per row, as calibration
            takes them; None = the built-in ones.
        models: What is to continue them; the tokenizer is the first one's.
        new_tokens: Tokens to continue by, for which there must be room in each model's context.

    Raises:
        CalibrationError: If the file cannot be read, holds no prompt, or one that a model cannot take.
        SourceError: If the first model has no tokenizer.
    """
    prompts = tuple(_prompt(sample, models[0].tokenizer) for sample in _samples(file))
    if not prompts:
        raise CalibrationError(f"{file} holds no prompt; write one per line")
    for model in models:
        context = context_of(model.config).least
        vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
        for prompt in prompts:
            if context is not None and len(prompt.ids) + new_tokens > context:
                raise CalibrationError(
                    f"{prompt.place}: {len(prompt.ids)} tokens and {new_tokens} more are too many for {model.name}, "
                    f"whose context is {context}; shorten it, or take fewer with --generate"
                )
            if vocabulary is not None and max(prompt.ids) >= vocabulary:
                raise CalibrationError(
                    f"{prompt.place}: holds token id {max(prompt.ids)}, but the vocabulary of {model.name} is "
                    f"{vocabulary}; use the tokenizer that belongs to the model"
                )
    return prompts


def _samples(file: Path | str | None) -> Iterator[Sample]:
    if file is None:
        yield from (Sample(f"prompt {number}", text) for number, text in enumerate(BUILTIN, start=1))
        return
    if Path(file).suffix.lower() not in (".txt", ".jsonl") or str(file).startswith("hub:"):
        raise CalibrationError(f"cannot read prompts from {str(file)!r}; accepted are a .txt and a .jsonl file")
    source = open_source(str(file), "held-out")
    if not isinstance(source, RunningText):
        yield from source.samples
        return
    lines = (line for document in source.documents for line in document.splitlines())
    yield from (Sample(f"{file}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip())


def _prompt(sample: Sample, tokenizer: object) -> Prompt:
    place, content = sample.place, sample.content
    if sample.images or sample.target is not None:
        raise CalibrationError(f"{place}: a prompt is 'text' or 'messages', and nothing beside that; remove the rest")
    chat = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(content, str) and not chat:
        ids = Reader(tokenizer, 0).tokenize(content, place)
    elif chat:
        messages: Sequence[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else content
        asked = {} if _GENERATION in sample.template_variables else {_GENERATION: True}
        inputs = rendered(sample, messages, tokenizer, "the chat template fails on this prompt", **asked)
        ids = list(inputs["input_ids"])
    else:
        raise CalibrationError(f"{place}: has 'messages', but the tokenizer has no chat template; give 'text'")
    if not ids:
        raise CalibrationError(f"{place}: holds no token")
    said = [content] if isinstance(content, str) else [f"{each.get('role')}: {each.get('content')}" for each in content]
    return Prompt("\n".join(said), tuple(ids), place)
