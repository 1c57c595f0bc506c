"""One text for several models: windows that all of them take, of tokens that mean the same to all of them."""

from collections.abc import Sequence

from hessquant.calibration.fit import refuse_unfit_windows, refuse_window_length
from hessquant.calibration.windows import evaluation_windows
from hessquant.errors import ConfigError
from hessquant.models.context import context_of, window_length
from hessquant.models.source import ModelSource
from hessquant.records import TokenWindow

_OF_TOKENIZERS = ("tokenizer*", "vocab*", "*.tiktoken")


def common_windows(
    models: Sequence[ModelSource], text: str | None, *, num_windows: int | None, length: int | None
) -> tuple[tuple[TokenWindow, ...], int]:
    """Take the windows that models are measured on: the tokenizer is the first one's, the length suits all of them.

    Args:
        models: The models.
        text: As `evaluation_windows` takes it.
        num_windows: Likewise.
        length: Tokens per window; None = the smaller of the default and the context of every model.

    Returns:
        The windows, and tokens per window.

    Raises:
        CalibrationError: If the text cannot be used with one of the models.
        ConfigError: If a token is another one to one of the models.
        SourceError: If the first has no tokenizer.
    """
    first, *others = models
    for each in models:
        refuse_window_length(length, each)
    for other in others:
        refuse_tokens(first, other)
    length = window_length(length, *(context_of(each.config).least for each in models))
    windows = evaluation_windows(text, first.tokenizer, num_windows=num_windows, window_length=length)
    for each in models:
        refuse_unfit_windows(windows, each.config)
    return windows, length


def refuse_tokens(model: ModelSource, base: ModelSource) -> None:
    """Refuse to compare models that call other things by the same token id: their distributions have nothing in common.

    A token that only one of them names (padding of the vocabulary, mostly) is no difference. A base whose directory
    has no tokenizer is taken at its vocabulary's size, which is looked at later.

    Raises:
        ConfigError: Naming the first such id.
    """
    if not any(any(base.directory.glob(pattern)) for pattern in _OF_TOKENIZERS):
        return
    ours = {number: token for token, number in model.tokenizer.get_vocab().items()}
    theirs = {number: token for token, number in base.tokenizer.get_vocab().items()}
    differing = sorted(number for number in ours.keys() & theirs.keys() if ours[number] != theirs[number])
    if differing:
        number = differing[0]
        raise ConfigError(
            f"the tokenizers of {model.name} and {base.name} differ in {len(differing):,} tokens, first: {number} is "
            f"{ours[number]!a} in the one and {theirs[number]!a} in the other; compare models of one vocabulary"
        )
