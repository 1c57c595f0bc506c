"""Which rows are which, told by their values after rounding."""

import pytest
import torch
from tests.plans import quantize

from hessquant.checkpoint.row_match import match, nearest, projection
from hessquant.records import GridSpec

COLUMNS = 256


def rows(count, seed=0):
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(seed))


def matched(values, others):
    project = projection(others.shape[1])
    return match(values, values @ project, others @ project, lambda numbers: others[numbers])


def shuffle(values):
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(3))
    return values[order], order.argsort()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounded_rows_are_found_in_any_order(bits):
    weight = rows(300)
    others, expected = shuffle(weight)
    found, sure, scale = matched(quantize(weight, GridSpec(bits, 32)).dequantize(), others)
    assert bool(sure.all())
    assert torch.equal(found, expected)
    assert abs(scale - 1) < (0.3 if bits == 2 else 0.05)


def test_rows_that_are_much_alike_are_told_apart_as_long_as_rounding_moves_them_less():
    weight = rows(1) + 0.5 * rows(200, seed=1)
    others, expected = shuffle(weight)
    found, sure, _ = matched(quantize(weight, GridSpec(4, 32)).dequantize(), others)
    assert bool(sure.all())
    assert torch.equal(found, expected)
    weight = rows(1) + 0.01 * rows(200, seed=1)
    _, sure, _ = matched(quantize(weight, GridSpec(3, 32)).dequantize(), weight)
    assert not bool(sure.all())


def test_what_is_not_clear_at_once_is_when_the_others_have_theirs():
    first, second = rows(2)
    # Nearer to its own than to the other, but not by much; the other is certain.
    values = torch.stack([0.53 * first + 0.47 * second, second])
    project = projection(COLUMNS)
    others = torch.stack([first, second])
    assert nearest(values, values @ project, others @ project, lambda numbers: others[numbers]).clear.tolist() == [
        False,
        True,
    ]
    found, sure, _ = matched(values, others)
    assert (found.tolist(), sure.tolist()) == ([0, 1], [True, True])


def test_equal_rows_may_have_each_others_places_if_these_are_as_good():
    weight = rows(20)
    weight[[3, 7, 11]] = 0.0
    others, _ = shuffle(weight)
    found, sure, _ = matched(weight, others)
    assert bool(sure.all())
    assert torch.equal(others[found], weight)
    # Rounded to one value, while the rows differ.
    values = quantize(weight, GridSpec(4, 32)).dequantize()
    others = weight.clone()
    others[[3, 7, 11]] = 1e-6 * rows(3, seed=5)
    found, sure, _ = matched(values, others)
    assert bool(sure.all())
    assert sorted(found[[3, 7, 11]].tolist()) == [3, 7, 11]


def test_equal_rows_without_enough_places_are_not_certain():
    weight = rows(20)
    values = weight.clone()
    values[4] = values[5]
    _, sure, _ = matched(values, weight)
    assert not bool(sure[4]) or not bool(sure[5])


def test_a_row_is_not_given_the_last_place_for_being_the_last():
    weight = rows(20)
    values = weight.clone()
    values[4] = 5 * rows(1, seed=8)[0]
    _, sure, _ = matched(values, weight)
    assert sure.tolist() == [row != 4 for row in range(20)]


def test_one_of_two_equal_places_is_not_certain():
    weight = rows(20)
    _, sure, _ = matched(quantize(weight, GridSpec(4, 32)).dequantize(), torch.cat([weight, weight[:1]]))
    assert sure.tolist() == [row != 0 for row in range(20)]
