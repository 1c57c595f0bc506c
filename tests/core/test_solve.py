from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from tests.problems import ORDERS, layers, loss_of, random_layer, swept

import hessquant
from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.factor import factorize
from hessquant.core.gptq import Kernels, sweep
from hessquant.core.grid import QuantizedWeight, encode, min_max, scale_factors
from hessquant.core.objective import expected_sweep_loss, loss, order_free_floor
from hessquant.core.obq import damped
from hessquant.core.refine import descend
from hessquant.errors import GridError, NonFiniteError
from hessquant.kernels import twin
from hessquant.records import GridSpec

TWIN = Kernels(twin.sweep_block, twin.search_scales)


def solved(weight, hessian, spec, config):
    factor = factorize(hessian, damping=config.damping, order=config.order, group_width=spec.width(weight.shape[1]))
    return gptq.solve(weight, hessian, factor, spec, config, TWIN)


@settings(max_examples=40, deadline=None)
@given(layers(), ORDERS)
def test_no_row_is_worse_than_round_to_nearest(layer, order):
    weight, hessian, spec = layer
    solution = solved(weight, hessian, spec, Config(order=order))
    nearest = min_max(weight, spec)
    for row in range(len(weight)):
        one = slice(row, row + 1)
        row_error = (weight - solution.weight.dequantize(torch.float64))[one]
        nearest_error = (weight - QuantizedWeight(encode(weight, nearest), nearest).dequantize(torch.float64))[one]
        assert loss(row_error, hessian) <= loss(nearest_error, hessian) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(layers(), ORDERS)
def test_the_reported_losses_are_those_of_the_weights(layer, order):
    weight, hessian, spec = layer
    solution = solved(weight, hessian, spec, Config(order=order))
    assert solution.loss == pytest.approx(loss_of(solution.weight.codes, weight, hessian, solution.weight.grid))
    nearest = min_max(weight, spec)
    assert solution.rtn_loss == pytest.approx(loss_of(encode(weight, nearest), weight, hessian, nearest))
    assert solution.output_energy == pytest.approx(torch.einsum("ri,ij,rj->", weight, hessian, weight).item())


@pytest.mark.parametrize("dead", [[], [0, 5, 17]])
@pytest.mark.parametrize("rounds", [1, 3])
def test_refinement_descends_on_the_damped_hessian(dead, rounds):
    # Much damping, so that the two objectives lead apart; a dead column has none but the damped diagonal.
    weight, hessian = random_layer(16, 32, seed=2)
    hessian[dead] = 0
    hessian[:, dead] = 0
    spec = GridSpec(bits=3, group_size=16)
    config = Config(damping=0.1, refinement_rounds=rounds)
    swept = solved(weight, hessian, spec, replace(config, refinement_rounds=0))
    refined, on_undamped = swept.weight, swept.weight
    for _ in range(rounds):
        refined = descend(weight, refined, damped(hessian, 0.1), block_size=128, kernel=twin.sweep_block)
        undamped = hessian + torch.diag((hessian.diagonal() == 0).double())
        on_undamped = descend(weight, on_undamped, undamped, block_size=128, kernel=twin.sweep_block)
    found = solved(weight, hessian, spec, config)
    assert (swept.fallback_rows, found.fallback_rows) == (0, 0)
    assert torch.equal(found.weight.codes, refined.codes)
    assert torch.equal(found.weight.grid.scales, refined.grid.scales)
    assert not torch.equal(refined.codes, on_undamped.codes)


@pytest.mark.parametrize("scales", ["static", "dynamic"])
def test_what_theory_expects_is_told_of_the_grid_that_was_chosen(scales):
    weight, hessian = random_layer(16, 32, seed=2)
    spec = GridSpec(bits=4, group_size=8)
    config = Config(order="group", scales=scales)
    solution = solved(weight, hessian, spec, config)
    assert solution.fallback_rows == 0
    factor = factorize(hessian, damping=config.damping, order=config.order, group_width=8)
    assert solution.expected_loss == expected_sweep_loss(solution.weight.grid, factor)
    assert solution.floor == order_free_floor(solution.weight.grid, factor)
    assert solution.floor < 0.9 * solution.expected_loss


