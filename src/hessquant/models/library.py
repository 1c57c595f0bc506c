"""Calling transformers: quietly, and with its errors known."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

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


def from_config(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal language model in float32 and eval mode with weights of no meaning, on the device that is current.

    Experts run one by one ("eager"), so that every product with a weight can be seen. `config` is not changed.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        copy.deepcopy(config),
        dtype="float32",
        experts_implementation="eager",
        trust_remote_code=trust_remote_code,
    )
    model.train(False)
    return model
