"""One sample of a text -> the windows it makes: tokens, source and target, or a processor's inputs for its images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hessquant.calibration.batches import CalibrationInput
from hessquant.calibration.images import image_inputs
from hessquant.calibration.sources import Message, Sample
from hessquant.errors import CalibrationError
from hessquant.records import TokenWindow


@dataclass(frozen=True)
class Reader:
    """How text becomes windows.

    Attributes:
        tokenizer: A transformers tokenizer.
        window_length: Tokens per window; at most so many on each side of a pair.
        encoder_decoder: Whether the model reads a source and writes a target.
        load_processor: Gives the model's processor, asked only where a sample has images; None where images have no
            place.
    """

    tokenizer: Any
    window_length: int
    encoder_decoder: bool = False
    load_processor: Callable[[], Any] | None = None

    def windows(self, ids: Sequence[int]) -> list[TokenWindow]:
        """Cut ids into windows of full length and, at their end, one of what is left."""
        length = self.window_length
        windows = [TokenWindow(tuple(ids[start : start + length])) for start in range(0, len(ids), length)]
        return [halved(window) for window in windows] if self.encoder_decoder else windows

    def inputs(self, sample: Sample) -> Sequence[CalibrationInput]:
        """What a sample makes.

        Raises:
            CalibrationError: If it cannot be used with this model; names its place.
        """
        if sample.images:
            return [image_inputs(sample, self.load_processor)]
        if sample.target is not None:
            return [self._pair(sample, sample.target)]
        content = sample.content
        ids = self.tokenize(content) if isinstance(content, str) else _render(content, sample.place, self.tokenizer)
        if not ids:
            raise CalibrationError(f"{sample.place}: holds no token")
        return self.windows(ids)

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, of any length."""
        # verbose=False: a text longer than the model's context is meant, since it is cut afterwards.
        return list(self.tokenizer(text, verbose=False)["input_ids"])

    def _pair(self, sample: Sample, target: str) -> TokenWindow:
        if not self.encoder_decoder:
            raise CalibrationError(
                f"{sample.place}: has 'source' and 'target', which are for encoder-decoders; this model takes rows "
                "with 'text' or 'messages'"
            )
        sides = {
            "source": self.tokenize(str(sample.content)),
            # Some tokenizers have another vocabulary for what is written.
            "target": list(self.tokenizer(text_target=target, verbose=False)["input_ids"]),
        }
        for name, ids in sides.items():
            if not ids:
                raise CalibrationError(f"{sample.place}: its {name!r} holds no token")
            if len(ids) > self.window_length:
                raise CalibrationError(
                    f"{sample.place}: its {name!r} has {len(ids)} tokens, more than the window length of "
                    f"{self.window_length}, and no pair is truncated; take --window-length {len(ids)}, or shorten it"
                )
        return TokenWindow(tuple(sides["source"]), tuple(sides["target"]))


def halved(window: TokenWindow) -> TokenWindow:
    """The window for an encoder-decoder: its first half is read, its second half is to be written."""
    half = len(window.ids) // 2
    # Of a single token there are no halves. As a target it is not even read: the decoder sees its start token alone.
    return TokenWindow(window.ids[:half], window.ids[half:]) if half else TokenWindow(window.ids, window.ids)


def _render(messages: list[Message], place: str, tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"{place}: has 'messages', but the tokenizer has no chat template; "
            "use a model with one, or rows with 'text'"
        )
    # A template is a program that comes with the model; what it raises on messages it does not like is its own.
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    except Exception as error:
        raise CalibrationError(
            f"{place}: the chat template fails on these messages: {type(error).__name__}: {error}"
        ) from error
    return list(ids)
