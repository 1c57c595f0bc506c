import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.test_gptq_config import make_plan
from tests.formats.test_gptq_tensors import random_weight, read_stream, stated, stated_by

from hessquant.config import Config
from hessquant.core.grid import Grid, QuantizedWeight
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats import DIALECTS, dialect_of
from hessquant.formats.described import description_of
from hessquant.formats.dialect import layout_of
from hessquant.records import GridSpec

ct = DIALECTS["compressed-tensors"]
read_settings, (VARIANT,) = ct.read_settings, ct.variants


def test_codes_pack_along_the_inputs_to_the_golden_words():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16)
    grid = Grid(GridSpec(4), torch.ones(1, 1, dtype=torch.float16), torch.full((1, 1), 8, dtype=torch.uint8))
    packed = ct.pack(QuantizedWeight(codes, grid), VARIANT)["weight_packed"]
    # Signed -8 .. 7 with 8 added: the first code in the lowest bits.
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == [0x76543210, 0xFEDCBA98]


def test_zeros_pack_along_the_outputs_to_the_golden_words():
    zeros = torch.arange(8, dtype=torch.uint8).view(8, 1)
    grid = Grid(GridSpec(4, symmetric=False), torch.ones(8, 1, dtype=torch.float16), zeros)
    packed = ct.pack(QuantizedWeight(torch.zeros(8, 8, dtype=torch.uint8), grid), VARIANT)["weight_zero_point"]
    assert packed.shape == (1, 1)
    assert packed.item() == 0x76543210


def test_parts_have_the_documented_names_dtypes_and_shapes():
    parts = ct.pack(random_weight(16, 64, 4, group_size=16, symmetric=False), VARIANT)
    assert {name: (part.dtype, tuple(part.shape)) for name, part in parts.items()} == {
        "weight_packed": (torch.int32, (16, 8)),
        "weight_scale": (torch.float16, (16, 4)),
        "weight_zero_point": (torch.int32, (2, 4)),
        "weight_shape": (torch.int64, (2,)),
    }
    assert parts["weight_shape"].tolist() == [16, 64]
    assert ct.layout(16, 64, stated(4, 16, False)) == layout_of(parts)
    assert "weight_zero_point" not in ct.pack(random_weight(16, 64, 4), VARIANT)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from(ct.widths),
    symmetric=st.booleans(),
    group_size=st.sampled_from([-1, 8, 16, 32]),
    shape=st.sampled_from([(8, 32), (16, 96), (64, 32)]),
    seed=st.integers(0, 1000),
)
def test_what_is_packed_is_what_is_decoded(bits, symmetric, group_size, shape, seed):
    weight = random_weight(*shape, bits, group_size, symmetric, seed)
    parts = ct.pack(weight, VARIANT)
    assert ct.layout_fault(layout_of(parts), stated_by(weight)) is None
    assert list(ct.value_faults(parts, stated_by(weight), VARIANT)) == []
    read = ct.unpack(parts, stated_by(weight), VARIANT)
    assert torch.equal(read.codes, weight.codes)
    assert torch.equal(read.grid.zeros, weight.grid.zeros)
    assert torch.equal(read.grid.scales, weight.grid.scales)
    assert torch.equal(ct.dequantize(parts, stated_by(weight), VARIANT), weight.dequantize())
    row = seed % shape[0]
    assert read_stream(parts["weight_packed"][row].tolist(), bits) == weight.codes[row].tolist()
    if not symmetric:
        assert read_stream(parts["weight_zero_point"][:, 0].tolist(), bits) == weight.grid.zeros[:, 0].tolist()


@pytest.mark.parametrize(
    ("rows", "columns", "settings", "complaint"),
    [
        (5, 64, stated(4, 32), None),
        (8, 64, stated(4, 32, False), None),
        (5, 64, stated(4, 32, False), "zeros of 5 outputs of 4 bits"),
        (8, 64, stated(3, 32), "no readers for 3 bits"),
        (8, 36, stated(4), "36 inputs of 4 bits"),
        (8, 96, stated(4, 64), "group size 64 does not divide 96 inputs"),
    ],
)
def test_shapes_without_a_place_in_the_format_are_named(rows, columns, settings, complaint):
    fault = ct.target_fault(rows, columns, settings)
    assert fault is None if complaint is None else complaint in fault
    if complaint is not None and columns % settings.groups(columns) == 0 and "divide" not in complaint:
        weight = random_weight(rows, columns, settings.bits, settings.group_size, settings.symmetric)
        with pytest.raises(CheckpointError, match=complaint):
            ct.pack(weight, VARIANT)


