import torch
from hypothesis import given, settings
from tests.problems import layers, loss_of, random_layer, swept

from hessquant.core.grid import GridSpec, QuantizedWeight, encode, min_max
from hessquant.core.refine import descend_codes, descend_scales
from hessquant.kernels import twin


def start(weight, hessian, spec):
    return QuantizedWeight(swept(weight, hessian, spec), min_max(weight, spec))


def codes_after(weight, quantized, hessian, block_size=128):
    return descend_codes(weight, quantized, hessian, block_size=block_size, kernel=twin.sweep_block)


def row_losses(weight, quantized, hessian):
    error = weight - quantized.dequantize(torch.float64)
    return torch.einsum("ri,ij,rj->r", error, hessian, error)


@settings(max_examples=60, deadline=None)
@given(layers())
def test_no_row_gets_worse(layer):
    weight, hessian, spec = layer
    quantized = start(weight, hessian, spec)
    for step in (lambda q: descend_scales(weight, q, hessian), lambda q: codes_after(weight, q, hessian)):
        better = step(quantized)
        before, after = row_losses(weight, quantized, hessian), row_losses(weight, better, hessian)
        assert (after <= before * (1 + 1e-9) + 1e-12).all()
        quantized = better


@settings(max_examples=30, deadline=None)
@given(layers())
def test_the_block_size_changes_nothing(layer):
    weight, hessian, spec = layer
    quantized = start(weight, hessian, spec)
    whole = codes_after(weight, quantized, hessian).codes
    for block_size in (1, 3, 7):
        assert torch.equal(codes_after(weight, quantized, hessian, block_size).codes, whole)


@settings(max_examples=30, deadline=None)
@given(layers())
def test_codes_are_those_of_one_column_at_a_time_with_all_others_fixed(layer):
    weight, hessian, spec = layer
    quantized = start(weight, hessian, spec)
    grid, width = quantized.grid, spec.width(weight.shape[1])
    scales = grid.scales.double().repeat_interleave(width, 1)
    zeros = grid.zeros.double().repeat_interleave(width, 1)
    codes = quantized.codes.double()
    for j in range(weight.shape[1]):
        error = weight - scales * (codes - zeros)
        error[:, j] = 0
        target = weight[:, j] + error @ hessian[:, j] / hessian[j, j]
        codes[:, j] = (torch.round(target / scales[:, j]) + zeros[:, j]).clamp(0, spec.top)
    assert torch.equal(codes_after(weight, quantized, hessian).codes, codes.to(torch.uint8))


def test_a_scale_that_is_stored_exactly_is_the_least_squares_one():
    weight, hessian = random_layer(6, 24, seed=1)
    spec = GridSpec(bits=3, group_size=-1, scale_dtype=torch.float64)
    quantized = start(weight, hessian, spec)
    steps = quantized.codes.double() - spec.middle
    expected = torch.einsum("ri,ij,rj->r", steps, hessian, weight) / torch.einsum("ri,ij,rj->r", steps, hessian, steps)
    assert torch.allclose(descend_scales(weight, quantized, hessian).grid.scales[:, 0], expected)


def test_each_group_sees_the_new_scales_of_those_before_it():
    weight, hessian = random_layer(6, 24, seed=2)
    spec = GridSpec(bits=3, group_size=8, scale_dtype=torch.float64)
    found = start(weight, hessian, spec)
    for _ in range(400):
        found = descend_scales(weight, found, hessian)
    # Gauss-Seidel converges to the joint least-squares scales; a step that used stale errors would not.
    steps = (found.codes.double() - spec.middle).view(6, 3, 8)
    for row in range(6):
        basis = torch.block_diag(*steps[row]).double()
        joint = torch.linalg.solve(basis @ hessian @ basis.T, basis @ hessian @ weight[row])
        assert torch.allclose(found.grid.scales[row], joint, rtol=1e-6)


def test_both_together_gain_over_the_sweep():
    weight, hessian = random_layer(32, 64, seed=3)
    for bits in (3, 4):
        quantized = start(weight, hessian, GridSpec(bits=bits, group_size=16))
        before = loss_of(quantized.codes, weight, hessian, quantized.grid)
        for _ in range(2):
            quantized = codes_after(weight, descend_scales(weight, quantized, hessian), hessian)
        assert loss_of(quantized.codes, weight, hessian, quantized.grid) < 0.9 * before


def test_a_group_of_zeros_keeps_its_scale_and_stays_zero():
    weight, hessian = random_layer(4, 16, seed=4)
    weight[1, 4:8] = 0
    grid = min_max(weight, GridSpec(bits=4, group_size=4))
    nearest = QuantizedWeight(encode(weight, grid), grid)
    found = codes_after(weight, descend_scales(weight, nearest, hessian), hessian)
    assert found.grid.scales[1, 1] == grid.scales[1, 1]
    assert torch.isfinite(found.grid.scales).all()
    assert (found.grid.scales > 0).all()
    assert not found.dequantize()[1, 4:8].any()
