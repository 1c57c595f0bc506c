"""A source in FP8 is planned and quantized as the model that it stands for, in whatever way it is stored."""

import json

import pytest
import torch
from tests.stored.forms import FLOAT8
from tests.tiny import tokens

import hessquant
from hessquant.checkpoint.opening import weights_of
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.pipeline import make_plan


def is_projection(name):
    return name.endswith("_proj.weight")


@pytest.fixture(scope="module", params=FLOAT8)
def case(request, llama, tmp_path_factory):
    tensors, config = llama
    form = FLOAT8[request.param]
    stored = form.store(tensors, is_projection)
    return form, stored, *stored.write(tmp_path_factory.mktemp("case"), config)


def test_values_are_those_of_the_definition_bit_by_bit(case):
    _, stored, source, _ = case
    with CheckpointReader(source) as reader:
        weights = weights_of(reader)
        assert set(weights.tensors) == set(stored.values)
        for name, value in stored.values.items():
            decoded = weights.decode(name)
            assert decoded.dtype == value.dtype
            assert torch.equal(decoded, value)
            for most in (1, 1 << 11, 1 << 30):
                assert torch.equal(torch.cat(list(weights.chunks(name, most))), value)
            written = weights.read(name)
            assert torch.equal(written, value.to(torch.bfloat16))
            assert weights.tensors[name].dtype == "BF16"


def test_the_plan_says_what_the_source_is(case):
    form, stored, source, plain = case
    plan, other = (make_plan(str(path), calibration=[tokens()]) for path in (source, plain))
    assert plan.source_form == f"{form.title}, dequantized"
    assert other.source_form == ""
    assert plan.targets == other.targets
    dropped = {tensor.name for tensor in plan.dropped}
    assert dropped == {name for name in stored.tensors if name.endswith(form.drops or "-")}
    assert all("activations" in tensor.reason for tensor in plan.dropped)
    assert not dropped & {tensor.name for tensor in plan.untouched}


def test_it_is_quantized_as_its_dequantized_weights_are(case, tmp_path):
    _, _, source, plain = case
    config = hessquant.Config(group_size=32)
    written = []
    for path in (source, plain):
        hessquant.quantize(str(path), tmp_path / path.name, config, calibration=[tokens()])
        with CheckpointReader(tmp_path / path.name) as reader:
            written.append({name: reader.read(name) for name in reader.tensors})
            assert reader.config["quantization_config"]["quant_method"] == "gptq"
    ours, theirs = written
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (tmp_path / "stored" / "hf_quant_config.json").exists()
    report = json.loads((tmp_path / "stored" / "hessquant-report.json").read_text())
    assert report["plan"]["source_form"].endswith("dequantized")
