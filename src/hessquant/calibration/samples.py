"""One sample of a text -> the windows it makes: tokens, source and target, or a processor's inputs for its images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hessquant.calibration.batches import CalibrationInput
from hessquant.calibration.images import image_inputs
from hessquant.calibration.rows import Sample
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
        content = sample.content
        ids = self.tokenize(content, sample.place) if isinstance(content, str) else _render(sample, self.tokenizer)
        if not ids:
            raise CalibrationError(f"{sample.place}: holds no token")
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

    def _ids(self, text: str) -> list[int]:
        with quiet():  # which makes an exception of a panic
            # verbose=False: a text longer than the model's context is meant, since it is cut afterwards.
            return list(self.tokenizer(text, verbose=False)["input_ids"])

    def _first_bad_line(self, text: str) -> str:
        lines = text.split("\n")
        for number, line in enumerate(lines if len(lines) > 1 else (), start=1):
            try:
                self._ids(line)
            except Exception:
                return f", line {number} of the text"
        return ""

    def _pair(self, sample: Sample, target: str) -> TokenWindow:
        if not self.encoder_decoder:
            raise CalibrationError(
                f"{sample.place}: has 'source' and 'target', which are for encoder-decoders; this model takes rows "
                "with 'text' or 'messages'"
            )
        sides = {
            "source": self.tokenize(str(sample.content), sample.place),
            "target": self._target_ids(target, sample.place),
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

    def _target_ids(self, target: str, place: str) -> list[int]:
        try:
            with quiet():
                # Some tokenizers have another vocabulary for what is written.
                return list(self.tokenizer(text_target=target, verbose=False)["input_ids"])
        except Exception as error:
            raise CalibrationError(f"{place}: the tokenizer fails on its 'target': {reason(error)}") from error


def halved(window: TokenWindow) -> TokenWindow:
    """The window for an encoder-decoder: its first half is read, its second half is to be written."""
    half = len(window.ids) // 2
    # Of a single token there are no halves. As a target it is not even read: the decoder sees its start token alone.
    return TokenWindow(window.ids[:half], window.ids[half:]) if half else TokenWindow(window.ids, window.ids)


def _render(sample: Sample, tokenizer: Any) -> list[int]:
    place = sample.place
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"{place}: has 'messages', but the tokenizer has no chat template; "
            "use a model with one, or rows with 'text'"
        )

    def render(arguments: dict[str, Any]) -> list[int]:
        # A template is a program that comes with the model; what it raises on messages it does not like is its own.
        try:
            with quiet():
                ids = tokenizer.apply_chat_template(sample.content, tokenize=True, return_dict=False, **arguments)
        except Exception as error:
            raise CalibrationError(
                f"{place}: the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from error
        return list(ids)

    ids: list[int] = rendered(sample, tokenizer, render, list)
    return ids
