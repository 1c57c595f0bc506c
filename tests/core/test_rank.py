import pytest
import torch

from hessquant.core.factor import factorize
from hessquant.core.rank import effective_rank


def gram(vectors, repeats, columns, scale=None):
    inputs = torch.randn(vectors, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = inputs.repeat(repeats, 1) * (1 if scale is None else scale)
    return inputs.T @ inputs / len(inputs)


@pytest.mark.parametrize("order", ["activation", "natural"])
@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_the_effective_rank_tells_few_vectors_from_many(order, unit):
    def rank(hessian):
        return effective_rank(factorize(unit * hessian, damping=0.01, order=order, group_width=64), unit * hessian)

    few, many = gram(9, 50, 64), gram(450, 1, 64)
    assert 9 <= rank(few) < 25
    assert rank(many) == 64
    many[5], many[:, 5] = 0, 0
    assert rank(many) == 63
    assert rank(torch.zeros(64, 64)) == 0


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_an_input_counts_from_a_hundredth_of_the_mean_variance_without_the_damping(damping):
    # Nothing couples these inputs, so that each one's own variance is all of it. Their mean is 1.
    variances = torch.tensor([1.0, 0.015, 0.005, 1.98, 2.0, 0.0], dtype=torch.float64)
    hessian = torch.diag(variances)
    factor = factorize(hessian, damping=damping, order="activation", group_width=6)
    assert effective_rank(factor, hessian) == 4


def test_an_input_of_just_a_hundredth_does_not_count():
    hessian = torch.diag(torch.tensor([1.0, 199.0], dtype=torch.float64))
    assert effective_rank(factorize(hessian, damping=0.0, order="natural", group_width=2), hessian) == 1
