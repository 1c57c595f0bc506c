import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.core import hessian
from hessquant.core.experts import pooled, shrink
from hessquant.core.hessian import HessianStatistics

COLUMNS = 64


def statistics_of(inputs):
    return hessian.add(HessianStatistics.empty(inputs.shape[1], inputs.dtype), inputs)


def test_the_weight_of_the_pool_falls_from_one_to_nothing():
    common = hessian.hessian(statistics_of(correlated_inputs(256, COLUMNS, 1)))
    counts = (1, COLUMNS, 100 * COLUMNS)
    _, shares = shrink([statistics_of(correlated_inputs(count, COLUMNS, 0)) for count in counts], common)
    assert shares == pytest.approx([32 / 33, 1 / 3, 1 / 201])


def test_the_mean_is_between_the_experts_own_and_the_pools():
    experts = [statistics_of(correlated_inputs(count, COLUMNS, count)) for count in (64, 9)]
    common = hessian.hessian(statistics_of(correlated_inputs(256, COLUMNS, 1)))
    sums = [own.sum.clone() for own in experts]
    means, shares = shrink(experts, common)
    for mean, share, own, before in zip(means, shares, experts, sums, strict=True):
        assert torch.equal(mean, (1 - share) * hessian.hessian(own) + share * common)
        assert torch.equal(own.sum, before)


@pytest.mark.parametrize("own", [None, HessianStatistics.empty(COLUMNS, torch.float64)], ids=["none", "empty"])
def test_without_tokens_the_hessian_is_the_identity(own):
    some = statistics_of(correlated_inputs(256, COLUMNS, 1))
    means, shares = shrink([own, some, own], hessian.hessian(some))
    assert torch.equal(means[0], torch.eye(COLUMNS, dtype=torch.float64))
    assert torch.equal(means[2], means[0])
    assert shares == [1, pytest.approx(1 / 9), 1]


def test_the_pool_is_the_sum_over_experts():
    first, second = statistics_of(correlated_inputs(10, COLUMNS, 1)), statistics_of(correlated_inputs(30, COLUMNS, 2))
    pool = pooled([first, second], COLUMNS, torch.empty(0))
    assert (pool.token_count, pool.weight_sum) == (40, 40.0)
    assert torch.equal(pool.sum, first.sum + second.sum)
    nobody = pooled([], COLUMNS, torch.empty(0))
    assert (nobody.token_count, nobody.sum.shape, nobody.sum.any()) == (0, (COLUMNS, COLUMNS), False)


def test_a_pool_of_nothing_is_where_the_weights_are_in_float32_at_least():
    for given, pool in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
        nobody = pooled([], COLUMNS, torch.empty(0, dtype=getattr(torch, given), device="meta"))
        assert (nobody.sum.dtype, nobody.sum.device.type) == (getattr(torch, pool), "meta")
