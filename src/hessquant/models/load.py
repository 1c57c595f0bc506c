"""Building a runnable model from tensors."""

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hessquant.errors import SourceError
from hessquant.models.library import LIBRARY_ERRORS, from_config, quiet, reason
from hessquant.models.source import ModelSource

_SHOWN = 5


def build(source: ModelSource, state: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model with the weights of `state`: float32, on the CPU, in eval mode, without gradients.

    A tensor that is float32 already becomes the parameter itself, uncopied; every other dtype costs one copy.

    Args:
        source: The model; only its config is read.
        state: Every tensor of the checkpoint by its name there, decoded if it was quantized. A tied weight may
            be given once; tensors that the model class does not know are left out (a plan lists them).

    Raises:
        SourceError: If tensors are missing, or of another shape.
    """
    config = copy.deepcopy(source.config)
    with quiet():
        try:
            with torch.device("meta"):
                empty = from_config(config, trust_remote_code=source.trust_remote_code)
            loaded: Any = type(empty).from_pretrained(
                None,
                config=config,
                state_dict=_under_every_name(empty, state),
                dtype=torch.float32,
                experts_implementation="eager",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except LIBRARY_ERRORS as error:
            raise SourceError(f"{source.name}: the model cannot be built: {reason(error)}") from error
    model, outcome = loaded  # a pair, because of output_loading_info
    check_outcome(source.name, outcome)
    built: PreTrainedModel = model.eval().requires_grad_(False)
    return built


def _under_every_name(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with what is given under one name of a parameter under all: loading parts what a class has joined."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    full = dict(state)
    for names in aliases.values():
        given = next((state[name] for name in names if name in state), None)
        if given is not None:
            full.update({name: given for name in names if name not in state})
    return full


def check_outcome(name: str, outcome: Mapping[str, Collection[Any]]) -> None:
    """Refuse what transformers reports of a loading that did not come out even.

    Raises:
        SourceError: If tensors are missing, of another shape, or cannot be converted.
    """
    faults = [
        f"{title} {_shown(names)}"
        for key, title in (
            ("missing_keys", "missing:"),
            ("mismatched_keys", "of another shape than the config says:"),
        )
        if (names := outcome[key])
    ]
    if faults or outcome["error_msgs"]:
        detail = "; ".join(faults) or str(outcome["error_msgs"])
        raise SourceError(f"{name}: the tensors do not fit the model's config ({detail})")


def _shown(names: Collection[Any]) -> str:
    listed = sorted(str(name) for name in names)
    rest = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + rest
