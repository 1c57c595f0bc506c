import math

import pytest
import torch
from tests.problems import loss_of, random_layer, swept

from hessquant.core import objective
from hessquant.core.factor import factorize
from hessquant.core.grid import Grid, min_max
from hessquant.core.objective import expected_sweep_loss, loss, loss_per_row, order_free_floor
from hessquant.core.obq import damped
from hessquant.records import GridSpec


@pytest.mark.parametrize("columns", [1, 2, 191, 192, 193, 400, 800])
def test_the_loss_is_that_of_the_definition_at_every_tiling(columns):
    error, hessian = random_layer(3, columns, seed=1, tokens=20)
    expected = torch.einsum("ri,ij,rj->r", error, hessian, error)
    torch.testing.assert_close(loss_per_row(error, hessian), expected, rtol=1e-10, atol=0)
    assert loss(error, hessian) == pytest.approx(expected.sum().item(), rel=1e-10)


def test_the_error_is_left_as_it_was():
    error, hessian = random_layer(3, 8, seed=2)
    before = error.clone()
    loss_per_row(error, hessian)
    assert torch.equal(error, before)


SPEC = GridSpec(bits=8, group_size=16, scale_dtype="float32")


def roomy(weight):
    """A grid with so much headroom that nothing is clamped, as the model assumes."""
    grid = min_max(weight, SPEC)
    return Grid(SPEC, 4 * grid.scales, grid.zeros)


@pytest.fixture(scope="module")
def layer():
    # Fine steps and many rows: the model of uniform rounding errors is good, and averages are stable.
    return random_layer(400, 64, seed=7)


def test_the_sweep_loses_what_theory_expects(layer):
    weight, hessian = layer
    factor = factorize(hessian, damping=0.0, order="activation", group_width=16)
    grid = roomy(weight)
    codes = swept(weight, hessian, SPEC, order="activation", damping=0.0, grid=grid)
    loss = loss_of(codes, weight, hessian, grid)
    assert loss == pytest.approx(expected_sweep_loss(grid, factor).item(), rel=0.05)


def test_the_floor_is_the_same_for_every_order_and_below_each_ones_expected_loss(layer):
    weight, hessian = layer
    grid = min_max(weight, SPEC)
    factors = [factorize(hessian, damping=0.01, order=o, group_width=16) for o in ("natural", "activation", "group")]
    floors = [order_free_floor(grid, factor).item() for factor in factors]
    assert floors == pytest.approx([floors[0]] * 3)
    assert all(expected_sweep_loss(grid, factor).item() >= floors[0] for factor in factors)


@pytest.mark.parametrize("order", ["natural", "activation"])
def test_dead_columns_count_for_nothing(order):
    weight, hessian = random_layer(6, 12, seed=2)
    dead = torch.tensor([0, 4, 5, 6, 7, 11])
    live = torch.tensor([column for column in range(12) if column not in dead])
    hessian[dead] = 0
    hessian[:, dead] = 0
    # One scale per row: the same grid whether or not the dead columns are there.
    spec = GridSpec(bits=4, scale_dtype="float64")
    grid = min_max(weight, spec)
    with_them = factorize(hessian, damping=0.01, order=order, group_width=12)
    without = factorize(hessian[live][:, live], damping=0.01, order=order, group_width=6)
    for bound in (expected_sweep_loss, order_free_floor):
        assert bound(grid, with_them).item() == pytest.approx(bound(grid, without).item(), rel=1e-9)


def test_of_the_scales_each_column_takes_its_own_groups():
    # The definitions literally, with groups that are dead in part and wholly.
    weight, hessian = random_layer(3, 12, seed=3)
    dead = [1, 4, 5, 6, 7]
    hessian[dead] = 0
    hessian[:, dead] = 0
    weight[:, 8:] *= 100
    grid = min_max(weight, GridSpec(bits=4, group_size=4, scale_dtype="float64"))
    factor = factorize(hessian, damping=0.01, order="activation", group_width=4)
    live = [column for column in range(12) if column not in dead]
    expected = floor = 0.0
    for row in range(3):
        losses = [grid.scales[row, j // 4].item() ** 2 / 12 * factor.importance[j].item() for j in live]
        expected += sum(losses)
        floor += len(live) * math.prod(losses) ** (1 / len(live))
    assert expected_sweep_loss(grid, factor).item() == pytest.approx(expected)
    assert order_free_floor(grid, factor).item() == pytest.approx(floor)


def test_where_all_columns_are_dead_nothing_is_lost():
    weight, _ = random_layer(2, 4, seed=4)
    factor = factorize(torch.zeros(4, 4), damping=0.01, order="natural", group_width=4)
    grid = min_max(weight, GridSpec(bits=4))
    assert (expected_sweep_loss(grid, factor).item(), order_free_floor(grid, factor).item()) == (0.0, 0.0)


def test_rows_are_looked_at_in_chunks(monkeypatch):
    weight, hessian = random_layer(7, 16, seed=5)
    grid = min_max(weight, SPEC)
    factor = factorize(hessian, damping=0.01, order="natural", group_width=16)
    whole = order_free_floor(grid, factor).item()
    for chunk in (1, 40, 7 * 16):
        monkeypatch.setattr(objective, "_CHUNK", chunk)
        assert order_free_floor(grid, factor).item() == pytest.approx(whole, rel=1e-12)


def test_the_floor_is_the_determinant_bound():
    _, hessian = random_layer(1, 8, seed=1)
    grid = min_max(torch.ones(1, 8), GridSpec(bits=4, scale_dtype="float64"))
    factor = factorize(hessian, damping=0.01, order="natural", group_width=8)
    step = grid.scales.item()
    determinant = torch.linalg.det(damped(hessian, 0.01)).item()
    assert order_free_floor(grid, factor).item() == pytest.approx(step**2 / 12 * 8 * determinant ** (1 / 8))