@pytest.mark.parametrize("symmetric", [True, False])
def test_scales_are_searched_against_the_squared_diagonal_of_the_factor_or_not_at_all(symmetric):
    weight, hessian = random_layer(8, 32, seed=2)
    spec = GridSpec(bits=3, symmetric=symmetric, group_size=16)
    factor = factorize(hessian, damping=0.01, order="activation", group_width=16)
    found = twin.search_scales(weight.T.contiguous(), factor.importance, spec, scale_factors(spec))
    plain = min_max(weight, spec)
    for search, scales, zeros in ((True, found[0].T, found[1].T), (False, plain.scales, plain.zeros)):
        solution = solved(weight, hessian, spec, Config(scale_search=search, refinement_rounds=0))
        assert solution.fallback_rows == 0
        assert torch.equal(solution.weight.grid.scales, scales)
        assert torch.equal(solution.weight.grid.zeros, zeros)
        expected = sweep(weight, factor, solution.weight.grid, block_size=128, kernel=twin.sweep_block)
        assert torch.equal(solution.weight.codes, expected)


def test_a_large_positive_weight_that_meets_most_of_the_energy_is_not_clipped():
    # As in a model's "massive activations": of one input comes nearly all energy, and one row has its largest weight
    # there. Clipped by half a step, that row would be driven to the limits of its grid in making up for it.
    weight, hessian = random_layer(16, 256, seed=7, tokens=2048)
    weight *= 0.1
    weight[3, 20] = 4.0
    massive = 0.03 * torch.randn(256, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    massive[20] = 10.0
    hessian = hessian / hessian.diagonal().mean() + 1000 * torch.outer(massive, massive)
    solution = solved(weight, hessian, GridSpec(bits=4, group_size=64), Config())
    error = weight - solution.weight.dequantize(torch.float64)
    assert error[3, 20].abs() < 0.01
    assert error[3].square().mean() < weight[3].square().mean()
    assert solution.loss < 1e-3 * solution.rtn_loss


def test_dynamic_scales_over_one_group_per_row_are_the_static_ones():
    weight, hessian = random_layer(8, 24, seed=3)
    config = Config(order="natural", scales="dynamic", block_size=5)
    dynamic = solved(weight, hessian, GridSpec(bits=4), config)
    static = solved(weight, hessian, GridSpec(bits=4), replace(config, scales="static"))
    assert torch.equal(dynamic.weight.codes, static.weight.codes)
    assert torch.equal(dynamic.weight.grid.scales, static.weight.grid.scales)


@pytest.mark.parametrize("order", ["natural", "group"])
@pytest.mark.parametrize("search", [False, True])
def test_dynamic_scales_fit_the_weights_as_gptq_sees_them(order, search):
    # The definition, literally: at each group's first column the weights compensated so far decide its scales.
    weight, hessian = random_layer(4, 12, seed=4)
    spec = GridSpec(bits=4, group_size=4)
    config = Config(order=order, scales="dynamic", scale_search=search, block_size=3)
    result = solved(weight, hessian, spec, config).weight
    factor = factorize(hessian, damping=0.01, order=order, group_width=4)
    work, lower = weight.clone(), factor.lower
    one_group = GridSpec(bits=4)
    for start in range(0, 12, 4):
        columns = factor.order[start : start + 4]
        if search:
            squares = lower.diagonal()[start : start + 4] ** 2
            found = twin.search_scales(work[:, columns].T.contiguous(), squares, one_group, scale_factors(one_group))
            scales = found[0][0]
        else:
            scales = min_max(work[:, columns], one_group).scales[:, 0]
        assert torch.equal(result.grid.scales[:, columns[0] // 4], scales)
        for visit in range(start, start + 4):
            column = factor.order[visit]
            value = result.dequantize(torch.float64)[:, column]
            error = work[:, column] - value
            # GPTQ's own update through the inverse of what is left of H.
            left = factor.order[visit:]
            inverse = torch.linalg.inv((lower.T @ lower)[visit:, visit:])
            work[:, left] -= torch.outer(error / inverse[0, 0], inverse[0])


def test_a_row_that_is_as_good_as_rounded_to_nearest_is_none_of_the_fallback():
    weight, _ = random_layer(4, 8, seed=11)
    identity = torch.eye(8, dtype=torch.float64)
    solution = solved(weight, identity, GridSpec(bits=4), Config(scale_search=False, refinement_rounds=0))
    assert (solution.fallback_rows, solution.loss) == (0, solution.rtn_loss)


def test_float32_loses_no_more_than_rounding_against_the_oracle():
    weight, hessian = random_layer(64, 256, seed=5)
    spec = GridSpec(bits=4, group_size=64)
    single = hessquant.solve(weight.float(), hessian.float(), Config(group_size=64))
    double = solved(weight, hessian, spec, Config(group_size=64))
    assert single.loss == pytest.approx(double.loss, rel=2e-3)


def test_weights_of_16_bits_are_solved_in_float32():
    weight, hessian = random_layer(4, 32, seed=12)
    half = weight.bfloat16()
    found, expected = (hessquant.solve(given, hessian, Config(group_size=8)) for given in (half, half.float()))
    assert torch.equal(found.weight.codes, expected.weight.codes)
    assert found.loss == expected.loss


def test_inputs_are_left_as_they_were():
    weight, hessian = random_layer(3, 8, seed=6)
    before = weight.clone(), hessian.clone()
    hessquant.solve(weight, hessian, Config(group_size=4))
    assert torch.equal(weight, before[0])
    assert torch.equal(hessian, before[1])


def test_dead_columns_are_rounded_to_nearest_not_zeroed():
    weight, hessian = random_layer(6, 12, seed=7)
    dead = [2, 9]
    hessian[dead] = 0
    hessian[:, dead] = 0
    spec = GridSpec(bits=4, group_size=4)
    grid = min_max(weight, spec)
    for order in ("natural", "activation", "group"):
        codes = swept(weight, hessian, spec, order=order)
        assert torch.equal(codes[:, dead], encode(weight, grid)[:, dead])


def test_a_non_finite_weight_is_refused_with_its_place():
    weight, hessian = random_layer(3, 4, seed=8)
    weight[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="row 1, column 2"):
        hessquant.solve(weight, hessian, Config(group_size=-1))


def test_shapes_that_do_not_fit_are_refused_with_both_shapes():
    with pytest.raises(GridError, match=r"\(2, 4\).*\(3, 3\)"):
        hessquant.solve(torch.zeros(2, 4), torch.eye(3))


def test_automatic_group_size_is_the_largest_that_divides():
    for columns, width in ((256, 128), (192, 64), (96, 32), (40, 40)):
        solution = hessquant.solve(torch.randn(2, columns), torch.eye(columns))
        assert solution.weight.grid.scales.shape == (2, columns // width)


@pytest.mark.parametrize("scale", [2.0**130, 2.0**-140])
def test_a_hessian_beyond_float32_changes_nothing_but_the_losses(scale):
    weight, hessian = random_layer(128, 256, seed=9)
    plain = hessquant.solve(weight.float(), hessian, Config(group_size=64))
    scaled = hessquant.solve(weight.float(), hessian * scale, Config(group_size=64))
    assert torch.equal(scaled.weight.codes, plain.weight.codes)
    assert scaled.loss == pytest.approx(scale * plain.loss)


def test_weights_whose_losses_overflow_are_refused():
    weight, hessian = random_layer(2, 8, seed=10)
    spec = GridSpec(bits=4, scale_dtype="float32")
    with pytest.raises(NonFiniteError, match="overflow"):
        solved((weight * 1e30).float(), hessian, spec, Config())
