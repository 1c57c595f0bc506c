"""The relations of DESIGN section 2, on correlated Hessians, in float64, by hypothesis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import ORDERS, layers, loss_of, random_layer, swept

from hessquant.core.factor import factorize
from hessquant.core.gptq import sweep
from hessquant.core.grid import Grid, QuantizedWeight, encode, min_max
from hessquant.core.obq import damped, gptq_reference, obq
from hessquant.kernels import twin
from hessquant.records import GridSpec

relation = settings(max_examples=60, deadline=None)


@relation
@given(layers(), ORDERS)
def test_the_sweep_gives_the_integers_of_gptq_with_an_explicit_inverse(layer, order):
    weight, hessian, spec = layer
    grid = min_max(weight, spec)
    factor = factorize(hessian, damping=0.01, order=order, group_width=spec.width(weight.shape[1]))
    codes = sweep(weight, factor, grid, block_size=128, kernel=twin.sweep_block)
    assert torch.equal(codes, gptq_reference(weight, hessian, grid, order=factor.order))


@relation
@given(layers(), ORDERS, st.integers(1, 30))
def test_the_block_size_does_not_change_the_integers(layer, order, block_size):
    weight, hessian, spec = layer
    assert torch.equal(
        swept(weight, hessian, spec, order=order, block_size=block_size), swept(weight, hessian, spec, order=order)
    )


@relation
@given(layers(max_columns=12))
def test_obq_in_natural_order_gives_the_integers_of_gptq(layer):
    weight, hessian, spec = layer
    grid = min_max(weight, spec)
    assert torch.equal(obq(weight, hessian, grid, rule="natural"), swept(weight, hessian, spec))


@relation
@given(layers(), ORDERS, st.sampled_from([0.25, 1.0, 3.0]))
def test_a_multiple_of_the_identity_gives_round_to_nearest(layer, order, scale):
    weight, hessian, spec = layer
    identity = scale * torch.eye(len(hessian), dtype=torch.float64)
    assert torch.equal(swept(weight, identity, spec, order=order), encode(weight, min_max(weight, spec)))


@relation
@given(layers(), ORDERS, st.randoms(use_true_random=False))
def test_permuting_rows_permutes_codes(layer, order, random):
    weight, hessian, spec = layer
    rows = list(range(len(weight)))
    random.shuffle(rows)
    assert torch.equal(swept(weight[rows], hessian, spec, order=order), swept(weight, hessian, spec, order=order)[rows])


@relation
@given(layers(), ORDERS, st.integers(-20, 20))
def test_scaling_the_hessian_changes_nothing(layer, order, exponent):
    weight, hessian, spec = layer
    assert torch.equal(
        swept(weight, hessian * 2.0**exponent, spec, order=order), swept(weight, hessian, spec, order=order)
    )


def test_the_two_weight_example_holds_to_the_digit():
    weight = torch.tensor([[0.62, 0.30]], dtype=torch.float64)
    hessian = torch.tensor([[4.0, 2.0], [2.0, 3.0]], dtype=torch.float64)
    grid = Grid(GridSpec(3, scale_dtype="float64"), torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([[4]]))
    inverse = torch.linalg.inv(damped(hessian, 0.0))
    error = weight[0, 0] - 0.5
    delta = -error / inverse[0, 0] * inverse[0]
    assert delta.tolist() == pytest.approx([-0.12, 0.08])
    after_first = torch.tensor([[0.5, 0.38]], dtype=torch.float64)
    uncompensated = weight - torch.tensor([[0.5, 0.30]], dtype=torch.float64)
    compensated = weight - after_first
    assert (uncompensated @ hessian @ uncompensated.T).item() == pytest.approx(0.0576)
    assert (compensated @ hessian @ compensated.T).item() == pytest.approx(0.0384)
    codes = swept(weight, hessian, grid.spec, damping=0.0, grid=grid)
    assert (codes - grid.zeros).tolist() == [[1, 1]]


def test_the_selection_rules_of_obq_differ():
    weight, hessian = random_layer(4, 16, seed=1)
    grid = min_max(weight, GridSpec(bits=2))
    results = {
        rule: obq(weight, hessian, grid, rule=rule).tolist()
        for rule in ("smallest-error", "natural", "largest-sensitivity")
    }
    assert results["smallest-error"] != results["natural"] != results["largest-sensitivity"]


def test_the_outlier_rule_rounds_a_weight_out_of_range_first():
    # The second weight is far outside the grid: rounded first, its large error can go into the first one.
    weight = torch.tensor([[0.4, 3.0]], dtype=torch.float64)
    hessian = torch.tensor([[2.0, 1.9], [1.9, 2.0]], dtype=torch.float64)
    grid = Grid(GridSpec(3, scale_dtype="float64"), torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([[4]]))
    plain = obq(weight, hessian, grid, rule="natural", damping=0.0)
    with_rule = obq(weight, hessian, grid, rule="natural", damping=0.0, outliers_first=True)
    assert loss_of(with_rule, weight, hessian, grid) < loss_of(plain, weight, hessian, grid)


def test_obq_rounds_quantized_weights_to_themselves():
    weight, hessian = random_layer(3, 8, seed=5)
    grid = min_max(weight, GridSpec(bits=4, group_size=4))
    on_grid = QuantizedWeight(encode(weight, grid), grid)
    assert torch.equal(obq(on_grid.dequantize(torch.float64), hessian, grid), on_grid.codes)
