"""The whole job on tiny models that take something else than a text to go on with."""

import json

import pytest
import torch
from benchmarks.loading import load_model
from safetensors.torch import load_file
from tests.architectures.families import OTHERS, build, text_ids, tiny
from tests.vision import draw, make_processor

import hessquant
from hessquant import cli
from hessquant.errors import CalibrationError, CaptureError, PlanError
from hessquant.models.source import resolve

# Without the search for scales, which would take most of the time.
CONFIG = hessquant.Config(group_size=32, bits=8, scale_search=False)
TEXT = hessquant.Config(group_size=32, bits=8, scale_search=False, max_unquantized=1)


@pytest.fixture
def make_model(tmp_path):
    def make(class_name):
        other = next(other for other in OTHERS if other.class_name == class_name)
        config = tiny(other.model_type)
        build(config, class_name).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model"), config, other

    return make


def outputs(model, inputs):
    with torch.no_grad():
        return load_model(resolve(str(model)), inputs)(**inputs)[0]


def check(report, model, out, inputs):
    """That the result decodes, is close to the original, and loses less than rounding does."""
    assert report.verified_tensors == len(report.layers) == len(report.plan.targets) > 0
    assert all(layer.method == "gptq" and layer.loss <= layer.rtn_loss for layer in report.layers)
    before, after = outputs(model, inputs), outputs(out, inputs)
    assert 0 < (after - before).abs().mean() < 0.1 * before.abs().mean()


@pytest.mark.parametrize(
    ("class_name", "encoder", "decoder"),
    [
        ("T5ForConditionalGeneration", "encoder.block.", "decoder.block."),
        ("BartForConditionalGeneration", "model.encoder.layers.", "model.decoder.layers."),
        ("WhisperForConditionalGeneration", "model.encoder.layers.", "model.decoder.layers."),
    ],
)
def test_both_towers_of_an_encoder_decoder_are_quantized(class_name, encoder, decoder, make_model, tmp_path):
    model, config, other = make_model(class_name)
    inputs = other.inputs(config)
    match class_name[:2]:
        case "T5":
            samples = [{"input_ids": text_ids(seed, 32), "labels": text_ids(seed + 9, 24)} for seed in range(4)]
            tokens = 4 * 56
        case "Ba":  # cut in half
            samples = [text_ids(seed, 64) for seed in range(4)]
            tokens = 4 * 64
        case _:
            noise = torch.Generator().manual_seed(7)
            shape = inputs["input_features"].shape
            samples = [
                {"input_features": torch.randn(shape, generator=noise), "decoder_input_ids": text_ids(seed, 32)}
                for seed in range(2)
            ]
            tokens = 2 * shape[-1]
    report = hessquant.quantize(model, tmp_path / "out", CONFIG, calibration=samples)
    assert (report.calibration.windows, report.calibration.tokens) == (len(samples), tokens)
    names = {layer.name for layer in report.layers}
    for tower in (encoder, decoder):
        held = {
            name
            for name, tensor in load_file(f"{model}/model.safetensors").items()
            if name.startswith(tower) and tensor.ndim == 2 and "relative_attention_bias" not in name
        }
        assert held
        assert held <= names
    check(report, model, tmp_path / "out", inputs)


@pytest.mark.parametrize("class_name", ["BertModel", "ModernBertModel"])
def test_an_encoder_is_quantized_from_plain_text(class_name, make_model, tmp_path, capsys):
    model, config, other = make_model(class_name)
    report = hessquant.quantize(model, tmp_path / "out", CONFIG, calibration=[text_ids(seed, 64) for seed in range(4)])
    state, blocks = load_file(f"{model}/model.safetensors"), ("encoder.layer.", "layers.")
    linear = {name for name, tensor in state.items() if name.startswith(blocks) and tensor.ndim == 2}
    assert {layer.name for layer in report.layers} == linear
    check(report, model, tmp_path / "out", other.inputs(config))
    assert cli.main(["evaluate", model]) == 2
    assert "BertModel is no model that continues a text" in capsys.readouterr().err


def test_an_encoder_decoder_is_not_evaluated(make_model, capsys):
    model, _, _ = make_model("T5ForConditionalGeneration")
    assert cli.main(["evaluate", model]) == 2
    assert "T5ForConditionalGeneration is an encoder-decoder" in capsys.readouterr().err


