"""One sample of a text -> the windows it makes: tokens, source and target, or a processor's inputs for its images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hessquant.calibration.images import image_inputs
from hessquant.calibration.model_inputs import CalibrationInput
from hessquant.calibration.rows import Message, Sample
from hessquant.calibration.templates import rendered
from hessquant.errors import CalibrationError
from hessquant.models.library import quiet, reason
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
        content, place = sample.content, sample.place
        ids = self.tokenize(content, place) if isinstance(content, str) else self._conversation(sample, content)
        if not ids:
            raise CalibrationError(f"{place}: holds no token")
        return self.windows(ids)

    def tokenize(self, text: str, place: str) -> list[int]:
        """Ids of a text, of any length.

        Args:
            text: The text.
            place: Where it stands, for messages.

        Raises:
            CalibrationError: If the tokenizer fails on it; of a text of several lines the first such line is named.
        """
        try:
            return self._ids(text)
        except Exception as error:  # a tokenizer is code of a library or of the model, and raises what it likes
            where = f"{place}{self._first_bad_line(text)}"
            raise CalibrationError(f"{where}: the tokenizer fails on this text: {reason(error)}") from error

    def _ids(self, *text: str, **target: str) -> list[int]:
        with quiet():  # which makes an exception of a panic
            # verbose=False: a text longer than the model's context is meant, since it is cut afterwards.
            return list(self.tokenizer(*text, **target, verbose=False)["input_ids"])

    def _first_bad_line(self, text: str) -> str:
        lines = text.split("\n")
        for number, line in enumerate(lines if len(lines) > 1 else (), start=1):
            try:
                self._ids(line)
            except Exception:
                return f", line {number} of the text"
        return ""

    def _conversation(self, sample: Sample, messages: Sequence[Message]) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise CalibrationError(
                f"{sample.place}: has 'messages', but the tokenizer has no chat template; "
                "use a model with one, or rows with 'text'"
            )
        inputs = rendered(sample, messages, self.tokenizer, "the chat template fails on these messages")
        return list(inputs["input_ids"])

    def _pair(self, sample: Sample, target: str) -> TokenWindow:
        place = sample.place
        if not self.encoder_decoder:
            raise CalibrationError(
                f"{place}: has 'source' and 'target', which are for encoder-decoders; this model takes rows "
                "with 'text' or 'messages'"
            )
        source_ids = self.tokenize(str(sample.content), place)
        try:
            # Some tokenizers have another vocabulary for what is written.
            target_ids = self._ids(text_target=target)
        except Exception as error:
            raise CalibrationError(f"{place}: the tokenizer fails on its 'target': {reason(error)}") from error
        for name, ids in (("source", source_ids), ("target", target_ids)):
            if not ids:
                raise CalibrationError(f"{place}: its {name!r} holds no token")
            if len(ids) > self.window_length:
                raise CalibrationError(
                    f"{place}: its {name!r} has {len(ids)} tokens, more than the window length of "
                    f"{self.window_length}, and no pair is truncated; take --window-length {len(ids)}, or shorten it"
                )
        return TokenWindow(tuple(source_ids), tuple(target_ids))


def halved(window: TokenWindow) -> TokenWindow:
    """The window for an encoder-decoder: its first half is read, its second half is to be written."""
    half = len(window.ids) // 2
    # Of a single token there are no halves. As a target it is not even read: the decoder sees its start token alone.
    return TokenWindow(window.ids[:half], window.ids[half:]) if half else TokenWindow(window.ids, window.ids)
