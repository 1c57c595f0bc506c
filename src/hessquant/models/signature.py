"""What a model's forward pass takes, by its signature."""

import inspect
from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from hessquant.models.library import quiet
from hessquant.models.source import ModelSource
from hessquant.models.weightless import build_weightless

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def unknown_inputs(source: ModelSource, names: Iterable[str]) -> list[str]:
    """Names that a model's forward pass does not take, or takes among others and does nothing with.

    Known are the parameters of `forward`. Where that passes on what it does not name (**kwargs), those that the forward
    of a model inside it names are known too: a backbone, a tower.
    """
    with quiet():
        model = build_weightless(source.config, trust_remote_code=source.trust_remote_code)
    known: set[str] = set()
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        parameters = inspect.signature(module.forward).parameters.values()
        known.update(parameter.name for parameter in parameters if parameter.kind in _BY_NAME)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            waiting += [inner for inner in module.children() if isinstance(inner, PreTrainedModel)]
    return [name for name in names if name not in known]
