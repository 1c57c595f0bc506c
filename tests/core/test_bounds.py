import pytest
import torch
from tests.problems import loss_of, random_layer, swept

from hessquant.core.bounds import expected_rtn_loss, expected_sweep_loss, order_free_floor
from hessquant.core.factor import factorize
from hessquant.core.grid import Grid, encode, min_max
from hessquant.core.obq import damped
from hessquant.records import GridSpec

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
    assert loss == pytest.approx(expected_sweep_loss(grid, factor), rel=0.05)


def test_rounding_to_nearest_loses_what_theory_expects(layer):
    weight, hessian = layer
    grid = roomy(weight)
    loss = loss_of(encode(weight, grid), weight, hessian, grid)
    assert loss == pytest.approx(expected_rtn_loss(grid, hessian), rel=0.1)


def test_the_floor_is_the_same_for_every_order_and_below_each_ones_expected_loss(layer):
    weight, hessian = layer
    grid = min_max(weight, SPEC)
    factors = [factorize(hessian, damping=0.01, order=o, group_width=16) for o in ("natural", "activation", "group")]
    floors = [order_free_floor(grid, factor) for factor in factors]
    assert floors == pytest.approx([floors[0]] * 3)
    assert all(expected_sweep_loss(grid, factor) >= floors[0] for factor in factors)


def test_the_floor_is_the_determinant_bound():
    _, hessian = random_layer(1, 8, seed=1)
    grid = min_max(torch.ones(1, 8), GridSpec(bits=4, scale_dtype="float64"))
    factor = factorize(hessian, damping=0.01, order="natural", group_width=8)
    step = grid.scales.item()
    determinant = torch.linalg.det(damped(hessian, 0.01)).item()
    assert order_free_floor(grid, factor) == pytest.approx(step**2 / 12 * 8 * determinant ** (1 / 8))
