"""The fused kernels against the plain twin: equal codes, not close ones."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.problems import ORDERS, random_layer

from hessquant.core.factor import factorize
from hessquant.core.gptq import sweep
from hessquant.core.grid import E2M1, FLOAT_GRIDS, decode, encode, min_max, scale_factors, with_global_scale
from hessquant.kernels import cpu, twin
from hessquant.kernels.dispatch import kernels_for
from hessquant.records import GridSpec


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 150),
    st.sampled_from([(64, 16), (60, 20), (96, 96)]),
    ORDERS,
    st.integers(2, 8),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 999),
)
def test_the_fused_kernels_give_the_twins_codes_and_scales(rows, shape, order, bits, symmetric, dtype, seed):
    columns, group_size = shape
    weight, hessian = random_layer(rows, columns, seed)
    weight = weight.to(dtype)
    spec = GridSpec(bits=bits, symmetric=symmetric, group_size=group_size)
    factor = factorize(hessian, damping=0.01, order=order, group_width=group_size)
    importance = factor.importance.to(dtype)
    fused = cpu.search_scales(weight.T.contiguous(), importance, spec, scale_factors(spec))
    plain = twin.search_scales(weight.T.contiguous(), importance, spec, scale_factors(spec))
    assert torch.equal(fused[0], plain[0])
    assert torch.equal(fused[1], plain[1])
    grid = min_max(weight, spec)
    assert torch.equal(
        sweep(weight, factor, grid, block_size=32, kernel=cpu.sweep_block),
        sweep(weight, factor, grid, block_size=32, kernel=twin.sweep_block),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 150),
    st.sampled_from(sorted(FLOAT_GRIDS)),
    ORDERS,
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1e-3, 1.0, 300.0]),
    st.integers(0, 999),
)
def test_the_fused_kernels_give_the_twins_codes_and_scales_of_floats(rows, name, order, dtype, size, seed):
    weight, hessian = random_layer(rows, 64, seed)
    weight = (size * weight).to(dtype)
    spec = with_global_scale(FLOAT_GRIDS[name], float(weight.abs().max()))
    factor = factorize(hessian, damping=0.01, order=order, group_width=spec.group_size)
    given = (weight.T.contiguous(), factor.importance.to(dtype), spec, scale_factors(spec))
    found, plain = cpu.search_scales(*given), twin.search_scales(*given)
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[1], plain[1])
    # Ranges too small for some weights, so that codes meet their limits.
    grid = min_max(0.6 * weight, spec)
    fused, slow = (sweep(weight, factor, grid, block_size=24, kernel=of.sweep_block) for of in (cpu, twin))
    assert torch.equal(fused, slow)
    assert {1, 15} & set(fused.unique().tolist())


@pytest.mark.parametrize("kernel", [twin.sweep_block, cpu.sweep_block])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_between_floats_go_to_the_one_whose_last_digit_is_zero(kernel, dtype):
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]], dtype=dtype)
    beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (0.0, 9.0)]
    targets = torch.cat([ties, -ties, *beside, torch.tensor([[6.9, 7.1, 1e30, -1e30]], dtype=dtype)], 1)
    ones, group = torch.ones_like(targets), torch.zeros(1, dtype=torch.int64)
    given = (targets, ones[:, :1].contiguous(), torch.zeros_like(targets), ones, 8 * ones, group)
    codes, errors = kernel(*given, FLOAT_GRIDS["mxfp4"])
    even = [0, 2, 2, 4, 4, 6, 6]
    below, above = [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]
    ranks = [*even, *(-rank for rank in even), *below, *above, 7, 7, 7, -7]
    assert (codes.int() - 8).tolist() == [ranks]
    values = torch.tensor([E2M1[abs(rank)] * (-1 if rank < 0 else 1) for rank in ranks], dtype=dtype)
    assert torch.equal(errors, targets - values)


def test_the_search_takes_the_candidate_with_the_least_weighted_error():
    weight, _ = random_layer(5, 32, seed=1)
    importance = torch.rand(32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    spec = GridSpec(bits=3, group_size=8)
    scales, _ = twin.search_scales(weight.T.contiguous(), importance, spec, scale_factors(spec))

    def losses(grid):
        error = weight - decode(encode(weight, grid), grid, torch.float64)
        return (importance * error**2).view(5, 4, 8).sum(-1)

    plain = min_max(weight, spec)
    candidates = []
    for factor in scale_factors(spec):
        shrunk = type(plain)(spec, (plain.scales.double() * factor).to(torch.float16), plain.zeros)
        candidates.append(losses(shrunk))
    found = losses(type(plain)(spec, scales.T.contiguous(), plain.zeros))
    best = torch.stack(candidates).amin(0)
    # Candidates are rounded from the unrounded min-max scale, so the last bit may differ from the list above.
    torch.testing.assert_close(found, best, rtol=0.02, atol=1e-6)
    assert (found < losses(plain)).any()


@pytest.mark.parametrize("kernel", [twin.sweep_block, cpu.sweep_block])
def test_the_sweep_leaves_what_it_is_given_as_it_was(kernel):
    weight, hessian = random_layer(3, 8, seed=4)
    lower = factorize(hessian, damping=0.01, order="natural", group_width=8).lower
    ones = torch.ones(1, 3, dtype=torch.float64)
    given = (weight.T.contiguous(), lower, torch.zeros(8, 3, dtype=torch.float64), ones, 8 * ones)
    before = [tensor.clone() for tensor in given]
    kernel(*given, torch.zeros(8, dtype=torch.int64), GridSpec(4))
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))


@pytest.mark.parametrize("search", [twin.search_scales, cpu.search_scales])
def test_of_candidates_that_are_alike_the_search_takes_the_first(search):
    weight, _ = random_layer(3, 8, seed=3)
    spec = GridSpec(bits=4, group_size=4)
    scales, zeros = search(weight.T.contiguous(), torch.zeros(8, dtype=torch.float64), spec, scale_factors(spec))
    plain = min_max(weight, spec)
    assert torch.equal(scales.T, plain.scales)
    assert torch.equal(zeros.T, plain.zeros)


@pytest.mark.parametrize(("weights", "module"), [(1, twin), (1 << 20, cpu)])
def test_dispatch_is_by_size_on_the_cpu(weights, module):
    assert kernels_for(torch.device("cpu"), weights).sweep_block is module.sweep_block


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_other_devices_get_the_plain_kernels(device):
    assert kernels_for(torch.device(device), 1 << 20).search_scales is twin.search_scales


def test_gpus_get_the_plain_kernels_where_triton_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert kernels_for(torch.device("cuda"), 1 << 20).sweep_block is twin.sweep_block


def test_the_fused_kernels_keep_to_torchs_thread_count():
    # In a process of its own: numba starts its threads once.
    program = """
import torch
torch.set_num_threads(1)
from hessquant import solve
solve(torch.randn(256, 256), torch.eye(256))
import numba
print(torch.get_num_threads(), numba.get_num_threads())
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "1"]
