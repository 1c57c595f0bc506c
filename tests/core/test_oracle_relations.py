"""The relations of DESIGN section 2, on correlated Hessians, in float64, by hypothesis."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import ORDERS, layers, loss_of, random_layer, swept

from hessquant.core.factor import factorize
from hessquant.core.gptq import sweep
from hessquant.core.grid import Grid, QuantizedWeight, decode, encode, min_max
from hessquant.core.obq import damped, gptq_reference, obq
from hessquant.errors import NonFiniteError
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
    codes = swept(weight, hessian, spec)
    assert torch.equal(obq(weight, hessian, grid, rule="natural"), codes)
    assert torch.equal(gptq_reference(weight, hessian, grid), codes)


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


def obq_from_scratch(weight, hessian, grid, rule, outliers_first):
    """OBQ without its recurrences: the free weights of least loss, given those that are rounded, anew each time."""
    codes, columns, hessian = torch.zeros(weight.shape, dtype=torch.uint8), weight.shape[1], damped(hessian, 0.01)
    for row, original in enumerate(weight):
        one = Grid(grid.spec, grid.scales[[row]], grid.zeros[[row]])
        # The widest step of E2M1 is between 4 and 6.
        widest = 2.0 if grid.spec.is_float else 1.0
        steps = widest * grid.scales[row].double().repeat_interleave(grid.spec.width(columns))
        free, value = list(range(columns)), original.clone()
        while free:
            fixed = [column for column in range(columns) if column not in free]
            inverse = torch.linalg.inv(hessian[free][:, free])
            value[free] = original[free] + inverse @ hessian[free][:, fixed] @ (original - value)[fixed]
            rounded = encode(value[None], one)
            error = (value - decode(rounded, one, torch.float64)[0])[free]
            excess = error.abs() / steps[free]
            cost = {
                "natural": torch.arange(len(free)),
                "largest-sensitivity": inverse.diagonal(),
                "smallest-error": error**2 / inverse.diagonal(),
            }[rule]
            outlier = outliers_first and excess.max() > 0.5 + 1e-6
            column = free.pop(int(excess.argmax() if outlier else cost.argmin()))
            codes[row, column] = rounded[0, column]
            value[column] = decode(rounded, one, torch.float64)[0, column]
    return codes


@relation
@given(layers(max_columns=12), st.sampled_from(["smallest-error", "natural", "largest-sensitivity"]), st.booleans())
def test_obq_takes_one_weight_after_another_by_its_rule_and_solves_for_the_rest(layer, rule, outliers_first):
    weight, hessian, spec = layer
    # Half the range, so that there are outliers.
    grid = min_max(weight, spec)
    grid = Grid(spec, grid.scales / 2, grid.zeros)
    expected = obq_from_scratch(weight, hessian, grid, rule, outliers_first)
    assert torch.equal(obq(weight, hessian, grid, rule=rule, outliers_first=outliers_first), expected)


def test_a_weight_halfway_between_two_values_is_no_outlier():
    weight = torch.tensor([[0.1, 0.25]], dtype=torch.float64)
    hessian = torch.tensor([[2.0, 1.9], [1.9, 2.0]], dtype=torch.float64)
    grid = Grid(GridSpec(3, scale_dtype="float64"), torch.tensor([[0.5]], dtype=torch.float64), torch.tensor([[4]]))
    codes = obq(weight, hessian, grid, rule="natural", damping=0.0, outliers_first=True)
    assert (codes - grid.zeros).tolist() == [[0, 1]]


@pytest.mark.parametrize("oracle", [gptq_reference, obq])
def test_the_oracles_refuse_what_is_not_finite_and_leave_their_inputs_as_they_were(oracle):
    weight, hessian = random_layer(3, 8, seed=5)
    hessian[:, 2] = hessian[2] = 0
    before, grid = (weight.clone(), hessian.clone()), min_max(weight, GridSpec(bits=4))
    oracle(weight, hessian, grid)
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])
    hessian[1, 1] = float("inf")
    with pytest.raises(NonFiniteError, match="Hessian"):
        oracle(weight, hessian, grid)


def test_a_hessian_of_zeros_is_damped_to_a_multiple_of_the_identity():
    assert torch.equal(damped(torch.zeros(3, 3), 0.5), 1.5 * torch.eye(3, dtype=torch.float64))


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
