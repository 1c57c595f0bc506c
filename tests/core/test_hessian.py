import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import correlated_inputs
from tests.watched import LiveBytes

from hessquant.core import hessian
from hessquant.core.finite import first_non_finite
from hessquant.core.gram import WeightedTokens
from hessquant.core.hessian import HessianAccumulator, HessianStatistics
from hessquant.errors import NonFiniteError


def collected(parts, weighted=None):
    statistics = HessianStatistics.empty(parts[0].shape[1], parts[0].dtype)
    for part in parts:
        statistics = hessian.add(statistics, part, weighted)
    return statistics


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 900), st.integers(0, 99))
def test_the_mean_is_the_gram_matrix_over_tokens_at_every_tiling(columns, seed):
    inputs = correlated_inputs(5, columns, seed)
    expected = torch.einsum("ni,nj->ij", inputs, inputs) / 5
    torch.testing.assert_close(hessian.hessian(collected([inputs])), expected, rtol=1e-12, atol=1e-12)


def test_a_windows_first_token_counts_as_often_as_it_is_read():
    inputs = correlated_inputs(12, 8, 3)
    mean = hessian.hessian(collected([inputs], hessian.first_token_weights(4)))
    repeated = torch.cat([inputs, *[inputs[0::4]] * 3])
    torch.testing.assert_close(mean, repeated.T @ repeated / len(repeated), rtol=1e-12, atol=1e-12)


def test_it_is_exactly_symmetric():
    mean = hessian.hessian(collected([correlated_inputs(50, 800, 1, torch.float32)]))
    assert torch.equal(mean, mean.T)


def test_batches_and_machines_give_the_same_statistics():
    inputs = correlated_inputs(60, 16, 2)
    whole = collected([inputs])
    batched = collected(list(inputs.split(7)))
    merged = hessian.merge(collected([inputs[:20]]), collected([inputs[20:]]))
    for other in (batched, merged):
        torch.testing.assert_close(hessian.hessian(other), hessian.hessian(whole))
        assert (other.token_count, other.weight_sum) == (60, 60.0)


def test_a_token_of_weight_two_counts_twice():
    inputs = correlated_inputs(3, 4, 3)
    twice = collected([inputs], WeightedTokens(slice(0, 1), 2.0))
    repeated = collected([inputs[[0, 0, 1, 2]]])
    torch.testing.assert_close(hessian.hessian(twice), hessian.hessian(repeated))
    assert (twice.weight_sum, twice.token_count) == (4.0, 3)
    never = collected([inputs], WeightedTokens(slice(2, 3), 0.0))
    torch.testing.assert_close(hessian.hessian(never), hessian.hessian(collected([inputs[:2]])))
    assert (never.weight_sum, never.token_count) == (2.0, 3)


def test_inputs_and_statistics_are_left_as_they_were():
    inputs = correlated_inputs(5, 6, 4)
    before, statistics = inputs.clone(), collected([inputs])
    total = statistics.sum.clone()
    hessian.add(statistics, inputs)
    assert torch.equal(inputs, before)
    assert torch.equal(statistics.sum.tril(), total.tril())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_input_is_refused_with_its_place(bad):
    inputs = correlated_inputs(16, 8, 5, torch.float32)
    inputs[11, 3] = bad
    with pytest.raises(NonFiniteError, match="token 11, channel 3") as caught:
        collected([inputs])
    assert caught.value.place == (11, 3)


def test_an_accumulator_counts_the_place_among_all_that_it_was_given():
    accumulator = accumulated([torch.ones(5, 4)] * 2)
    with pytest.raises(NonFiniteError, match="token 11, channel 2 is inf") as caught:
        accumulator.add(torch.ones(5, 4).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.inf)))
    assert (caught.value.place, caught.value.value) == ((11, 2), torch.inf)


def test_large_finite_inputs_are_not_taken_for_infinite_ones():
    inputs = torch.full((4, 2), 3e38)
    assert first_non_finite(inputs) is None


@pytest.mark.parametrize("columns", [3, 400])
def test_what_is_above_the_diagonal_of_the_sum_does_not_count(columns):
    inputs = correlated_inputs(5, columns, 7)
    statistics = collected([inputs])
    expected = hessian.hessian(statistics)
    statistics.sum[torch.ones(columns, columns, dtype=torch.bool).triu(1)] = float("nan")
    assert torch.equal(hessian.hessian(statistics), expected)


def test_one_token_of_any_weight_is_its_own_mean():
    inputs = correlated_inputs(1, 4, 8)
    for weight in (0.25, 1.0, 4.0):
        mean = hessian.hessian(collected([inputs], WeightedTokens(slice(None), weight)))
        torch.testing.assert_close(mean, inputs.T @ inputs)


def test_no_tokens_give_a_zero_hessian():
    assert not hessian.hessian(HessianStatistics.empty(3)).any()


def accumulated(parts, weighted=None):
    accumulator = HessianAccumulator()
    for part in parts:
        accumulator.add(part, weighted)
    return accumulator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_accumulator_ends_in_the_statistics_of_all_that_it_was_given(dtype):
    parts = list(correlated_inputs(40, 400, 6, dtype).split(13))
    for of_tokens in (None, WeightedTokens(slice(1, None, 3), 2.5)):
        found, expected = accumulated(parts, of_tokens).take(), collected(parts, of_tokens)
        assert torch.equal(hessian.hessian(found), hessian.hessian(expected))
        assert (found.weight_sum, found.token_count) == (expected.weight_sum, expected.token_count)


def test_an_accumulator_adds_in_the_place_of_its_sum():
    accumulator, parts = HessianAccumulator(), correlated_inputs(40, 300, 6).split(13)
    accumulator.add(parts[0])
    with LiveBytes() as live:
        for part in parts[1:]:
            accumulator.add(part)
    # A second sum would be 8 bytes per element.
    assert live.peak < 4 * 300**2


def test_sums_follow_their_inputs_in_float32_at_least():
    for of_inputs, summed in (("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")):
        inputs = torch.ones(2, 3, dtype=getattr(torch, of_inputs))
        assert accumulated([inputs]).take().sum.dtype == getattr(torch, summed)


def test_what_an_accumulator_has_given_up_is_never_overwritten():
    inputs = correlated_inputs(12, 6, 9)
    accumulator = accumulated([inputs])
    taken = accumulator.take()
    before = taken.sum.clone()
    assert accumulator.take() is None
    accumulator.add(inputs[:5])
    again = accumulator.take()
    assert torch.equal(taken.sum, before)
    assert (taken.token_count, again.token_count, again.weight_sum) == (12, 5, 5.0)
    assert torch.equal(again.sum.tril(), collected([inputs[:5]]).sum.tril())


def test_the_mean_leaves_the_statistics_as_they_were():
    statistics = collected([correlated_inputs(64, 300, 0, torch.float32)])
    before = statistics.sum.clone()
    mean = hessian.hessian(statistics)
    full = before.tril() + before.tril(-1).T
    assert torch.equal(mean, full / 64)
    assert torch.equal(statistics.sum.tril(), before.tril())
