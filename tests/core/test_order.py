import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.problems import ORDERS

from hessquant.core.order import column_order


@given(st.integers(1, 5), st.integers(1, 6), ORDERS, st.integers(0, 999))
def test_every_order_is_a_permutation(groups, width, order, seed):
    diagonal = torch.rand(groups * width, generator=torch.Generator().manual_seed(seed))
    assert column_order(diagonal, order, width).sort().values.tolist() == list(range(groups * width))


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 999))
def test_the_group_order_keeps_groups_together_and_sorts_within_them(groups, width, seed):
    diagonal = torch.rand(groups * width, generator=torch.Generator().manual_seed(seed))
    visits = column_order(diagonal, "group", width).view(groups, width)
    assert (visits // width == (visits // width)[:, :1]).all()
    means = diagonal.view(groups, width).mean(1)[visits[:, 0] // width]
    assert (means.diff() <= 0).all()
    assert (diagonal[visits].diff(dim=1) <= 0).all()


def test_ties_keep_the_natural_order():
    assert column_order(torch.ones(6), "activation", 2).tolist() == [0, 1, 2, 3, 4, 5]
    assert column_order(torch.ones(6), "group", 2).tolist() == [0, 1, 2, 3, 4, 5]
