from functools import cache

import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.config import Config
from hessquant.core import gptq, hessian
from hessquant.core.experts import pooled, shrink
from hessquant.core.factor import factorize
from hessquant.core.hessian import HessianStatistics
from hessquant.core.objective import loss_per_row
from hessquant.kernels import twin
from hessquant.records import GridSpec

COLUMNS = 64
KERNELS = gptq.Kernels(twin.sweep_block, twin.search_scales)


def statistics_of(inputs):
    return hessian.add(HessianStatistics.empty(inputs.shape[1], inputs.dtype), inputs)


@cache
def mixing():
    """What all experts' inputs have in common: strong correlations."""
    shared = correlated_inputs(4096, COLUMNS, 0)
    return torch.linalg.cholesky(shared.T @ shared / len(shared)).T


def tokens_of(expert, count, seed):
    """Tokens routed to an expert: correlated as all are, along a direction of its own, and with scales of its own."""
    generator = torch.Generator().manual_seed(1000 * seed + expert)
    own = torch.Generator().manual_seed(expert)
    direction = torch.randn(COLUMNS, generator=own, dtype=torch.float64)
    scale = torch.exp(0.5 * torch.randn(COLUMNS, generator=own, dtype=torch.float64))
    white = torch.randn(count, COLUMNS, generator=generator, dtype=torch.float64)
    return (white @ mixing() + torch.randn(count, 1, generator=generator, dtype=torch.float64) * direction) * scale


def solve(weight, mean):
    spec = GridSpec(4, 32, True)
    factor = factorize(mean, damping=0.01, order="activation", group_width=32)
    return gptq.solve(weight, mean, factor, spec, Config(), KERNELS).weight


def held_out_ratio(tokens, seed, expert=0):
    """Loss on fresh tokens, relative to round-to-nearest's on the min-max grid."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(48, COLUMNS, generator=generator, dtype=torch.float64)
    own = statistics_of(tokens_of(expert, tokens, seed)) if tokens else None
    others = [statistics_of(tokens_of(other, 512, seed)) for other in (1, 2, 3)]
    mean, _ = shrink(own, pooled([*others, *([] if own is None else [own])], COLUMNS))
    fresh = tokens_of(expert, 4096, seed + 1)
    true = fresh.T @ fresh / len(fresh)
    nearest = gptq.solve(
        weight, true, factorize(true, damping=0.01, order="natural", group_width=32), GridSpec(4, 32, True), Config(),
        KERNELS,
    )  # fmt: skip
    swept = float(loss_per_row(weight - solve(weight, mean).dequantize(weight.dtype), true).sum())
    return swept / nearest.rtn_loss


@pytest.mark.parametrize("tokens", [0, 1, 8, 32, 64, 128])
def test_an_expert_is_never_worse_than_rounding_on_held_out_tokens(tokens):
    assert max(held_out_ratio(tokens, seed) for seed in range(4)) < 1


def test_without_the_pool_an_expert_with_few_tokens_is_worse_than_with_it():
    def alone(tokens, seed):
        inputs = tokens_of(0, tokens, seed)
        fresh = tokens_of(0, 4096, seed + 1)
        true = fresh.T @ fresh / len(fresh)
        weight = torch.randn(48, COLUMNS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = solve(weight, inputs.T @ inputs / tokens).dequantize(weight.dtype)
        factor = factorize(true, damping=0.01, order="natural", group_width=32)
        nearest = gptq.solve(weight, true, factor, GridSpec(4, 32, True), Config(), KERNELS)
        return float(loss_per_row(weight - values, true).sum()) / nearest.rtn_loss

    for seed in range(3):
        assert held_out_ratio(16, seed) < 0.9 * alone(16, seed)


def test_the_weight_of_the_pool_falls_from_one_to_nothing():
    pool = statistics_of(tokens_of(1, 256, 0))
    shares = [shrink(statistics_of(tokens_of(0, count, 0)), pool)[1] for count in (1, COLUMNS, 100 * COLUMNS)]
    assert shares == pytest.approx([32 / 33, 1 / 3, 1 / 201])


def test_the_mean_is_between_the_experts_own_and_the_pools():
    own, pool = statistics_of(tokens_of(0, 64, 0)), statistics_of(tokens_of(1, 256, 0))
    mean, share = shrink(own, pool)
    expected = (1 - share) * hessian.hessian(own) + share * hessian.hessian(pool)
    assert torch.equal(mean, expected)


def test_without_tokens_the_hessian_is_the_identity():
    mean, share = shrink(None, statistics_of(tokens_of(1, 256, 0)))
    assert torch.equal(mean, torch.eye(COLUMNS, dtype=torch.float64))
    assert share == 1


def test_the_pool_is_the_sum_over_experts():
    first, second = statistics_of(tokens_of(1, 10, 0)), statistics_of(tokens_of(2, 30, 0))
    pool = pooled([first, second], COLUMNS)
    assert (pool.token_count, pool.weight_sum) == (40, 40.0)
    assert torch.equal(pool.sum, first.sum + second.sum)
