"""The price of rounding a weight, against the KL divergence that it really causes in a model of one layer."""

import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.core.factor import factorize
from hessquant.core.grid import QuantizedWeight, encode, min_max
from hessquant.core.sensitivity import Curvature, predicted_divergence
from hessquant.records import GridSpec

ROWS, COLUMNS, TOKENS = 24, 32, 4000


def layer(seed=0, spread=0.6):
    return spread * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(seed=1):
    """Inputs that do not depend on each other, some larger than others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, COLUMNS, generator=generator, dtype=torch.float64) * torch.linspace(0.2, 1, COLUMNS)


def exact_curvature(weight, given):
    """Each token a window; the mean over labels of the squared gradient of log p, with the softmax's own variance."""
    probabilities = (given @ weight.T).softmax(-1)
    diagonal = (probabilities * (1 - probabilities)).T @ given.square()
    return Curvature(diagonal.sum(1), diagonal.sum(0), len(given))


def divergence(weight, other, given):
    before, after = (given @ weight.T).log_softmax(-1), (given @ other.T).log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def price(weight, given, bits, curvature=None):
    mean = given.T @ given / len(given)
    factor = factorize(mean.float(), damping=1e-4, order="activation", group_width=COLUMNS, dtype=torch.float32)
    grid = min_max(weight.float(), GridSpec(bits))
    rounded = QuantizedWeight(encode(weight.float(), grid), grid)
    curvature = curvature or exact_curvature(weight, given)
    foretold = predicted_divergence(weight.float(), rounded, factor, mean.diagonal().float(), curvature)
    return foretold, divergence(weight, rounded.dequantize().double(), given)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_with_independent_inputs_the_price_is_the_divergence(bits):
    foretold, real = zip(*(price(layer(seed), inputs(seed + 50), bits) for seed in range(8)), strict=True)
    assert sum(foretold) == pytest.approx(sum(real), rel=0.15)


def test_with_correlated_inputs_it_is_what_a_sweep_would_leave_and_less_than_rounding_costs():
    given = correlated_inputs(TOKENS, COLUMNS, 3).double()
    foretold, rounding = price(layer(spread=0.2), given, 4)
    assert foretold < 0.8 * rounding


def test_a_gradient_is_added_by_its_squares():
    curvature, whole = Curvature.of_shape(2, 3, torch.device("cpu")), torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(3):
        gradient = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        curvature.add(gradient, tokens=7)
        whole += gradient.double() ** 2
    assert curvature.tokens == 21
    assert torch.allclose(curvature.rows, whole.sum(1))
    assert torch.allclose(curvature.columns, whole.sum(0))


def test_rows_that_the_model_makes_nothing_of_cost_nothing():
    weight, given = layer(), inputs()
    curvature = exact_curvature(weight, given)
    curvature.rows[5:] = 0
    part, _ = price(weight, given, 4, curvature)
    weight[5:] *= 1.3
    assert price(weight, given, 4, curvature)[0] == part > 0
    nothing = Curvature.of_shape(ROWS, COLUMNS, torch.device("cpu"))
    assert price(weight, given, 4, nothing)[0] == 0


def test_an_input_that_never_comes_costs_nothing_whatever_its_error():
    weight, given = layer(), inputs()
    given[:, 4] = 0
    weight[:, 4] *= 0.01
    before, _ = price(weight, given, 4)
    weight[:, 4] *= 40
    after, _ = price(weight, given, 4)
    assert after == pytest.approx(before, rel=1e-6)


def test_each_bit_more_costs_about_a_quarter():
    prices = [price(layer(), inputs(), bits)[0] for bits in (4, 5, 6)]
    assert prices[0] / prices[1] == pytest.approx(4, rel=0.3)
    assert prices[1] / prices[2] == pytest.approx(4, rel=0.3)
