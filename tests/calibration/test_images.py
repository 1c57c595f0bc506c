import sys
from dataclasses import replace

import pytest
import torch
from tests.vision import draw, make_processor

from hessquant.calibration.images import image_inputs
from hessquant.calibration.sources import Sample
from hessquant.errors import CalibrationError
from hessquant.models.source import ModelSource

IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "w20"}


@pytest.fixture
def sample(tmp_path):
    draw(tmp_path / "a.png", 0)
    draw(tmp_path / "b.png", 1)

    def make(content, *names):
        return Sample("rows.jsonl, line 4", content, images=tuple(tmp_path / name for name in names))

    return make


def user(*parts):
    return {"role": "user", "content": list(parts)}


def test_images_take_the_places_that_text_and_messages_keep_for_them(sample):
    text = image_inputs(sample("w20 <image> w21 <image>", "a.png", "b.png"), lambda: make_processor(99))
    assert text.tokens == 2 + 2 * 16
    assert text.tensors["pixel_values"].shape == (2, 3, 32, 32)
    # Of a part's own address nothing is fetched.
    messages = [
        user({**IMAGE, "url": "http://localhost/none.png"}, TEXT),
        {"role": "w30", "content": "w31"},
        user(IMAGE),
    ]
    chat = image_inputs(sample(messages, "a.png", "b.png"), lambda: make_processor(99))
    assert torch.equal(chat.tensors["pixel_values"], text.tensors["pixel_values"])
    assert chat.tensors["input_ids"][0].tolist() == [0, *[99] * 16, 20, 30, 31, 0, *[99] * 16]
    assert "image" not in messages[0]["content"][0]


@pytest.mark.parametrize(
    ("content", "names", "reason"),
    [
        ("<image>", ["c.png"], r"there is no image .*c\.png; paths are relative to the folder"),
        ("<image>", ["text.png"], r"cannot read the image .*text\.png"),
        ("<image>", ["a.png", "b.png"], "the processor LlavaProcessor fails on this row"),
        ([user(IMAGE, IMAGE)], ["a.png"], "names 1 images, but its messages have 2 parts"),
        ([user(TEXT)], ["a.png"], 'names 1 images, but its messages have 0 parts .*{"type": "image"}'),
        ([user(IMAGE, {"type": "video", "url": "x"})], ["a.png"], "a part of its messages is .*'text' or 'image'"),
        ([user(IMAGE, "w20")], ["a.png"], "a part of its messages is 'w20'"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_line(content, names, reason, sample, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(CalibrationError, match=rf"^rows\.jsonl, line 4: {reason}"):
        image_inputs(sample(content, *names), lambda: make_processor(99))


def test_without_pillow_the_extra_is_named(sample, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(CalibrationError, match=r"line 4: images need Pillow: pip install 'hessquant\[vision\]'"):
        image_inputs(sample("<image>", "a.png"), lambda: make_processor(99))


@pytest.mark.parametrize("files", ["none", "tokenizer"])
def test_without_a_processor_the_row_is_refused(files, sample, tmp_path):
    if files == "tokenizer":
        make_processor(99).tokenizer.save_pretrained(tmp_path)
    source = ModelSource("org/model", tmp_path)
    with pytest.raises(CalibrationError, match=r"line 4: has images, but org/model: no processor .*without 'images'"):
        image_inputs(sample("<image>", "a.png"), lambda: source.processor)


def test_tools_and_variables_reach_the_processors_template(sample):
    processor = make_processor(99)
    processor.chat_template = (
        "{% for t in tools or [] %}{{ t['name'] }} {% endfor %}{% if mood is defined %}{{ mood }} {% endif %}"
        + processor.chat_template
    )
    plain = sample([user(IMAGE, TEXT)], "a.png")
    made = replace(plain, tools=[{"name": "w50"}], template_variables={"mood": "w51"})
    ids = [image_inputs(row, lambda: processor).tensors["input_ids"][0].tolist() for row in (plain, made)]
    assert ids[1] == [50, 51, *ids[0]]
    with pytest.raises(CalibrationError, match=r"line 4: has 'tools', but the model's chat template makes the same"):
        image_inputs(replace(plain, tools=[{"name": "w50"}]), lambda: make_processor(99))
    with pytest.raises(CalibrationError, match=r"line 4: 'chat_template_kwargs' sets 'return_dict'"):
        image_inputs(replace(plain, template_variables={"return_dict": False}), lambda: processor)
