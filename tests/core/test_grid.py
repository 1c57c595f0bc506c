import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import layers

from hessquant.core.grid import (
    Grid,
    count_degenerate,
    decode,
    encode,
    min_max,
    scale_dtype,
    scale_factors,
    smallest_scale,
)
from hessquant.errors import GridError
from hessquant.records import GridSpec


@settings(max_examples=80, deadline=None)
@given(layers())
def test_encoding_takes_the_nearest_value_of_the_grid(layer):
    weight, _, spec = layer
    grid = min_max(weight, spec)
    levels = torch.arange(spec.top + 1, dtype=torch.uint8)
    error = (weight - decode(encode(weight, grid), grid, torch.float64)).abs()
    for level in levels:
        constant = torch.full(weight.shape, int(level), dtype=torch.uint8)
        assert (error <= (weight - decode(constant, grid, torch.float64)).abs() + 1e-12).all()


@settings(max_examples=80, deadline=None)
@given(layers())
def test_values_of_the_grid_encode_to_themselves(layer):
    weight, _, spec = layer
    grid = min_max(weight, spec)
    codes = encode(weight, grid)
    assert torch.equal(encode(decode(codes, grid, torch.float64), grid), codes)


@settings(max_examples=80, deadline=None)
@given(layers())
def test_scales_are_finite_positive_and_of_the_stored_dtype_and_zeros_are_codes(layer):
    weight, _, spec = layer
    grid = min_max(weight, spec)
    assert grid.scales.dtype == scale_dtype(spec)
    assert torch.isfinite(grid.scales).all()
    assert (grid.scales > 0).all()
    assert (grid.zeros <= spec.top).all()


@settings(max_examples=80, deadline=None)
@given(layers(floats=False), st.sampled_from([-1.0, 0.0, 1.0]))
def test_the_grid_reaches_from_the_least_weight_to_the_largest_and_holds_zero(layer, side):
    weight, _, spec = layer
    # As they are, or all of one sign.
    weight = weight if not side else side * weight.abs()
    groups = weight.view(len(weight), -1, spec.width(weight.shape[1]))
    grid = min_max(weight, spec)
    if spec.symmetric:
        step, zeros = 2 * groups.abs().amax(-1) / spec.top, torch.full_like(grid.scales, 2 ** (spec.bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        # A scale that is rounded down may put zero beyond the largest code.
        step, zeros = (high - low) / spec.top, (-low / grid.scales).round().clamp(max=spec.top)
    torch.testing.assert_close(grid.scales.double(), step, rtol=torch.finfo(grid.scales.dtype).eps, atol=2**-25)
    assert torch.equal(grid.zeros.double(), zeros.double())


def test_groups_of_zeros_dequantize_to_exact_zeros_and_tiny_ones_keep_a_positive_scale():
    # CASES A6.
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    weight[0:4] = 0
    weight[4:8] *= 1e-7
    weight[8, 32:64] = 0
    for symmetric in (True, False):
        spec = GridSpec(bits=4, symmetric=symmetric, group_size=32)
        grid = min_max(weight, spec)
        values = decode(encode(weight, grid), grid)
        assert (grid.scales > 0).all()
        assert torch.isfinite(grid.scales).all()
        assert torch.isfinite(values).all()
        assert not values[0:4].any()
        assert not values[8, 32:64].any()
        assert (values[4:8] - weight[4:8]).abs().max() <= weight[4:8].abs().max()
        zero_groups, tiny_groups = count_degenerate(weight, spec)
        assert (zero_groups, tiny_groups) == (17, 16)


def test_a_tiny_group_is_kept_where_float16_has_subnormal_scales():
    weight = torch.tensor([[3e-6, -1e-6, 2e-6, 0.0]])
    grid = min_max(weight, GridSpec(bits=4))
    assert grid.scales.item() < torch.finfo(torch.float16).smallest_normal
    assert (decode(encode(weight, grid), grid) - weight).abs().max() < 4e-7


def test_a_scale_that_overflows_float16_is_refused():
    with pytest.raises(GridError, match=r"does not fit torch\.float16.*1e\+06"):
        min_max(torch.tensor([[1e6, 0.0, 1.0, 0.0]]), GridSpec(bits=4, group_size=2))


def test_a_group_size_that_does_not_divide_is_refused():
    with pytest.raises(GridError, match="group size 128 does not divide 96 inputs"):
        min_max(torch.zeros(1, 96), GridSpec(group_size=128))


@given(st.integers(2, 8))
def test_a_symmetric_grid_holds_zero_and_uses_every_code(bits):
    spec = GridSpec(bits=bits)
    grid = Grid(spec, torch.ones(1, 1, dtype=torch.float16), torch.full((1, 1), spec.middle, dtype=torch.uint8))
    codes = torch.arange(spec.top + 1, dtype=torch.uint8).unsqueeze(0)
    values = decode(codes, grid)
    assert values.min() == -(2 ** (bits - 1))
    assert values.max() == 2 ** (bits - 1) - 1
    assert values[0, spec.middle] == 0


@given(st.integers(2, 8), st.floats(0.1, 100.0))
def test_one_scale_tried_on_a_symmetric_grid_holds_the_largest_weight_as_its_last_value(bits, largest):
    weight = torch.tensor([[largest, -largest / 3]], dtype=torch.float64)
    spec = GridSpec(bits=bits, scale_dtype="float32")
    errors = []
    for factor in scale_factors(spec):
        grid = min_max(weight * factor, spec)
        errors.append((weight - decode(encode(weight, grid), grid, torch.float64))[0, 0].abs().item())
    assert min(errors) < 1e-6 * largest
    assert errors[0] > 0.4 * largest / 2 ** (bits - 1)


def test_the_scales_tried_go_down_to_two_fifths_in_even_steps():
    factors = torch.tensor(scale_factors(GridSpec(bits=4, symmetric=False)), dtype=torch.float64)
    torch.testing.assert_close(factors, torch.linspace(1, 0.4, 25, dtype=torch.float64))


def test_smallest_scales_survive_float32_arithmetic():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.tensor(smallest_scale(dtype)).to(dtype).float().item() > 0


def test_groups_of_zeros_have_a_zero_that_every_format_can_store():
    grid = min_max(torch.zeros(1, 4), GridSpec(bits=4, symmetric=False, group_size=2))
    assert grid.zeros.tolist() == [[8, 8]]


def test_raised_scales_are_counted_by_the_range_of_the_group():
    weight = torch.tensor([[0.0, 5e-7]])
    assert count_degenerate(weight, GridSpec(bits=4, symmetric=False)) == (0, 1)
    assert count_degenerate(weight, GridSpec(bits=4, symmetric=True)) == (0, 0)


def test_a_scale_is_raised_only_below_the_smallest():
    spec = GridSpec(bits=4, symmetric=False)
    smallest = 15 * smallest_scale(torch.float16)
    assert count_degenerate(torch.tensor([[smallest]]), spec) == (0, 0)
    assert count_degenerate(torch.tensor([[smallest * (1 - 1e-6)]]), spec) == (0, 1)
