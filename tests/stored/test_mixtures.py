"""Mixtures as they are shipped: gpt-oss with experts in MXFP4, Qwen3-MoE and DeepSeek-V3 in block FP8."""

import json

import pytest
import torch
from benchmarks.loading import load_model
from safetensors.torch import load_file
from tests.stored.forms import E2M1, E8M0, FLOAT8, Stored, store_mxfp4
from tests.stored.models import DEEPSEEK, QWEN, gpt_oss
from tests.tiny import tokens
from transformers import AutoModelForCausalLM

import hessquant
from hessquant.checkpoint.opening import requantized, weights_of
from hessquant.checkpoint.reader import CheckpointReader
from hessquant.formats.mxfp4 import read_form
from hessquant.models.source import resolve
from hessquant.pipeline import make_plan
from hessquant.records import TensorInfo


def same_values(first, second):
    ours, theirs = (load_file(path / "model.safetensors") for path in (first, second))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        # What is not quantized anew is written in bfloat16.
        assert torch.equal(value, theirs[name].to(value.dtype)), name


@pytest.fixture(scope="module")
def mxfp4(tiny, tmp_path_factory):
    tensors, config = tiny(gpt_oss())
    stored = store_mxfp4(tensors, lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    assert any(name.endswith("gate_up_proj_blocks") for name in stored.tensors)
    return stored, *stored.write(tmp_path_factory.mktemp("gpt-oss"), config)


def test_mxfp4_is_decoded_by_its_definition(mxfp4):
    stored, source, _ = mxfp4
    with CheckpointReader(source) as reader:
        weights = weights_of(reader)
        assert weights.tensors.keys() == stored.values.keys()
        for name, value in stored.values.items():
            assert torch.equal(weights.decode(name), value)
            assert torch.equal(torch.cat(list(weights.chunks(name, 1))), value)


def test_every_code_and_every_scale_of_mxfp4_is_exact():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    header = {
        "x_blocks": TensorInfo("x_blocks", (1, 1, 16, 16), "U8", 256, ""),
        "x_scales": TensorInfo("x_scales", (1, 1, 16), "U8", 16, ""),
    }
    (weight,) = read_form({"quant_method": "mxfp4"}).weights(header)
    assert (weight.name, weight.shape) == ("x", (1, 512, 1))
    for first in range(0, 253, 16):
        # 6 * 2^126 and more is beyond float32.
        scales = torch.arange(first, first + 16).clamp(max=252).to(torch.uint8).reshape(1, 1, 16)
        values = weight.decode([blocks, scales]).reshape(16, 16, 2)
        for group in range(16):
            factor = E8M0[int(scales[0, 0, group])]
            low, high = (torch.from_numpy(E2M1[half] * factor) for half in (range(16), [group] * 16))
            assert torch.equal(values[group, :, 0], low)
            assert torch.equal(values[group, :, 1], high)


def test_gpt_oss_is_quantized_as_its_dequantized_weights_are(mxfp4, tmp_path):
    _, source, plain = mxfp4
    config = hessquant.Config(group_size=16, format="compressed-tensors")
    plan = make_plan(str(source), config, calibration=[tokens()])
    assert plan.source_form == "MXFP4, dequantized"
    assert any("experts" in target.name for target in plan.targets)
    for path in (source, plain):
        hessquant.quantize(str(path), tmp_path / path.name, config, calibration=[tokens()])
    same_values(tmp_path / "stored", tmp_path / "plain")
    with torch.no_grad():
        first, second = (load_model(resolve(str(path)))(input_ids=tokens(2)).logits for path in (source, plain))
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", [QWEN, gpt_oss(2)], ids=["qwen3-moe", "gpt-oss"])
def test_a_quantized_mixture_is_quantized_again_from_its_decoded_weights(kind, tiny, tmp_path):
    """Also where the model has one tensor of what the checkpoint has apart."""
    tensors, config = tiny(kind)
    first, _ = Stored(tensors, {}, {}).write(tmp_path, config)
    once = hessquant.Config(group_size=32, format="compressed-tensors", exclude=("o_proj",))
    hessquant.quantize(str(first), tmp_path / "once", once, calibration=[tokens()])
    with CheckpointReader(tmp_path / "once") as reader:
        weights = requantized(resolve(str(tmp_path / "once")), reader)
        assert weights.tensors.keys() == tensors.keys()
        decoded = {name: weights.decode(name) for name in weights.tensors}
        parts = [part for name in weights.tensors for part in weights.parts(name)]
        assert sorted(parts) == sorted(reader.tensors)
    folder = tmp_path / "decoded"
    folder.mkdir()
    _, plain = Stored({}, decoded, {}).write(folder, config)
    again = hessquant.Config(group_size=16, bits=3, requantize=True, format="gptq")
    for path in (tmp_path / "once", plain):
        hessquant.quantize(str(path), tmp_path / f"{path.name}-again", again, calibration=[tokens()])
    same_values(tmp_path / "once-again", tmp_path / "plain-again")


@pytest.mark.parametrize("kind", [QWEN, DEEPSEEK], ids=["qwen3-moe", "deepseek-v3"])
def test_a_mixture_in_block_fp8_becomes_a_checkpoint_that_transformers_opens(kind, tiny, tmp_path):
    tensors, config = tiny(kind)
    shipped = FLOAT8["block of 128"]
    stored = shipped.store(tensors, lambda name: name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")))
    assert any(".experts.3.down_proj.weight_scale_inv" in name for name in stored.tensors)
    source, plain = stored.write(tmp_path, config)
    settings = hessquant.Config(group_size=16, format="compressed-tensors")
    for path in (source, plain):
        hessquant.quantize(str(path), tmp_path / f"{path.name}-out", settings, calibration=[tokens()])
    out = tmp_path / "stored-out"
    same_values(out, tmp_path / "plain-out")
    assert hessquant.inspect(out).faults == ()
    assert "weight_block_size" not in (out / "config.json").read_text()
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    opened = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        theirs = opened(input_ids=tokens(2)).logits
        ours = load_model(resolve(str(out)))(input_ids=tokens(2)).logits
    assert torch.allclose(ours, theirs, atol=1e-3)
