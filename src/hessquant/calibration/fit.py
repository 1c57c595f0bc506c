"""Whether windows fit a model: its context, its vocabulary, and what its forward pass takes."""

from collections.abc import Sequence

from transformers import PreTrainedConfig

from hessquant.calibration.model_inputs import CalibrationInput, ModelInputs, id_rows
from hessquant.errors import CalibrationError
from hessquant.models.context import context_of
from hessquant.models.source import ModelSource
from hessquant.models.structure import unknown_inputs


def refuse_window_length(asked: int | None, source: ModelSource) -> None:
    """Refuse windows of a text that are longer than the model's context; those of the default length never are.

    Raises:
        CalibrationError: If they are.
    """
    context = context_of(source.config)
    # An encoder-decoder reads one half of a window and writes the other.
    halves = 2 if source.config.is_encoder_decoder else 1
    if asked is None or context.least is None or asked <= halves * context.least:
        return
    limits = f"{context.read}"
    if context.read != context.written:
        limits += f" for what it reads and {context.written} for what it writes"
    raise CalibrationError(
        f"windows of {asked} tokens are too long for {source.name}, whose context is {limits}; "
        f"take --window-length {context.least} or less"
    )


def refuse_unfit_windows(windows: Sequence[CalibrationInput], described: PreTrainedConfig) -> None:
    """Refuse windows that are longer than the model's context, or hold tokens that it does not know.

    Raises:
        CalibrationError: Naming the window.
    """
    context = context_of(described)
    vocabulary = getattr(described.get_text_config(), "vocab_size", None)
    for index, window in enumerate(windows):
        place, remedy = f"window {index}", "take --window-length {} or less"
        if isinstance(window, ModelInputs):
            place, remedy = window.place, "give shorter ones"
        for name, row in id_rows(window):
            limit = context.read if name == "input_ids" else context.written
            if limit is not None and len(row) > limit:
                raise CalibrationError(
                    f"{place} has {len(row)} tokens, but the model's context is {limit}; {remedy.format(limit)}"
                )
            known = range(max(row) + 1 if vocabulary is None else vocabulary)
            strange = next((token for token in row if token not in known), None)
            if strange is not None:
                raise CalibrationError(
                    f"{place} holds token id {strange}, but the model's vocabulary is {len(known)}; "
                    "use the tokenizer that belongs to the model"
                )


def refuse_unknown_inputs(windows: Sequence[CalibrationInput], source: ModelSource) -> None:
    """Refuse inputs that the model's forward pass does not name: it may take any, and ignore them.

    Raises:
        CalibrationError: Naming the sample.
    """
    samples = [window for window in windows if isinstance(window, ModelInputs)]
    names = dict.fromkeys(name for sample in samples for name in sample.tensors)
    unknown = unknown_inputs(source.weightless(), names) if names else []
    for sample in samples:
        strange = [name for name in sample.tensors if name in unknown]
        if strange:
            raise CalibrationError(
                f"{sample.place}: {', '.join(map(repr, strange))} is no input that the model's forward pass names, "
                "so it would be ignored; rename it if it is misspelt, or leave it out"
            )
