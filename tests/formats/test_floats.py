"""The formats of 4-bit floats: their bytes, their config, and what is wrong with others'."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.test_gptq_config import make_plan
from tests.plans import quantize

from hessquant.config import Config
from hessquant.core.grid import E2M1, FLOAT_GRIDS, Grid, QuantizedWeight, with_global_scale
from hessquant.errors import CheckpointError, SourceError
from hessquant.formats import DIALECTS, OUTPUTS, dialect_of
from hessquant.formats.described import description_of
from hessquant.formats.dialect import layout_of
from hessquant.records import GridSpec

NAMES = sorted(FLOAT_GRIDS)


def random_weight(name, rows, columns, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(rows, columns, generator=generator)
    return quantize(weight, with_global_scale(FLOAT_GRIDS[name], float(weight.abs().max())))


def packed(name, weight):
    return DIALECTS[name].pack(weight, f"{name}-pack-quantized")


def unpacked(name, parts):
    return DIALECTS[name].unpack(parts, FLOAT_GRIDS[name], f"{name}-pack-quantized")


def by_the_definition(name, parts):
    """Values of a weight's parts, number by number, from the formats' own definitions; float64."""
    codes, scales = parts["weight_packed"].numpy(), parts["weight_scale"].view(torch.uint8).numpy()
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    group = columns // scales.shape[1]
    values = np.empty((rows, columns))
    for row in range(rows):
        for column in range(columns):
            number = codes[row, column // 2] >> (4 if column % 2 else 0) & 15
            exponent, mantissa = number >> 1 & 3, number & 1
            size = (1 + mantissa / 2) * 2.0 ** (int(exponent) - 1) if exponent else mantissa / 2
            scale = int(scales[row, column // group])
            if name == "mxfp4":
                by = 2.0 ** (scale - 127)
            else:
                by = (1 + (scale & 7) / 8) * 2.0 ** ((scale >> 3) - 7) if scale >> 3 else (scale & 7) * 2.0**-9
                by /= float(parts["weight_global_scale"])
            values[row, column] = (-size if number >> 3 else size) * by
    return torch.from_numpy(values)


def test_numbers_are_packed_to_the_golden_bytes():
    # Ranks 0 .. 7, then -1 .. -7 and 0: two to a byte, the first in the low bits, the sign above.
    codes = torch.tensor([[*range(8, 16), *range(7, 0, -1), 8]], dtype=torch.uint8)
    spec = dataclasses.replace(FLOAT_GRIDS["nvfp4"], global_scale=4.0)
    grid = Grid(spec, torch.tensor([[0.40625]]), torch.full((1, 1), 8, dtype=torch.uint8))
    parts = packed("nvfp4", QuantizedWeight(codes, grid))
    assert parts["weight_packed"].tolist() == [[0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F]]
    # 0.40625 * 4 = 1.625 = (1 + 5/8) * 2^(7 - 7).
    assert parts["weight_scale"].view(torch.uint8).tolist() == [[7 << 3 | 5]]
    assert parts["weight_global_scale"].tolist() == [4.0]
    assert by_the_definition("nvfp4", parts).tolist() == [
        [*(0.40625 * value for value in E2M1), *(-0.40625 * value for value in E2M1[1:]), 0.0]
    ]


def test_powers_of_two_are_packed_as_their_exponents():
    codes = torch.full((1, 64), 15, dtype=torch.uint8)
    grid = Grid(FLOAT_GRIDS["mxfp4"], torch.tensor([[0.125, 4.0]]), torch.full((1, 2), 8, dtype=torch.uint8))
    parts = packed("mxfp4", QuantizedWeight(codes, grid))
    assert parts["weight_scale"].tolist() == [[124, 129]]
    assert set(parts["weight_packed"].flatten().tolist()) == {0x77}


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(NAMES),
    st.sampled_from([(1, 32), (5, 64), (8, 96)]),
    st.integers(0, 999),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e20]),
)
def test_what_is_packed_is_what_was_solved_by_the_definition_and_by_our_decoder(name, shape, seed, size):
    weight = random_weight(name, *shape, seed, size)
    parts = packed(name, weight)
    assert torch.equal(by_the_definition(name, parts), weight.dequantize(torch.float64))
    again = unpacked(name, parts)
    assert again.grid.spec == weight.grid.spec
    for one, other in ((again.codes, weight.codes), (again.grid.scales, weight.grid.scales)):
        assert torch.equal(one, other)
    assert layout_of(parts) == DIALECTS[name].layout(*shape, FLOAT_GRIDS[name])
    held = sum(part.numel() * part.itemsize for part in parts.values())
    assert held == DIALECTS[name].packed_bytes(*shape, FLOAT_GRIDS[name])


@pytest.mark.parametrize("name", NAMES)
def test_compressed_tensors_packs_the_same_values_to_the_same_bytes_and_decodes_them(name):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    weight = random_weight(name, 16, 128, seed=4)
    parts, spec = packed(name, weight), weight.grid.spec
    group = described(name)["config_groups"]["group_0"]
    scheme = QuantizationScheme.model_validate({key: value for key, value in group.items() if key != "format"})
    theirs = BaseCompressor.get_value_from_registry(f"{name}-pack-quantized")
    values = weight.dequantize()
    given = {"weight": values, "weight_scale": weight.grid.scales * spec.global_scale}
    if name == "nvfp4":
        given["weight_global_scale"] = parts["weight_global_scale"]
    compressed = theirs.compress(given, scheme)
    assert torch.equal(compressed["weight_scale"].view(torch.uint8), parts["weight_scale"].view(torch.uint8))
    assert torch.equal(compressed["weight_packed"], parts["weight_packed"])
    decoded = theirs.decompress(dict(parts), scheme)["weight"]
    assert torch.equal(decoded.float(), values)


def test_scales_and_codes_without_a_place_are_refused():
    weight = random_weight("nvfp4", 4, 32)
    spec, scales, zeros = weight.grid.spec, weight.grid.scales, weight.grid.zeros
    for name, grid, codes, complaint in (
        ("nvfp4", Grid(spec, 1.01 * scales, zeros), weight.codes, "are not exact in nvfp4"),
        ("nvfp4", Grid(spec, scales, zeros + 1), weight.codes, "stands for no number"),
        ("nvfp4", weight.grid, torch.zeros_like(weight.codes), "stands for no number"),
        ("mxfp4", weight.grid, weight.codes, "holds symmetric 4-bit float, E8M0 scales, group size 32"),
    ):
        with pytest.raises(CheckpointError, match=complaint):
            packed(name, QuantizedWeight(codes, grid))


@pytest.mark.parametrize("name", NAMES)
def test_only_weights_on_its_own_grid_have_a_form(name):
    fault, grid = OUTPUTS[name].target_fault, FLOAT_GRIDS[name]
    assert fault(8, 64, grid) is None
    assert fault(8, 64, dataclasses.replace(grid, global_scale=1.0)) is None
    for other in (GridSpec(4, 32), dataclasses.replace(grid, bits=8), dataclasses.replace(grid, group_size=64)):
        assert f"the {name} format holds {grid}, not {other}" in fault(8, 64, other)
    assert "does not divide 72 inputs" in fault(8, 72, grid)
    for output in ("gptq", "compressed-tensors", "gguf"):
        assert f"not {grid}; quantize anew" in OUTPUTS[output].target_fault(8, 64, grid)


def described(name, plan=None, order="activation"):
    grid = FLOAT_GRIDS[name]
    plan = plan or make_plan()
    targets = tuple(dataclasses.replace(target, grid=grid) for target in plan.targets)
    description = description_of(dataclasses.replace(plan, targets=targets))
    return DIALECTS[name].describe(description, Config(format=name, order=order), f"{name}-pack-quantized", "0.1.0")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvfp4", {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}),
        ("mxfp4", {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    ],
)
def test_the_config_is_the_documented_one_and_is_read_back(name, expected):
    config = json.loads(json.dumps(described(name)))
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", f"{name}-pack-quantized")
    (group,) = config["config_groups"].values()
    stated = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "actorder": "static", **expected}
    assert stated.items() <= group["weights"].items()
    assert group["targets"] == ["Linear"]
    assert group["input_activations"] is None
    assert dialect_of(config) is DIALECTS[name]
    read = DIALECTS[name].read_settings(config)
    assert read.variant == f"{name}-pack-quantized"
    assert read.module("model.layers.0.mlp.up_proj") == FLOAT_GRIDS[name]
    assert read.module("lm_head") is None
    assert described(name, order="natural")["config_groups"]["group_0"]["weights"]["actorder"] is None


def test_what_is_stated_of_groups_only_says_the_dialect_too():
    config = described("mxfp4")
    for stated in (None, "mixed-precision"):
        assert dialect_of({**config, "format": stated}) is DIALECTS["mxfp4"]
    for broken in ([], "x", {"group_0": 3}):
        assert dialect_of({**config, "format": None, "config_groups": broken}) is DIALECTS["compressed-tensors"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"type": "int"}, "type is 'int'; in nvfp4-pack-quantized it can only be 'float'"),
        ({"num_bits": 8}, "num_bits is 8"),
        ({"group_size": 32}, "group_size is 32"),
        ({"strategy": "group"}, "strategy is 'group'"),
        ({"symmetric": False}, "symmetric is False"),
        ({"actorder": "group"}, "permutation"),
    ],
)
def test_configs_that_cannot_be_followed_are_refused(change, complaint):
    config = described("nvfp4")
    config["config_groups"]["group_0"]["weights"].update(change)
    with pytest.raises(SourceError, match=complaint):
        DIALECTS["nvfp4"].read_settings(config)


def test_groups_in_several_formats_are_refused():
    config = described("nvfp4")
    config["config_groups"]["group_1"] = described("mxfp4")["config_groups"]["group_0"]
    with pytest.raises(SourceError, match="group_1: format is 'mxfp4-pack-quantized'; only nvfp4-pack-quantized"):
        dialect_of(config).read_settings(config)


def test_another_tools_global_scale_and_negative_zeros_are_read():
    parts = packed("nvfp4", random_weight("nvfp4", 4, 32))
    parts["weight_global_scale"] = torch.tensor([1234.567])
    parts["weight_packed"][0, 0] = 0x88
    weight = unpacked("nvfp4", parts)
    assert weight.codes[0, :2].tolist() == [8, 8]
    torch.testing.assert_close(weight.dequantize(torch.float64), by_the_definition("nvfp4", parts), rtol=1e-6, atol=0)
    # And written again as they are.
    again = packed("nvfp4", weight)
    assert torch.equal(again["weight_global_scale"], parts["weight_global_scale"])
    assert torch.equal(again["weight_scale"].view(torch.uint8), parts["weight_scale"].view(torch.uint8))


@pytest.mark.parametrize(
    ("part", "replacement", "complaint"),
    [
        ("weight_packed", None, "weight_packed is missing"),
        ("weight_global_scale", None, "weight_global_scale is missing"),
        ("weight_packed", torch.zeros(4, 16, dtype=torch.int32), "weight_packed is I32"),
        ("weight_packed", torch.zeros(4, 20, dtype=torch.uint8), "weight_scale is"),
        ("weight_scale", torch.zeros(4, 2), "weight_scale is F32"),
        ("weight_scale", torch.zeros(4, 3, dtype=torch.float8_e4m3fn), "weight_scale is"),
        ("weight_global_scale", torch.ones(2), "weight_global_scale is"),
        ("weight_global_scale", torch.tensor(1.0), "weight_global_scale is"),
    ],
)
def test_malformed_parts_are_refused_by_name(part, replacement, complaint):
    parts = packed("nvfp4", random_weight("nvfp4", 4, 32))
    parts.pop(part) if replacement is None else parts.update({part: replacement})
    with pytest.raises(CheckpointError, match=complaint):
        unpacked("nvfp4", parts)


def test_columns_that_are_no_whole_number_of_groups_are_refused():
    parts = packed("nvfp4", random_weight("nvfp4", 4, 32))
    parts["weight_packed"] = parts["weight_packed"][:, :12]
    with pytest.raises(CheckpointError, match="group size 16 does not divide 24 inputs"):
        unpacked("nvfp4", parts)
    assert "vLLM cannot open" in next(DIALECTS["nvfp4"].value_faults(parts, FLOAT_GRIDS["nvfp4"], ""))


def test_scales_that_are_none_are_found():
    parts = packed("nvfp4", random_weight("nvfp4", 4, 32))
    raw = parts["weight_scale"].view(torch.uint8)
    raw[0, 0], raw[1, 1], raw[2, 0] = 0, 0x7F, 0x88
    parts["weight_global_scale"][0] = 0
    faults = list(DIALECTS["nvfp4"].value_faults(parts, FLOAT_GRIDS["nvfp4"], ""))
    assert [fault.split(" values")[0] for fault in faults] == ["weight_scale has 3", "weight_global_scale has 1"]
    parts = packed("mxfp4", random_weight("mxfp4", 4, 32))
    parts["weight_scale"][0, 0] = 255
    (fault,) = DIALECTS["mxfp4"].value_faults(parts, FLOAT_GRIDS["mxfp4"], "")
    assert fault == "weight_scale has 1 values that are not finite and positive"
