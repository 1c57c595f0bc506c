"""A batch of weights is each of them by itself, code for code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import ORDERS, random_layer

from hessquant.config import Config
from hessquant.core import factor as factoring
from hessquant.core.batch import alike
from hessquant.core.factor import effective_rank, factorize
from hessquant.core.gptq import Kernels, solve, solve_batch
from hessquant.errors import FactorizationError, NonFiniteError
from hessquant.kernels import twin
from hessquant.records import GridSpec

TWIN = Kernels(twin.sweep_block, twin.search_scales)


def problem(members, rows, columns, seed, dead=()):
    """Weights and Hessians of one shape, float64, with the same dead columns and orders of their own."""
    pairs = [random_layer(rows, columns, seed + 10 * member) for member in range(members)]
    weights, hessians = (torch.stack(part) for part in zip(*pairs, strict=True))
    hessians[:, dead] = 0
    hessians[:, :, dead] = 0
    return weights, hessians


def factor_of(hessian, config, spec, **settings):
    width = spec.width(hessian.shape[-1])
    return factorize(hessian, damping=config.damping, order=config.order, group_width=width, **settings)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


SETTINGS = st.sampled_from(
    [
        {},
        {"refinement_rounds": 2, "block_size": 3},
        {"scale_search": False, "block_size": 5},
        {"scales": "dynamic", "block_size": 3},
    ]
)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(1, 5), SETTINGS, ORDERS, st.booleans(), st.sampled_from([(), (2, 7)]), st.data())
def test_what_comes_out_is_what_each_gives_alone(members, rows, chosen, order, symmetric, dead, data):
    if chosen.get("scales") == "dynamic" and order == "activation":
        order = "group"
    group_size = data.draw(st.sampled_from([4, 6, -1]))
    weights, hessians = problem(members, rows, 12, data.draw(st.integers(0, 99999)), dead)
    spec, config = GridSpec(data.draw(st.integers(2, 8)), group_size, symmetric), Config(order=order, **chosen)
    assert alike(hessians) == [list(range(members))]
    factor = factor_of(hessians, config, spec)
    whole, solutions = solve_batch(weights, hessians, factor, spec, config, TWIN)
    ranks = effective_rank(factor, hessians).tolist()
    assert len(solutions) == len(ranks) == members
    for member, (found, weight, hessian) in enumerate(zip(solutions, weights, hessians, strict=True)):
        alone = factor_of(hessian, config, spec)
        expected = solve(weight, hessian, alone, spec, config, TWIN)
        assert torch.equal(factor.order[member], alone.order)
        close(factor.lower[member], alone.lower)
        assert ranks[member] == effective_rank(alone, hessian)
        for part in (whole.codes[member], found.weight.codes):
            assert torch.equal(part, expected.weight.codes)
        assert torch.equal(found.weight.grid.scales, expected.weight.grid.scales)
        assert torch.equal(found.weight.grid.zeros, expected.weight.grid.zeros)
        assert found.fallback_rows == expected.fallback_rows
        for name in ("loss", "rtn_loss", "output_energy", "expected_loss", "floor"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-9)


def test_groups_of_zeros_are_counted_per_member():
    weights, hessians = problem(3, 2, 8, 5)
    weights[1, 0, :4] = 0
    weights[1, 1] = 0
    weights[2, 0, 4:] = 1e-12
    spec, config = GridSpec(4, 4), Config()
    _, solutions = solve_batch(weights, hessians, factor_of(hessians, config, spec), spec, config, TWIN)
    assert [(of_one.zero_groups, of_one.tiny_groups) for of_one in solutions] == [(0, 0), (3, 0), (0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matrices_are_worked_on_in_chunks(dtype, monkeypatch):
    _, hessians = problem(3, 1, 24, 7)
    config, spec = Config(), GridSpec(4)
    whole = factor_of(hessians, config, spec, dtype=dtype)
    for chunk in (3 * 24, 1000):
        monkeypatch.setattr(factoring, "BATCH_CHUNK", chunk)
        found = factor_of(hessians, config, spec, dtype=dtype)
        assert torch.equal(found.lower, whole.lower)
    for member, hessian in enumerate(hessians):
        assert torch.equal(whole.lower[member].triu(1), torch.zeros(24, 24, dtype=dtype))
        torch.testing.assert_close(whole.lower[member], factor_of(hessian, config, spec, dtype=dtype).lower)


def test_members_that_need_more_damping_are_named():
    _, hessians = problem(4, 1, 6, 3)
    for member in (1, 3):
        hessians[member] = torch.ones(6, 6)
    with pytest.raises(FactorizationError) as caught:
        factor_of(hessians, Config(damping=0.0), GridSpec(4))
    assert caught.value.members == (1, 3)


def test_a_hessian_of_another_kind_is_by_itself():
    _, hessians = problem(8, 1, 6, 3)
    hessians[1, 2] = hessians[1, :, 2] = 0
    hessians[2] *= 2.0**40
    hessians[4, 3, 0] = hessians[4, 0, 3] = torch.nan
    hessians[5, 2] = hessians[5, :, 2] = 0
    hessians[6, 4, 4] = torch.inf
    hessians[7] *= 2.0**-40
    assert alike(hessians) == [[0, 3], [1, 5], [2], [4], [6], [7]]


@pytest.mark.parametrize(("bad", "message"), [(torch.nan, "row 1, column 4 is nan"), (1e200, "the loss is")])
def test_a_bad_weight_of_one_is_refused(bad, message):
    weights, hessians = problem(3, 2, 6, 3)
    weights[2, 1, 4] = bad
    spec, config = GridSpec(4, scale_dtype="float64"), Config(scale_search=False)
    with pytest.raises(NonFiniteError, match=message):
        solve_batch(weights, hessians, factor_of(hessians, config, spec), spec, config, TWIN)
