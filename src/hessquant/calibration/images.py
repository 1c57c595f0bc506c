"""Samples with images -> inputs of the model, by the processor that comes with it."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from transformers.image_utils import load_image

from hessquant.calibration.model_inputs import ModelInputs, model_inputs
from hessquant.calibration.rows import Message, Sample
from hessquant.calibration.templates import rendered
from hessquant.errors import CalibrationError, SourceError
from hessquant.models.library import quiet


def image_inputs(sample: Sample, load_processor: Callable[[], Any] | None) -> ModelInputs:
    """What the model's processor makes of a text or a conversation with images. Nothing is cut.

    Args:
        sample: It has images.
        load_processor: Gives the processor; None where images have no place.

    Raises:
        CalibrationError: Naming the sample's place, if an image cannot be read, there is no processor or no Pillow, or
            the processor fails.
    """
    place = sample.place
    if load_processor is None:
        raise CalibrationError(f"{place}: has images, and perplexity is measured on text alone; remove the row")
    if importlib.util.find_spec("PIL") is None:
        raise CalibrationError(f"{place}: images need Pillow: pip install 'hessquant[vision]'")
    images = [_image(sample, index) for index in range(len(sample.images))]
    try:
        processor = load_processor()
    except SourceError as error:
        raise CalibrationError(
            f"{place}: has images, but {error}; put the processor's files there, install what it needs "
            "(pip install 'hessquant[vision]'), or calibrate on rows without 'images'"
        ) from error
    return model_inputs(_processed(sample, images, processor), place)


def _processed(sample: Sample, images: Sequence[Any], processor: Any) -> Mapping[str, Any]:
    """Inputs of the model by name, as the processor gives them."""
    place, content = sample.place, sample.content
    messages = [] if isinstance(content, str) else _with_images(content, images, place)

    def render(arguments: dict[str, Any]) -> Mapping[str, Any]:
        # A processor is code of the library or of the model, and raises what it likes.
        try:
            with quiet():
                made: Mapping[str, Any] = (
                    processor(text=content, images=images, return_tensors="pt")
                    if isinstance(content, str)
                    else processor.apply_chat_template(
                        messages, tokenize=True, return_dict=True, return_tensors="pt", **arguments
                    )
                )
        except Exception as error:
            raise CalibrationError(
                f"{place}: the processor {type(processor).__name__} fails on this row: {type(error).__name__}: {error}"
            ) from error
        return made

    made: Mapping[str, Any] = rendered(sample, processor, render, lambda inputs: inputs["input_ids"].tolist())
    return made


def _image(sample: Sample, index: int) -> Any:
    path = sample.images[index]
    if not path.is_file():
        raise CalibrationError(
            f"{sample.place}: there is no image {path}; paths are relative to the folder of the .jsonl file"
        )
    try:
        return load_image(str(path.resolve()))
    except Exception as error:  # Pillow's plug-ins raise whatever they stumble over
        raise CalibrationError(f"{sample.place}: cannot read the image {path}: {error}") from error


def _with_images(messages: Sequence[Message], images: Sequence[Any], place: str) -> list[Message]:
    """The conversation with an image in each of its image parts, in order; what a part says itself is not fetched."""
    parts = [part for message in messages for part in _parts(message)]
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "image"):
            raise CalibrationError(
                f"{place}: a part of its messages is {part!r:.80}; a part is of the type 'text' or 'image'"
            )
    asked = sum(part["type"] == "image" for part in parts)
    if asked != len(images):
        raise CalibrationError(
            f"{place}: names {len(images)} images, but its messages have {asked} parts of the type 'image'; every "
            'image needs a {"type": "image"} in the content of a message, in order'
        )
    left = iter(images)
    return [_filled(message, left) for message in messages]


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _filled(message: Message, images: Iterator[Any]) -> Message:
    parts = [{"type": "image", "image": next(images)} if part["type"] == "image" else part for part in _parts(message)]
    return {**message, "content": parts} if parts else message
