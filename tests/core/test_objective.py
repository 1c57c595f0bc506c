import pytest
import torch
from tests.problems import random_layer

from hessquant.core.objective import loss, loss_per_row


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
