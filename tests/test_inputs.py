"""The whole job on tiny models that take something else than one text: encoders, encoder-decoders, speech, images."""

import time

import pytest
import torch
from tests.architectures.families import OTHERS, build, text_ids, tiny

import hessquant
from hessquant.models.source import resolve
from hessquant.pipeline.evaluating import load_model

CONFIG = hessquant.Config(group_size=32)


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
        return load_model(resolve(str(model)), False, inputs)(**inputs)[0]


def check(report, model, out, inputs):
    """That the result decodes, is close to the original, and loses less than rounding does."""
    assert report.verified_tensors == len(report.layers) == len(report.plan.targets) > 0
    assert sum(layer.loss for layer in report.layers) < 0.9 * sum(layer.rtn_loss for layer in report.layers)
    assert hessquant.inspect(out).faults == ()
    before, after = outputs(model, inputs), outputs(out, inputs)
    assert 0 < (after - before).abs().mean() < 0.2 * before.abs().mean()

CASES = ["T5ForConditionalGeneration", "BartForConditionalGeneration", "WhisperForConditionalGeneration", "BertModel", "ModernBertModel","LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"]
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("image", [False, True])
def test_x(make_model, tmp_path, name, image):
    model, config, other = make_model(name)
    f = other.image_inputs if image else other.inputs
    if f is None: pytest.skip()
    inputs = f(config)
    gen = torch.Generator().manual_seed(5)
    samples = []
    for i in range(16):
        s = {}
        for k, v in inputs.items():
            if v.is_floating_point(): s[k] = torch.randn(v.shape, generator=gen)
            elif k in ("input_ids", "decoder_input_ids"):
                r = text_ids(i + 100, v.shape[1]); s[k] = torch.where(v == getattr(config, "image_token_id", -1), v, r)
            else: s[k] = v
        samples.append(s)
    t = time.time()
    report = hessquant.quantize(model, tmp_path / "out", CONFIG, calibration=samples)
    print(name, image, time.time() - t, report.plan.whole, report.calibration, sum(layer.loss for layer in report.layers) / sum(layer.rtn_loss for layer in report.layers), len(report.layers), report.degraded[:3])
    print([l.name for l in report.layers][::6])
    before, after = outputs(model, inputs), outputs(tmp_path / "out", inputs)
    print((after - before).abs().mean() / before.abs().mean())
    print({(u.name.rsplit(".",2)[0] if 0 else u.name): u.reason for u in report.plan.untouched if "norm" not in u.reason and u.reason != "bias"})
    check(report, model, tmp_path / "out", inputs)
