import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.core.factor import factorize
from hessquant.core.working import WorkingHessian


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**40])
@pytest.mark.parametrize("tile", [(0, 5, 0, 5), (0, 3, 2, 7), (4, 7, 1, 5), (0, 2, 3, 6), (5, 7, 0, 2)])
def test_a_piece_of_the_working_hessian_is_that_of_the_damped_matrix(scale, tile):
    inputs = correlated_inputs(20, 7, 0)
    given = scale * (inputs.T @ inputs)
    given[3], given[:, 3] = 0, 0
    factor = factorize(given, damping=0.1, order="activation", group_width=7)
    rows, columns = slice(*tile[:2]), slice(*tile[2:])
    working = WorkingHessian.of(given, torch.float32)
    before = given.clone()
    whole = given + torch.diag(factor.added_to(given.diagonal()))
    for found, expected in ((working, given), (working.damped(factor), whole)):
        piece = found[rows, columns]
        assert piece.dtype == torch.float32
        torch.testing.assert_close(piece, (expected / found.unit)[rows, columns].float(), rtol=1e-6, atol=0)
    assert torch.equal(given, before)


@pytest.mark.parametrize(("exponent", "own"), [(-21, True), (-20, False), (0, False), (20, False), (21, True)])
def test_a_hessian_is_scaled_from_a_million_on(exponent, own):
    # frexp: a mantissa from 1/2 to 1.
    assert WorkingHessian.of(0.75 * 2.0**exponent * torch.eye(3), torch.float32).unit == (2.0**exponent if own else 1)


def test_a_hessian_of_ordinary_scale_is_not_copied():
    given = torch.eye(6)
    assert WorkingHessian.of(given, torch.float32)[slice(2, 4), slice(0, 4)].data_ptr() == given[2:, 0:].data_ptr()


def test_it_is_as_long_as_the_hessian():
    assert len(WorkingHessian.of(torch.eye(6), torch.float32)) == 6
