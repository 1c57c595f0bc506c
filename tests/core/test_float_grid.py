"""Grids of 4-bit floats: which values there are, and which scales."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import random_layer, swept

import hessquant
from hessquant.config import Config
from hessquant.core.factor import factorize
from hessquant.core.grid import (
    E2M1,
    FLOAT_GRIDS,
    Grid,
    QuantizedWeight,
    count_degenerate,
    decode,
    encode,
    evened,
    min_max,
    scale_factors,
    smallest_scale,
    storable,
    with_global_scale,
)
from hessquant.core.objective import expected_sweep_loss, loss, order_free_floor
from hessquant.errors import ConfigError

NV, MX = FLOAT_GRIDS["nvfp4"], FLOAT_GRIDS["mxfp4"]
VALUES = torch.tensor([*(-value for value in E2M1[:0:-1]), *E2M1], dtype=torch.float64)


def fitted(weight, spec):
    return min_max(weight, with_global_scale(spec, float(weight.abs().max())))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([NV, MX]), st.integers(0, 999), st.sampled_from([1e-30, 1e-4, 1.0, 1e5, 1e30]))
def test_every_weight_becomes_the_nearest_value(spec, seed, size):
    weight = size * random_layer(3, 64, seed)[0]
    grid = fitted(weight, spec)
    scales = grid.scales.double().repeat_interleave(spec.group_size, 1)
    nearest = (weight.unsqueeze(-1) - scales.unsqueeze(-1) * VALUES).abs().amin(-1)
    found = decode(encode(weight, grid), grid, torch.float64)
    assert torch.equal((weight - found).abs(), nearest)
    # What is decoded in float32, and in bfloat16 by clients, is the same.
    assert torch.equal(decode(encode(weight, grid), grid).double(), found)
    if size < 1e30:
        assert torch.equal(found.bfloat16().double(), found)


@pytest.mark.parametrize("spec", [NV, MX])
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e-3, 1.0, 1e4, 3e38])
def test_scales_are_normal_numbers_of_their_dtype_whatever_the_weights_are(spec, size):
    weight = size * torch.linspace(-1, 1, 4 * 64, dtype=torch.float64).float().view(4, 64)
    weight[2, :32] = 0
    grid = fitted(weight, spec)
    stored = grid.scales * grid.spec.global_scale
    dtype = getattr(torch, spec.scale_dtype)
    assert torch.equal(stored.to(dtype).float(), stored)
    assert (stored >= torch.finfo(dtype).smallest_normal).all()
    assert (stored <= torch.finfo(dtype).max).all()
    assert (grid.scales >= torch.finfo(torch.float32).smallest_normal).all()
    assert math.log2(grid.spec.global_scale) % 1 == 0
    assert (grid.zeros == 8).all()
    assert not decode(encode(weight, grid), grid)[2, :32].any()
    if 1e-30 < size < 1e30:
        # Nothing is cut off by more than the rounding of a scale.
        assert decode(encode(weight, grid), grid).abs().max() >= 0.75 * size


def test_a_group_far_below_the_largest_weight_has_the_smallest_normal_scale_and_is_counted():
    weight = torch.ones(1, 32)
    weight[0, 16:] = 1e-7
    spec = with_global_scale(NV, 1.0)
    assert min_max(weight, spec).scales[0, 1] == 2**-6 / spec.global_scale
    assert count_degenerate(weight, spec) == (0, 1)
    weight[0, 16:] = 0
    assert count_degenerate(weight, spec) == (1, 0)
    assert smallest_scale(torch.float8_e4m3fn) < 2**-6


@pytest.mark.parametrize(
    ("largest", "scale"), [(3.49, 0.5), (3.5, 1.0), (4.0, 1.0), (6.99, 1.0), (7.0, 2.0), (12, 2.0)]
)
def test_a_power_of_two_is_the_one_whose_grid_the_largest_weight_is_on(largest, scale):
    # As compressed-tensors has it: 7 is where 6 ends and 8 would begin.
    weight = torch.zeros(1, 32)
    weight[0, 3] = -largest
    assert min_max(weight, MX).scales.tolist() == [[scale]]


def test_the_scale_search_tries_every_number_of_e4m3_within_its_range():
    spec = replace(NV, global_scale=64.0)
    every = torch.arange(0x78, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 64
    for span in (1.0, 1.07, 1.33, 1.9):
        tried = {float(storable(torch.tensor(span * factor), spec)) for factor in scale_factors(spec)}
        assert {float(scale) for scale in every[(every >= 0.4 * span) & (every <= 1.5 * span)]} <= tried
        assert len(tried) <= len(scale_factors(spec))
    assert scale_factors(spec)[0] == scale_factors(MX)[0] == 1.0


def test_a_grid_without_a_global_scale_gets_none():
    assert with_global_scale(MX, 5.0) is MX
    assert with_global_scale(NV, 0.0) is NV


@pytest.mark.parametrize("spec", [NV, MX])
def test_the_sweep_loses_about_what_theory_expects_of_steps_that_differ(spec):
    weight, hessian = random_layer(400, 64, seed=7)
    # Steps are coarse: only where compensation moves weights little is nothing cut off, as the model assumes.
    hessian += 3 * hessian.diagonal().mean() * torch.eye(64)
    fit = fitted(weight, spec)
    grid = Grid(fit.spec, 2 * fit.scales, fit.zeros)
    factor = factorize(hessian, damping=0.0, order="activation", group_width=spec.group_size)
    codes = swept(weight, hessian, grid.spec, order="activation", damping=0.0, grid=grid)
    found = loss(weight - decode(codes, grid, torch.float64), hessian)
    even = evened(QuantizedWeight(codes, grid))
    assert found == pytest.approx(float(expected_sweep_loss(even, factor)), rel=0.2)
    assert abs(found - expected_sweep_loss(grid, factor)) > 0.3 * found
    assert order_free_floor(even, factor) <= expected_sweep_loss(even, factor)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    "settings", [{}, {"refinement_rounds": 2}, {"scales": "dynamic", "order": "group"}, {"order": "natural"}], ids=str
)
def test_a_whole_solution_is_better_than_rounding_and_on_the_grid(name, settings):
    weight, hessian = random_layer(24, 96, seed=11)
    solution = hessquant.solve(weight, hessian, Config(format=name, **settings))
    spec = solution.weight.grid.spec
    assert replace(spec, global_scale=1.0) == FLOAT_GRIDS[name]
    assert solution.loss < 0.75 * solution.rtn_loss
    stored = solution.weight.grid.scales * spec.global_scale
    assert torch.equal(stored.to(getattr(torch, spec.scale_dtype)).float(), stored)
    assert solution.weight.codes.min() >= 1
    assert solution.loss == pytest.approx(loss(weight - solution.weight.dequantize(torch.float64), hessian))


@pytest.mark.parametrize(
    "settings",
    [{"bits": 8}, {"symmetric": False}, {"group_size": 32}, {"group_size": -1}, {"bits": 3, "group_size": 16}],
    ids=str,
)
def test_settings_that_the_format_has_no_place_for_are_refused(settings):
    with pytest.raises(ConfigError, match="the format nvfp4 holds 4-bit floats in groups of 16 without zeros"):
        Config(format="nvfp4", **settings)
    assert Config(format="nvfp4", group_size=16).format == "nvfp4"
