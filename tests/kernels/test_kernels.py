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
from hessquant.core.grid import decode, encode, min_max, scale_factors
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
    kernel(*given, torch.zeros(8, dtype=torch.int64), 15)
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
