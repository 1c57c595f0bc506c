import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import ORDERS, layers, random_layer

from hessquant import memory
from hessquant.core import factor as factoring
from hessquant.core.factor import column_order, effective_rank, factorize
from hessquant.core.obq import damped
from hessquant.errors import FactorizationError, NonFiniteError


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
    for order in ("activation", "group"):
        for columns, width in ((6, 2), (4096, 64), (4096, 2048)):
            assert column_order(torch.ones(columns), order, width).tolist() == list(range(columns))


@settings(max_examples=40, deadline=None)
@given(layers(), ORDERS)
def test_the_factor_is_lower_triangular_and_squares_to_the_damped_hessian(layer, order):
    _, hessian, spec = layer
    factor = factorize(hessian, damping=0.05, order=order, group_width=spec.width(len(hessian)))
    expected = damped(hessian, 0.05)[factor.order][:, factor.order]
    torch.testing.assert_close(factor.lower.T @ factor.lower, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(factor.lower, factor.lower.tril())
    assert (factor.lower.diagonal() > 0).all()
    assert (factor.attempts, factor.damping_used) == (1, 0.05)


def test_importance_is_the_factors_squared_diagonal_in_the_columns_own_order():
    _, hessian = random_layer(1, 8, 0)
    factor = factorize(hessian, damping=0.01, order="activation", group_width=8)
    for visit, column in enumerate(factor.order.tolist()):
        assert factor.importance[column] == factor.lower[visit, visit] ** 2


def test_one_vector_repeated_raises_damping_step_by_step_and_says_so():
    # CASES A2: a Hessian of rank one.
    vector = torch.randn(256, generator=torch.Generator().manual_seed(0))
    hessian = torch.outer(vector, vector).double()
    factor = factorize(hessian, damping=0.0, order="natural", group_width=256)
    assert factor.attempts > 1
    assert 0 < factor.damping_used <= 1e-4
    assert torch.isfinite(factor.lower).all()


def test_pivots_of_rounding_noise_raise_damping_and_larger_ones_do_not():
    # A power of four, so that its root is exact. LAPACK itself refuses only what is not positive.
    columns, largest = 64, 2.0**10
    noise = torch.finfo(torch.float64).eps * columns * largest
    for pivot, found in ((noise / 4, (2, 1e-6)), (noise, (2, 1e-6)), (4 * noise, (1, 0.0))):
        diagonal = torch.full((columns,), largest, dtype=torch.float64)
        diagonal[5] = pivot
        factor = factorize(torch.diag(diagonal), damping=0.0, order="natural", group_width=columns)
        assert (factor.attempts, factor.damping_used) == found


def test_a_factor_that_lapack_finds_in_rounding_noise_is_not_taken():
    # Two inputs that are the same but for the last bit of one product.
    hessian = torch.ones(2, 2, dtype=torch.float64)
    hessian[0, 0] += torch.finfo(torch.float64).eps
    assert int(torch.linalg.cholesky_ex(hessian.flip(0, 1)).info) == 0
    factor = factorize(hessian, damping=0.0, order="natural", group_width=2)
    assert factor.attempts > 1
    assert float(factor.lower.diagonal().min()) > 1e-4


def test_damping_is_raised_tenfold_until_it_is_enough():
    # Eigenvalues 2.005 and -0.005: a hundredth is enough, and a thousandth is not.
    hessian = torch.tensor([[1.0, 1.005], [1.005, 1.0]])
    for damping, attempts in ((0.001, 2), (0.0001, 3)):
        factor = factorize(hessian, damping=damping, order="natural", group_width=2)
        assert (factor.attempts, factor.damping_used) == (attempts, pytest.approx(0.01))


def test_damping_that_is_enough_is_not_raised():
    vector = torch.randn(1024, generator=torch.Generator().manual_seed(0)).double()
    factor = factorize(torch.outer(vector, vector), damping=1e-4, order="activation", group_width=1024)
    assert (factor.attempts, factor.damping_used) == (1, 1e-4)


def test_a_matrix_that_is_no_gram_matrix_is_refused_after_the_largest_damping():
    hessian = torch.tensor([[1.0, 9.0], [9.0, 1.0]])
    with pytest.raises(FactorizationError, match="damping 1:"):
        factorize(hessian, damping=0.01, order="natural", group_width=2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_with_its_channel_and_never_met_with_damping(bad):
    hessian = torch.eye(4)
    hessian[2, 3] = hessian[3, 2] = bad
    with pytest.raises(NonFiniteError, match="channel 2"):
        factorize(hessian, damping=0.01, order="natural", group_width=4)


def test_dead_columns_are_marked_and_count_as_average_ones():
    hessian = torch.diag(torch.tensor([1.0, 0.0, 3.0, 0.0]))
    factor = factorize(hessian, damping=0.0, order="activation", group_width=4)
    assert factor.dead.tolist() == [False, True, False, True]
    assert factor.importance.tolist() == pytest.approx([1.0, 2.0, 3.0, 2.0])
    assert factor.order.tolist() == [2, 0, 1, 3]


def test_dead_columns_importance_is_the_mean_of_the_live_ones():
    _, hessian = random_layer(1, 12, 2)
    hessian[[3, 8]] = 0
    hessian[:, [3, 8]] = 0
    factor = factorize(hessian, damping=0.01, order="activation", group_width=12)
    live = factor.importance[~factor.dead]
    assert factor.importance[factor.dead].tolist() == pytest.approx([live.mean().item()] * 2)
    assert live.mean() < hessian.diagonal()[~factor.dead].mean()


@pytest.mark.parametrize("dead", [[], [3], [0, 3, 8]])
@pytest.mark.parametrize(("tokens", "damping"), [(24, 0.3), (4, 0.0)], ids=["as asked for", "raised"])
def test_the_hessian_that_was_factored_is_told(dead, tokens, damping):
    _, hessian = random_layer(1, 12, 2, tokens)
    hessian[dead] = 0
    hessian[:, dead] = 0
    factor = factorize(hessian, damping=damping, order="activation", group_width=12)
    assert (factor.damping_used > damping) == (damping == 0)
    told = hessian + torch.diag(factor.added_to(hessian.diagonal()))
    torch.testing.assert_close(told, damped(hessian, factor.damping_used), rtol=1e-12, atol=1e-15)
    squared = factor.lower.T @ factor.lower
    torch.testing.assert_close(squared, told[factor.order][:, factor.order], rtol=1e-9, atol=1e-12)


def test_a_hessian_of_zeros_can_be_factored():
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    factor = factorize(zeros, damping=0.44, order="natural", group_width=3)
    assert factor.dead.all()
    torch.testing.assert_close(factor.lower, 1.2 * torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(factor.importance, torch.full((3,), 1.44, dtype=torch.float64))
    torch.testing.assert_close(factor.added_to(zeros.diagonal()), torch.full((3,), 1.44, dtype=torch.float64))


def test_the_hessian_is_left_as_it_was():
    _, hessian = random_layer(1, 6, 1)
    before = hessian.clone()
    factorize(hessian, damping=0.1, order="activation", group_width=6)
    assert torch.equal(hessian, before)


@pytest.mark.parametrize("columns", [1, 2, 7, 96])
@pytest.mark.parametrize("order", ["natural", "activation", "group"])
def test_working_in_place_gives_the_digits_of_the_plain_way(columns, order, monkeypatch):
    monkeypatch.setattr(factoring, "_CHUNK", 5)  # several chunks, the last of them shorter
    _, hessian = random_layer(1, columns, 3)
    factor = factorize(hessian.float(), damping=0.01, order=order, group_width=1)
    back = factor.order.flip(0)
    damp = 0.01 * hessian.float().diagonal().double().mean()
    reversed_hessian = hessian.float()[back][:, back].double()
    reversed_hessian.diagonal().add_(damp)
    plain = torch.linalg.cholesky(reversed_hessian, upper=True).flip(0, 1)
    torch.testing.assert_close(factor.lower, plain, rtol=1e-15, atol=0)
    single = factorize(hessian.float(), damping=0.01, order=order, group_width=1, dtype=torch.float32)
    assert torch.equal(single.lower, factor.lower.float())
    assert torch.equal(single.importance, factor.importance)
    assert torch.equal(single.diagonal, factor.lower.diagonal())


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is reset in /proc")
def test_a_factorisation_takes_one_float64_matrix():
    script = """
import torch
from hessquant.core.factor import factorize

def status(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return 1024 * int(line.split()[1])

torch.set_num_threads(1)
columns = 2048
factorize(torch.eye(64), damping=0.01, order="activation", group_width=64)
hessian = torch.ones(columns, columns)
hessian.diagonal().add_(columns)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
factorize(hessian, damping=0.01, order="activation", group_width=columns)
print((status("VmHWM") - before) / columns**2)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # 8 bytes per element, chunks, and what LAPACK works with; with a second such matrix it would be over 20.
    assert 7.5 < float(done.stdout) < 20


@pytest.mark.skipif(not memory.gives_pages_back(), reason="only Linux takes pages back at once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_half_that_the_narrowed_factor_leaves_is_the_systems_again(dtype):
    inputs = torch.randn(1600, 1536, generator=torch.Generator().manual_seed(0))
    hessian = inputs.T @ inputs
    factor = factorize(hessian, damping=0.01, order="natural", group_width=1536, dtype=dtype)
    whole = torch.tensor([], dtype=torch.float64).set_(factor.lower.untyped_storage())
    assert len(whole) == 1536**2
    # Pages that are given back hold nothing when they are next looked at.
    rest = whole[len(whole) // 2 + 512 : -512]
    assert bool((rest == 0).all()) == (dtype == torch.float32)
    expected = factorize(hessian, damping=0.01, order="natural", group_width=1536, dtype=torch.float64).lower
    assert torch.equal(factor.lower.tril(), expected.to(dtype).tril())


@pytest.mark.skipif(not memory.gives_pages_back(), reason="only Linux takes pages back at once")
def test_no_page_outside_what_is_let_go_is_touched():
    values = torch.ones(12 << 20, dtype=torch.uint8)
    begin, size = 12_345, 9 << 20
    memory.let_go(values.data_ptr() + begin, size)
    assert values[:begin].all()
    assert values[begin + size :].all()
    assert not values[begin + mmap.PAGESIZE : begin + size - mmap.PAGESIZE].any()
    memory.let_go(values.data_ptr(), memory.MAPPED_FROM - 1)
    assert values[:begin].all()