@pytest.mark.parametrize(
    ("part", "replacement", "complaint"),
    [
        ("weight_scale", None, "weight_scale is missing"),
        ("weight_zero_point", None, "weight_zero_point is missing"),
        ("weight_packed", torch.zeros(16, 8, dtype=torch.int64), "weight_packed is"),
        ("weight_scale", torch.zeros(16, 3), "weight_scale is"),
        ("weight_zero_point", torch.zeros(3, 4, dtype=torch.int32), "weight_zero_point is"),
        ("weight_shape", torch.tensor([16, 65]), "weight_shape says"),
        ("weight_shape", torch.tensor([15, 64]), "weight_shape says"),
        ("weight_shape", torch.tensor([16, 56]), "weight_shape says"),
    ],
)
def test_malformed_parts_are_refused_by_name(part, replacement, complaint):
    parts = ct.pack(random_weight(16, 64, 4, group_size=16, symmetric=False), VARIANT)
    if replacement is None:
        del parts[part]
    else:
        parts[part] = replacement
    with pytest.raises(CheckpointError, match=complaint):
        ct.dequantize(parts, stated(4, 16, False), VARIANT)


def test_values_that_no_server_can_use_are_found():
    parts = ct.pack(random_weight(16, 64, 4, group_size=16), VARIANT)
    parts["weight_scale"][0, 0], parts["weight_scale"][1, 1] = -1, torch.nan
    parts["weight_zero_point"] = torch.zeros(2, 4, dtype=torch.int32)
    found = list(ct.value_faults(parts, stated(4, 16), VARIANT))
    assert "weight_scale has 2 values" in found[0]
    assert "symmetric" in found[1]


def describe(plan, *others):
    return ct.describe(description_of(plan), *others)


def test_the_config_of_a_plain_plan_is_the_documented_one():
    described = describe(make_plan(), Config(group_size=32), VARIANT, "0.1.0")
    assert described["quant_method"] == "compressed-tensors"
    assert described["format"] == "pack-quantized"
    assert described["quantization_status"] == "compressed"
    assert described["ignore"] == ["lm_head"]
    assert list(described["config_groups"]) == ["group_0"]
    group = described["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["input_activations"] is group["output_activations"] is None
    assert group["weights"]["num_bits"] == 4
    assert group["weights"]["type"] == "int"
    assert group["weights"]["symmetric"] is True
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("group", 32)
    assert group["weights"]["actorder"] == "static"


def test_modules_left_alone_are_ignored_by_their_full_names():
    skipped = {"model.layers.0.mlp.down_proj"}
    described = describe(make_plan(skipped), Config(group_size=32), VARIANT, "0")
    assert described["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]
    read = read_settings(described)
    assert read.module("model.layers.0.mlp.down_proj") is None
    assert read.module("model.layers.1.mlp.down_proj") == GridSpec(4, 32, True)


def test_modules_with_settings_of_their_own_are_a_group_of_their_own():
    plan = make_plan()
    wide = "model.layers.1.mlp.down_proj.weight"
    targets = tuple(
        dataclasses.replace(target, grid=GridSpec(8)) if target.name == wide else target for target in plan.targets
    )
    described = describe(dataclasses.replace(plan, targets=targets), Config(), VARIANT, "0")
    assert [group["targets"] for group in described["config_groups"].values()] == [[wide[:-7]], ["Linear"]]
    read = read_settings(described)
    for target in targets:
        assert read.module(target.name[:-7]) == target.grid


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"config_groups": {}}, "no config_groups"),
        ({"format": "float-quantized"}, "only pack-quantized"),
        ({"weights": {"type": "float"}}, "not integers"),
        ({"weights": {"num_bits": 3}}, "num_bits is 3"),
        ({"weights": {"actorder": "group"}}, "permutation"),
        ({"weights": {"strategy": "block"}}, "strategy 'block'"),
        ({"input_activations": {"num_bits": 8}}, "activations are quantized too"),
        ({"targets": "Linear"}, "targets is not a list of names"),
        ({"targets": ["re:("]}, "not a regular expression"),
        ({"ignore": [3]}, "ignore is not a list of names"),
    ],
)
def test_configs_that_cannot_be_followed_are_refused(change, complaint):
    described = describe(make_plan(), Config(group_size=32), VARIANT, "0")
    group = described["config_groups"]["group_0"]
    for key, value in change.items():
        if key == "weights":
            group["weights"].update(value)
        elif key in ("config_groups", "ignore"):
            described[key] = value
        else:
            group[key] = value
    with pytest.raises(SourceError, match=complaint):
        read_settings(described)


def test_a_method_that_is_none_of_ours_is_named():
    assert dialect_of({"quant_method": "compressed-tensors"}) is DIALECTS["compressed-tensors"]
    with pytest.raises(SourceError, match="quant_method is 'awq'; only gptq, compressed-tensors"):
        dialect_of({"quant_method": "awq"})