def test_text_alone_quantizes_the_language_tower_and_says_what_it_does_not_reach(make_model, tmp_path):
    model, config, other = make_model("LlavaForConditionalGeneration")
    samples = [text_ids(seed, 64) for seed in range(4)]
    report = hessquant.quantize(model, tmp_path / "out", TEXT, calibration=samples)
    assert not report.plan.whole
    assert {layer.name.split(".")[0] for layer in report.layers} == {"language_model"}
    assert len(report.layers) == 14
    left = {tensor.name: tensor.reason for tensor in report.plan.untouched}
    assert left["vision_tower.encoder.layers.0.mlp.fc1.weight"] == "not multiplied by the forward pass"
    check(report, model, tmp_path / "out", other.inputs(config))


def write_rows(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_images_reach_the_vision_tower_which_is_quantized_too(make_model, tmp_path):
    model, config, other = make_model("LlavaForConditionalGeneration")
    make_processor(config.image_token_id).save_pretrained(model)
    (tmp_path / "pictures").mkdir()
    for seed in range(4):
        draw(tmp_path / "pictures" / f"{seed}.png", seed)
    content = [{"type": "image"}, {"type": "text", "text": "w30 w31 w32"}]
    rows = [
        {"text": "w20 w21 w22 w23"},
        {"text": "w20 <image> w21", "images": ["pictures/0.png"]},
        *({"messages": [{"role": "w40", "content": content}], "images": [f"pictures/{n}.png"]} for n in range(1, 4)),
        {"text": "never read"},
    ]
    source = write_rows(tmp_path, rows)
    config = hessquant.Config(group_size=32, bits=8, scale_search=False, max_unquantized=1, num_windows=5)
    report = hessquant.quantize(model, tmp_path / "out", config, calibration=source)
    assert report.plan == hessquant.make_plan(model, config, calibration=source)
    assert report.plan.whole
    assert (report.calibration.windows, report.calibration.tokens) == (5, 4 + 18 + 3 * 20)
    assert {layer.name.split(".")[0] for layer in report.layers} == {"language_model", "vision_tower"}
    tokens = {layer.name.split(".")[0]: layer.tokens for layer in report.layers}
    # A picture is 16 patches and a class token to the tower.
    assert tokens == {"language_model": 82, "vision_tower": 4 * 17}
    check(report, model, tmp_path / "out", other.image_inputs(tiny("llava")))


def test_samples_of_any_inputs_go_through_the_model_as_they_are(make_model, tmp_path):
    model, config, other = make_model("Qwen2VLForConditionalGeneration")
    inputs = other.image_inputs(config)
    as_lists = {name: tensor.tolist() for name, tensor in inputs.items()}
    as_arrays = {name: tensor.double().numpy() if name == "pixel_values" else tensor for name, tensor in inputs.items()}
    plans = [hessquant.make_plan(model, TEXT, calibration=[sample]) for sample in (inputs, as_lists, as_arrays)]
    assert plans[0] == plans[1] == plans[2]
    assert any(target.name.startswith("visual.blocks.") for target in plans[0].targets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": [[1] * 15 + [0]]}, "calibration sample 1: attention_mask masks 1 positions.*one by one"),
        ({"input_ids": [[5, 128]]}, "calibration sample 1 holds token id 128, but the model's vocabulary is 128"),
        ({"decoder_input_ids": [[5] * 300]}, "calibration sample 1 has 300 tokens, but the model's context is 256"),
    ],
)
def test_samples_that_do_not_fit_are_refused_before_work(change, message, make_model, tmp_path):
    model, config, other = make_model("BartForConditionalGeneration")
    inputs = other.inputs(config)
    with pytest.raises(CalibrationError, match=message):
        hessquant.quantize(model, tmp_path / "out", CONFIG, calibration=[inputs, {**inputs, **change}])
    assert not list(tmp_path.glob("out*"))


def test_a_model_that_takes_no_text_says_what_to_give_it(make_model, tmp_path):
    model, _, _ = make_model("WhisperForConditionalGeneration")
    with pytest.raises(PlanError, match=r"with input_ids, decoder_input_ids fails .*calibrate on samples of those"):
        hessquant.make_plan(model, CONFIG)


def test_a_target_needs_something_to_begin_with(make_model, tmp_path):
    model, _, _ = make_model("T5ForConditionalGeneration")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    with pytest.raises(CalibrationError, match="its config has none of decoder_start_token_id, pad_token_id"):
        hessquant.quantize(model, tmp_path / "out", CONFIG, calibration=[text_ids()])


def test_a_sample_that_the_model_fails_on_is_named(make_model, tmp_path):
    model, config, other = make_model("LlavaForConditionalGeneration")
    fine = other.image_inputs(config)
    bad = {**fine, "input_ids": text_ids()}  # no places for the image
    with pytest.raises(CaptureError, match=r"^calibration sample 1: the model fails on input_ids, pixel_values: Value"):
        hessquant.quantize(model, tmp_path / "out", TEXT, calibration=[fine, bad])
    assert not (tmp_path / "out").exists()
