"""A conversation and what its row has for the chat template -> arguments of `apply_chat_template`, all of them used."""

import inspect
import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hessquant.calibration.rows import Sample
from hessquant.errors import CalibrationError

# What a row may say of how its conversation is rendered; every other parameter of the call is ours.
_OF_THE_ROW = {"add_generation_prompt", "continue_final_message"}


def _reserved() -> frozenset[str]:
    calls = (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
    names = {name for call in calls for name in inspect.signature(call).parameters}
    return frozenset(names - _OF_THE_ROW) | {"messages"}


_RESERVED = _reserved()


def rendered(sample: Sample, owner: Any, render: Callable[[dict[str, Any]], Any], ids_of: Callable[[Any], Any]) -> Any:
    """What `render` makes of a conversation, with everything that its row has for the template.

    Args:
        sample: It is a conversation.
        owner: The tokenizer or processor, whose template it is.
        render: Calls `apply_chat_template` with these arguments besides the messages.
        ids_of: Token ids of what that gives.

    Raises:
        CalibrationError: If a variable is not the row's to set, or the template drops what it is given.
    """
    variables = dict(sample.template_variables)
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
    given = {key: value for key, value in (("tools", sample.tools), ("documents", sample.documents)) if value}
    made = render({**given, **variables})
    for key in given:
        rest = {other: value for other, value in given.items() if other != key}
        if ids_of(render({**rest, **variables})) == ids_of(made):
            raise CalibrationError(
                f"{sample.place}: has {key!r}, but the model's chat template makes the same of the row without; remove "
                "them, or use a model whose template has a place for them"
            )
    return made


def _template(owner: Any, sample: Sample) -> str | None:
    """The template's text; None where it is not to be had, so that nothing is known of its variables."""
    template = getattr(owner, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use" if sample.tools and "tool_use" in template else "default")
    return template if isinstance(template, str) else None


def _mentions(template: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template) is not None
