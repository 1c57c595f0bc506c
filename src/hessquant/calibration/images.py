"""Samples with images -> inputs of the model, by the processor that comes with it."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.image_utils import load_image

from hessquant.calibration.model_inputs import ModelInputs, model_inputs
from hessquant.calibration.rows import Message, Sample
from hessquant.calibration.templates import failing, rendered
from hessquant.errors import CalibrationError, SourceError


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
    images = [_image(path, place) for path in sample.images]
    try:
        processor = load_processor()
    except SourceError as error:
        raise CalibrationError(
            f"{place}: has images, but {error}; put the processor's files there, install what it needs "
            "(pip install 'hessquant[vision]'), or calibrate on rows without 'images'"
        ) from error
    content, fault = sample.content, f"the processor {type(processor).__name__} fails on this row"
    if isinstance(content, str):
        with failing(f"{place}: {fault}"):
            inputs = processor(text=content, images=images, return_tensors="pt")
    else:
        inputs = rendered(sample, _with_images(content, images, place), processor, fault, return_tensors="pt")
    return model_inputs(inputs, place)


def _image(path: Path, place: str) -> Any:
    if not path.is_file():
        raise CalibrationError(
            f"{place}: there is no image {path}; paths are relative to the folder of the .jsonl file"
        )
    try:
        return load_image(str(path.resolve()))
    except Exception as error:  # Pillow's plug-ins raise whatever they stumble over
        raise CalibrationError(f"{place}: cannot read the image {path}: {error}") from error


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
    return [
        {**message, "content": [_filled(part, left) for part in _parts(message)]} if _parts(message) else message
        for message in messages
    ]


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _filled(part: Message, images: Iterator[Any]) -> Message:
    return {"type": "image", "image": next(images)} if part["type"] == "image" else part
