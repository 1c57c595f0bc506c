"""A conversation and what its row has for the chat template -> what the template makes of it, with all of it used."""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hessquant.calibration.rows import Message, Sample
from hessquant.errors import CalibrationError
from hessquant.models.library import quiet

# What a row may say of how its conversation is rendered; every other parameter of the call is ours.
_OF_THE_ROW = {"add_generation_prompt", "continue_final_message"}

_RESERVED = {"messages"}.union(
    *(inspect.signature(owner.apply_chat_template).parameters for owner in (PreTrainedTokenizerBase, ProcessorMixin))
).difference(_OF_THE_ROW)


def rendered(
    sample: Sample, messages: Sequence[Message], owner: Any, fault: str, **arguments: Any
) -> Mapping[str, Any]:
    """What the chat template makes of a conversation, with everything that its row has for it.

    Args:
        sample: Whose conversation it is.
        messages: The conversation, as `owner` takes it.
        owner: The tokenizer or processor, whose template it is.
        fault: What is said of one that fails.
        arguments: Of `apply_chat_template` besides.

    Returns:
        Inputs of the model by name, `input_ids` among them.

    Raises:
        CalibrationError: If a variable is not the row's to set, the template drops what it is given, or it fails.
    """
    variables = sample.template_variables
    taken = sorted(name for name in variables if name in _RESERVED)
    if taken:
        raise CalibrationError(
            f"{sample.place}: 'chat_template_kwargs' sets {', '.join(map(ascii, taken))}, which is not for a row to "
            "set; it may hold variables of the chat template"
        )
    template = _template(owner, sample)
    for name in variables:
        if template is not None and name not in _OF_THE_ROW and not _mentions(template, name):
            raise CalibrationError(
                f"{sample.place}: 'chat_template_kwargs' sets {name!a}, which the model's chat template does not have; "
                "rename it if it is misspelt, or remove it"
            )

    def render(given: Mapping[str, Any]) -> Mapping[str, Any]:
        with failing(f"{sample.place}: {fault}"):
            inputs: Mapping[str, Any] = owner.apply_chat_template(
                messages, tokenize=True, return_dict=True, **arguments, **given, **variables
            )
            return inputs

    given = {key: value for key, value in (("tools", sample.tools), ("documents", sample.documents)) if value}
    inputs = render(given)
    for key in given:
        without = render({other: value for other, value in given.items() if other != key})
        if np.array_equal(without["input_ids"], inputs["input_ids"]):
            raise CalibrationError(
                f"{sample.place}: has {key!r}, but the model's chat template makes the same of the row without; remove "
                "them, or use a model whose template has a place for them"
            )
    return inputs


@contextmanager
def failing(fault: str) -> Iterator[None]:
    """Refuse what a template or a processor fails on: code of a library or of the model, which raises what it likes.

    Raises:
        CalibrationError: With the fault and the reason.
    """
    try:
        with quiet():
            yield
    except Exception as error:
        raise CalibrationError(f"{fault}: {type(error).__name__}: {error}") from error


def _template(owner: Any, sample: Sample) -> str | None:
    """The template's text; None where it is not to be had, so that nothing is known of its variables."""
    template = getattr(owner, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use" if sample.tools and "tool_use" in template else "default")
    return template if isinstance(template, str) else None


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None
