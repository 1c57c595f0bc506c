"""Scales that mean nothing, or nothing certain, are refused before any work; file and tensor are named."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stored.forms import E4M3, FLOAT8, bytes_of, decode_float8, floats_of, store_mxfp4
from tests.stored.models import gpt_oss
from tests.tiny import tokens

import hessquant
from hessquant.errors import SourceError
from hessquant.formats.float8 import read_form
from hessquant.formats.stored import scale_fault
from hessquant.models.source import resolve
from hessquant.pipeline import make_plan
from hessquant.planning import plan as planning
from hessquant.records import SourceForm, TensorInfo, Untouched

UP = "model.layers.1.mlp.up_proj.weight"
INV, SCALE = f"{UP}_scale_inv", f"{UP}_scale"
BLOCK, TENSOR, BYTES = "block", "per tensor", "block, ue8m0"


def is_projection(name):
    return name.endswith("_proj.weight")


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def pop(name):
    return lambda tensors: tensors.pop(name)


def with_value(name, value, place=2):
    def damage(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[place] = value

    return damage


def with_byte(name, byte, place=2):
    def damage(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name].view(torch.uint8).view(-1)[place] = byte

    return damage


def float8(*shape):
    return torch.ones(shape).to(torch.float8_e4m3fn)


HOSTILE = {
    "a scale is NaN": (BLOCK, with_value(INV, float("nan")), rf"{INV} holds 1 scales that are NaN.*\[1, 0\]"),
    "a scale is infinite": (BLOCK, with_value(INV, float("inf")), f"{INV} holds 1 scales"),
    "a scale is negative": (BLOCK, with_value(INV, -0.5), f"{INV} holds 1 scales"),
    "a byte of E8M0 is NaN": (BYTES, with_byte(INV, 255), f"{INV} holds 1 scales"),
    "a scale makes values infinite": (BLOCK, with_value(INV, 3e38), rf"tensor {UP} is -?inf at"),
    "a code is NaN": (BLOCK, with_byte(UP, 0x7F, 70), rf"tensor {UP} is nan at \[1, 6\]"),
    "a code is minus NaN": (BLOCK, with_byte(UP, 0xFF, 70), rf"tensor {UP} is nan at \[1, 6\]"),
    "a scale is missing": (BLOCK, pop(INV), f"{UP} is F8_E4M3, but there is no {INV}"),
    "scales are there twice": (BLOCK, put(SCALE, torch.ones(3, 2)), f"there is both {INV} and {SCALE}"),
    "a weight is missing": (BLOCK, pop(UP), f"{INV} is a scale without a weight: there is no {UP}"),
    "a weight is plain": (BLOCK, put(UP, torch.zeros(96, 64)), f"{INV} is a scale without a weight: {UP} is F32"),
    "scales of too few blocks": (BLOCK, put(INV, torch.ones(2, 2)), rf"{INV} is \[2, 2\], but \[3, 2\] goes with"),
    "scales turned": (BLOCK, put(INV, torch.ones(2, 3)), rf"{INV} is \[2, 3\], but \[3, 2\] goes with"),
    "a scale for all, where blocks are said": (BLOCK, put(INV, torch.ones(())), rf"{INV} is \[\], but \[3, 2\]"),
    "scales per output, where there is one": ("modelopt", put(SCALE, torch.ones(96, 1)), rf"{SCALE} is \[96, 1\], but"),
    "scales are integers": (BLOCK, put(INV, torch.ones(3, 2, dtype=torch.int32)), f"{INV} is I32; scales are F32"),
    "scales are bytes, and not said to be": (BLOCK, put(INV, torch.ones(3, 2, dtype=torch.uint8)), f"{INV} is U8"),
    "a weight is E5M2": (BLOCK, put(UP, torch.zeros(96, 64).to(torch.float8_e5m2)), f"{UP} is F8_E5M2, not F8_E4M3"),
    "a weight is of another shape": (
        TENSOR,
        put(UP, float8(64, 96)),
        rf"{UP} is \[64, 96\] in model.safetensors, but \[96, 64\] according to config.json",
    ),
    "a weight has zeros": (
        TENSOR,
        put(f"{UP}_zero_point", torch.zeros(1)),
        f"{UP}_zero_point goes with {UP}, which is F8_E4M3 and has a scale",
    ),
    "a norm is in FP8 by itself": (
        BLOCK,
        put("model.norm.weight", float8(64)),
        "model.norm.weight is F8_E4M3, but there is no",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_float8(fault, llama, tmp_path):
    kind, damage, message = HOSTILE[fault]
    stored = FLOAT8[kind].store(llama[0], is_projection)
    damage(stored.tensors)
    source, _ = stored.write(tmp_path, llama[1])
    with pytest.raises(SourceError, match=message) as refused:
        hessquant.quantize(str(source), tmp_path / "out", hessquant.Config(group_size=32), calibration=[tokens()])
    assert "model.safetensors" in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert hessquant.inspect(source).faults


EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
MXFP4 = {
    "a byte of E8M0 is NaN": (with_value(f"{EXPERTS}_scales", 255, 1), rf"{EXPERTS}_scales holds 1 .*\[0, 0, 1\]"),
    "scales are missing": (pop(f"{EXPERTS}_scales"), f"{EXPERTS}_blocks has no {EXPERTS}_scales"),
    "blocks are missing": (pop(f"{EXPERTS}_blocks"), f"{EXPERTS}_scales is a scale without a weight"),
    "scales of other groups": (
        put(f"{EXPERTS}_scales", torch.ones(2, 64, 1, dtype=torch.uint8)),
        rf"{EXPERTS}_scales is U8 \[2, 64, 1\], but U8 \[2, 64, 2\] goes with {EXPERTS}_blocks",
    ),
    "blocks of another rank": (
        put(f"{EXPERTS}_blocks", torch.ones(2, 64, 16, dtype=torch.uint8)),
        rf"{EXPERTS}_blocks is \[2, 64, 16\], not \[experts, outputs, groups, 16\]",
    ),
    "a weight is there twice": (put(EXPERTS, torch.zeros(2, 64, 64)), f"{EXPERTS} is there twice"),
}


@pytest.mark.parametrize("fault", MXFP4)
def test_mxfp4(fault, tiny, tmp_path):
    damage, message = MXFP4[fault]
    tensors, config = tiny(gpt_oss(2))
    stored = store_mxfp4(tensors, lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    damage(stored.tensors)
    source, _ = stored.write(tmp_path, config)
    with pytest.raises(SourceError, match=f"model.safetensors.*{message}"):
        hessquant.quantize(str(source), tmp_path / "out", hessquant.Config(group_size=16), calibration=[tokens()])
    assert not (tmp_path / "out").exists()


def groups(**kinds):
    weights = {
        "group": {"type": "float", "num_bits": 8, "strategy": "group"},
        "tensor": {"type": "float", "num_bits": 8, "strategy": "tensor"},
        "integers": {"type": "int", "num_bits": 4, "strategy": "group"},
    }
    made = {name: {"targets": ["Linear"], "weights": weights[kind]} for name, kind in kinds.items()}
    return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": made}


def fp8(block, **more):
    return {"quant_method": "fp8", "weight_block_size": block, **more}


CONFIGS = {
    "blocks of nothing": (fp8([0, 128]), "weight_block_size is [0, 128]"),
    "blocks of one number": (fp8([128]), "weight_block_size is [128]"),
    "blocks of words": (fp8("128x128"), "weight_block_size is '128x128'"),
    "another scale format": (fp8([40, 48], scale_fmt="e5"), "scale_fmt is 'e5'"),
    "ModelOpt's FP4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4'"),
    "a method nobody knows": ({"quant_method": "quark"}, "quantized already (quark"),
    "groups of FP8": (groups(a="group"), "strategy is 'group'"),
    "a mixture": (groups(a="tensor", b="integers"), "config_groups.b is no 8-bit float"),
    "MXFP4, where there is none": ({"quant_method": "mxfp4"}, "no tensor is stored as MXFP4"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_mean_nothing(case, llama, tmp_path):
    described, message = CONFIGS[case]
    stored = FLOAT8["block"].store(llama[0], is_projection)
    source, _ = stored.write(tmp_path, llama[1])
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": described}))
    with pytest.raises(SourceError, match=re.escape(message)):
        make_plan(str(source), calibration=[tokens()])


def test_a_scale_that_the_model_needs_is_not_dropped(llama, tmp_path):
    stored = FLOAT8["per tensor"].store(llama[0], is_projection)
    source, _ = stored.write(tmp_path, llama[1])
    form = SourceForm("FP8", dropped=(Untouched("model.norm.weight", (64,), "BF16", 128, "a scale"),))
    names = {name: TensorInfo(name, tuple(each.shape), "BF16", each.nbytes, "f") for name, each in llama[0].items()}
    with pytest.raises(SourceError, match=r"model\.norm\.weight is a scale of activations by its name, but the model"):
        planning.make_plan(resolve(str(source)), names, hessquant.Config(group_size=32), form=form)


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    block=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    data=st.data(),
)
def test_any_scales_are_refused_or_decoded_by_the_definition(rows, columns, block, data):
    shape = -(-rows // block[0]), -(-columns // block[1])
    drawn = data.draw(st.lists(FLOATS, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    scales = torch.from_numpy(np.array(drawn, np.float32)).reshape(shape)
    usable = all(np.isfinite(value) and value >= 0 for value in drawn)
    assert (scale_fault(scales) is None) == usable
    if not usable:
        return
    content = data.draw(st.binary(min_size=rows * columns, max_size=rows * columns))
    codes = torch.tensor(list(content), dtype=torch.uint8).reshape(rows, columns).view(torch.float8_e4m3fn)
    header = {
        "w": TensorInfo("w", (rows, columns), "F8_E4M3", rows * columns, ""),
        "w_scale_inv": TensorInfo("w_scale_inv", shape, "F32", 4, ""),
    }
    (weight,) = read_form(fp8(list(block))).weights(header)
    with np.errstate(all="ignore"):
        expected = decode_float8(codes, scales, block)
    decoded = weight.decode([codes, scales])
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded.nan_to_num(nan=7.25), expected.nan_to_num(nan=7.25))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_all_codes_at_all_powers_of_two(dtype):
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256).view(torch.float8_e4m3fn)
    header = {
        "w": TensorInfo("w", (1, 256), "F8_E4M3", 256, ""),
        "w_scale_inv": TensorInfo("w_scale_inv", (1, 1), "F8_E8M0", 1, ""),
    }
    (weight,) = read_form(fp8([1, 256], scale_fmt="ue8m0")).weights(header)
    for byte in range(255):
        scale = torch.tensor([[byte]], dtype=torch.uint8).view(dtype)
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(E4M3[bytes_of(codes)] * floats_of(scale))
        assert torch.equal(weight.decode([codes, scale]).nan_to_num(7.25), expected.nan_to_num(7.25))
