import pytest
import torch
from hypothesis import given, settings
from tests.problems import layers, random_layer, swept

from hessquant.core import refine
from hessquant.core.grid import Grid, QuantizedWeight, encode, min_max, nearest, steps, storable
from hessquant.core.refine import descend
from hessquant.kernels import twin
from hessquant.records import GridSpec


def start(weight, hessian, spec):
    return QuantizedWeight(swept(weight, hessian, spec), min_max(weight, spec))


def refined(weight, quantized, hessian, block_size=128):
    return descend(weight, quantized, hessian, block_size=block_size, kernel=twin.sweep_block)


def row_losses(weight, quantized, hessian):
    error = weight - quantized.dequantize(torch.float64)
    return torch.einsum("ri,ij,rj->r", error, hessian, error)


def literally(weight, quantized, hessian):
    """One group after another: its best scale by least squares, then its columns' best codes, all else fixed."""
    spec, columns = quantized.grid.spec, weight.shape[1]
    width = spec.width(columns)
    codes, zeros = quantized.codes.double(), quantized.grid.zeros.double().repeat_interleave(width, 1)
    scales = quantized.grid.scales.double()
    for first in range(0, columns, width):
        group = slice(first, first + width)
        taken = torch.zeros_like(codes)
        taken[:, group] = steps(codes.clone(), zeros, spec)[:, group]
        others = weight - scales.repeat_interleave(width, 1) * steps(codes.clone(), zeros, spec)
        others += scales[:, [first // width]] * taken
        slope = torch.einsum("ri,ij,rj->r", taken, hessian, others)
        curvature = torch.einsum("ri,ij,rj->r", taken, hessian, taken)
        for row in range(len(weight)):
            stored = storable(slope[row] / curvature[row], spec).double()
            before = scales[row, first // width]
            gain = (stored - before) * (2 * slope[row] - (stored + before) * curvature[row])
            if torch.isfinite(stored) and stored > 0 and gain > 0:
                scales[row, first // width] = stored
        for j in range(first, first + width):
            scale = scales[:, first // width]
            error = weight - scales.repeat_interleave(width, 1) * steps(codes.clone(), zeros, spec)
            error[:, j] = 0
            target = weight[:, j] + error @ hessian[:, j] / hessian[j, j]
            codes[:, j] = nearest(target / scale, zeros[:, j], spec)
    return codes.to(torch.uint8), scales


@settings(max_examples=60, deadline=None)
@given(layers())
def test_no_row_gets_worse(layer):
    weight, hessian, spec = layer
    quantized = start(weight, hessian, spec)
    for _ in range(2):
        better = refined(weight, quantized, hessian)
        before, after = row_losses(weight, quantized, hessian), row_losses(weight, better, hessian)
        assert (after <= before * (1 + 1e-9) + 1e-12).all()
        quantized = better


@settings(max_examples=30, deadline=None)
@given(layers())
def test_the_block_size_changes_nothing(layer):
    weight, hessian, spec = layer
    quantized = start(weight, hessian, spec)
    whole = refined(weight, quantized, hessian)
    for block_size in (1, 3, 7):
        found = refined(weight, quantized, hessian, block_size)
        assert torch.equal(found.codes, whole.codes)
        assert torch.equal(found.grid.scales, whole.grid.scales)


@pytest.mark.parametrize("group_size", [4, -1])
def test_strips_of_the_hessian_change_nothing(group_size, monkeypatch):
    weight, hessian = random_layer(6, 16, seed=8)
    quantized = start(weight, hessian, GridSpec(bits=3, group_size=group_size))
    whole = refined(weight, quantized, hessian, 8)
    monkeypatch.setattr(refine, "_STRIP", 3)
    found = refined(weight, quantized, hessian, 8)
    assert torch.equal(found.codes, whole.codes)
    assert torch.equal(found.grid.scales, whole.grid.scales)


@settings(max_examples=40, deadline=None)
@given(layers())
def test_a_round_is_one_group_and_one_column_at_a_time_with_all_else_fixed(layer):
    weight, hessian, spec = layer
    quantized = start(weight, hessian, spec)
    codes, scales = literally(weight, quantized, hessian)
    found = refined(weight, quantized, hessian)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.grid.scales.double(), scales)


@pytest.mark.parametrize("target", [-3.0, 1e-9, 1e6])
def test_a_best_scale_that_is_negative_or_cannot_be_stored_is_not_taken(target):
    # Codes that are nothing like the weights, whose best scale is the target.
    _, hessian = random_layer(1, 4, seed=6)
    spec = GridSpec(bits=4)
    codes = torch.tensor([[9, 11, 8, 14]], dtype=torch.uint8)
    quantized = QuantizedWeight(codes, Grid(spec, torch.ones(1, 1).half(), torch.full((1, 1), 8, dtype=torch.uint8)))
    weight = target * (codes - 8.0).double()
    assert refined(weight, quantized, hessian).grid.scales.item() == 1


@pytest.mark.parametrize(("rows", "group_size"), [(1, 4), (3, -1)])
def test_what_is_refined_is_left_as_it_was(rows, group_size):
    weight, hessian = random_layer(rows, 8, seed=7)
    quantized = start(weight, hessian, GridSpec(bits=3, group_size=group_size))
    codes, scales = quantized.codes.clone(), quantized.grid.scales.clone()
    found = refined(weight, quantized, hessian)
    assert not torch.equal(found.grid.scales, scales)
    assert torch.equal(quantized.codes, codes)
    assert torch.equal(quantized.grid.scales, scales)


def test_a_group_of_zeros_keeps_its_scale_and_stays_zero():
    weight, hessian = random_layer(4, 16, seed=4)
    weight[1, 4:8] = 0
    grid = min_max(weight, GridSpec(bits=4, group_size=4))
    nearest = QuantizedWeight(encode(weight, grid), grid)
    found = refined(weight, nearest, hessian)
    assert found.grid.scales[1, 1] == grid.scales[1, 1]
    assert torch.isfinite(found.grid.scales).all()
    assert (found.grid.scales > 0).all()
    assert not found.dequantize()[1, 4:8].any()
