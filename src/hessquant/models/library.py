"""Calling transformers: quietly, and with its errors known."""

import copy
import gc
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from hessquant.errors import SourceError

LIBRARY_ERRORS = (Exception,)
"""What transformers and what it calls raise over a model that they cannot use.

There is no narrower base: according to where they stumble it is any built-in error, `struct.error` over a GGUF header,
a validation error of huggingface_hub over a config, or a bare `Exception` of tokenizers.
"""


def reason(error: Exception) -> str:
    """What a library's error says, with its kind where the words alone say nothing, as those of `KeyError: 3` do."""
    words = str(error).strip()
    return words if " " in words else f"{type(error).__name__}: {words}".removesuffix(": ")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' warnings and progress bars; both are as they were afterwards.

    What those warnings are about (missing or unexpected tensors, mostly) is checked by the callers, and is an error.

    Raises:
        RuntimeError: If a Rust library below, such as tokenizers, panics: what that raises is no `Exception`.
    """
    verbosity = hf_logging.get_verbosity()
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    if bars:
        hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":  # of which nothing can be imported
            raise
        raise RuntimeError(f"it panicked: {error}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def refusing(fault: str, advice: str = "") -> Iterator[None]:
    """Inside, transformers is quiet, and what it raises becomes a refusal of the source.

    Args:
        fault: What cannot be done, with the source's name; the library's reason follows.
        advice: What to do instead, in a sentence.

    Raises:
        SourceError: That, or what is raised inside as such.
    """
    try:
        with quiet():
            yield
    except (SourceError, torch.OutOfMemoryError):
        raise
    except LIBRARY_ERRORS as error:
        raise SourceError(f"{fault}: {reason(error)}" + (f". {advice}" if advice else "")) from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the search for garbage in cycles; among the objects of a large model it takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def from_config(config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model in a dtype and eval mode with weights of no meaning, on the device that is current.

    It is of the class that the config names, where transformers has it, and a causal language model otherwise. Experts
    run one by one ("eager"), so that every product with a weight can be seen, and no caches are made. `config` is not
    changed.
    """
    config = copy.deepcopy(config)
    _stop_caching(config)
    settings: dict[str, Any] = {"dtype": dtype, "experts_implementation": "eager"}
    named = _named_class(config)
    model: PreTrainedModel
    if named is not None and not (trust_remote_code and hasattr(config, "auto_map")):
        model = named._from_config(config, **settings)  # type: ignore[no-untyped-call]
    else:
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=trust_remote_code, **settings
        )
    model.train(False)
    return model


def _named_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that `architectures` names; None if it names none that transformers has for such a config."""
    match getattr(config, "architectures", None):
        case [str(name), *_]:
            named = getattr(transformers, name, None)
            if isinstance(named, type) and issubclass(named, PreTrainedModel):
                return named if isinstance(config, named.config_class or ()) else None
    return None


def predicts_next_token(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> bool:
    """Whether the class that `from_config` takes continues a text, so that it gives logits of each next token."""
    named = None if trust_remote_code and hasattr(config, "auto_map") else _named_class(config)
    return not config.is_encoder_decoder and (named is None or bool(named.can_generate()))


def _stop_caching(config: PreTrainedConfig) -> None:
    for value in (config, *vars(config).values()):
        if isinstance(value, PreTrainedConfig) and hasattr(value, "use_cache"):
            value.use_cache = False


def run_model(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Run a model's forward pass without a cache."""
    forward = inspect.signature(model.forward).parameters
    return model(**inputs, **({"use_cache": False} if "use_cache" in forward else {}))
