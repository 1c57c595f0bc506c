"""The Triton kernels against the twin, code for code, in the interpreter or on a GPU; and compiled for other GPUs."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device import DEVICE, INTERPRETED, there
from tests.problems import ORDERS, random_layer

from hessquant.config import Config
from hessquant.core import gptq
from hessquant.core.factor import factorize
from hessquant.core.gptq import Kernels, sweep
from hessquant.core.grid import FLOAT_GRIDS, min_max, scale_factors, with_global_scale
from hessquant.errors import GridError
from hessquant.kernels import twin
from hessquant.kernels.dispatch import kernels_for
from hessquant.records import GridSpec

if sys.platform != "linux":
    pytest.skip("there is no Triton but for Linux", allow_module_level=True)

from hessquant.kernels import triton as fused

ROOT = Path(__file__).parents[2]
DTYPES = st.sampled_from([torch.float32, torch.float64])
BITS = st.sampled_from([2, 3, 4, 8])
# Rows of less than a tile, of some, and of some and a piece. The interpreter is slow: large shapes are for a GPU.
ROWS = st.sampled_from([1, 8, 11] if INTERPRETED else [1, 8, 11, 1003])
SWEPT = [(40, 8), (36, 12), (17, -1), (3, 1)] + ([] if INTERPRETED else [(384, 128)])
BLOCKS = st.integers(1, 41) if INTERPRETED else st.one_of(st.integers(1, 41), st.just(128))
SEARCHED = [(24, 8), (20, -1), (3, 1)] + ([] if INTERPRETED else [(384, 128)])
EXAMPLES = 12 if INTERPRETED else 40
TRITON, TWIN = Kernels(fused.sweep_block, fused.search_scales), Kernels(twin.sweep_block, twin.search_scales)


def layer(rows, columns, seed):
    """A random weight and Hessian on the device, float64."""
    return there(*random_layer(rows, columns, seed))


@pytest.fixture
def device(request):
    """An accelerator: the real one if there is to be one, or the pretended."""
    return request.getfixturevalue("accelerator").device if INTERPRETED else DEVICE


def same(found, expected):
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    ROWS,
    st.sampled_from(SWEPT),
    BLOCKS,
    ORDERS,
    BITS,
    st.booleans(),
    DTYPES,
    st.integers(0, 999),
)
def test_the_sweep_gives_the_twins_codes(rows, shape, block_size, order, bits, symmetric, dtype, seed):
    columns, group_size = shape
    weight, hessian = layer(rows, columns, seed)
    weight, spec = weight.to(dtype), GridSpec(bits, group_size, symmetric)
    factor = factorize(hessian, damping=0.01, order=order, group_width=spec.width(columns))
    # Ranges too small for some weights, so that codes meet their limits.
    grid = min_max(0.6 * weight, spec)
    assert torch.equal(
        sweep(weight, factor, grid, block_size=block_size, kernel=fused.sweep_block),
        sweep(weight, factor, grid, block_size=block_size, kernel=twin.sweep_block),
    )


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from([1, 31, 32, 65]),
    st.sampled_from(SEARCHED),
    BITS,
    st.booleans(),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    DTYPES,
    st.integers(0, 999),
)
def test_the_search_gives_the_twins_scales(rows, shape, bits, symmetric, scale_dtype, dtype, seed):
    columns, group_size = shape
    weight, hessian = layer(rows, columns, seed)
    spec = GridSpec(bits, group_size, symmetric, scale_dtype)
    given = (weight.to(dtype).T, hessian.diagonal().to(dtype), spec, scale_factors(spec))
    assert same(fused.search_scales(*given), twin.search_scales(*given))


@settings(max_examples=EXAMPLES, deadline=None)
@given(ROWS, st.sampled_from(sorted(FLOAT_GRIDS)), BLOCKS, ORDERS, DTYPES, st.integers(0, 999))
def test_floats_are_swept_and_searched_as_by_the_twin(rows, name, block_size, order, dtype, seed):
    weight, hessian = layer(rows, 32, seed)
    weight = weight.to(dtype)
    spec = replace(with_global_scale(FLOAT_GRIDS[name], float(weight.abs().max())), group_size=8)
    given = (weight.T, hessian.diagonal().to(dtype), spec, scale_factors(spec))
    assert same(fused.search_scales(*given), twin.search_scales(*given))
    factor = factorize(hessian, damping=0.01, order=order, group_width=8)
    grid = min_max(0.6 * weight, spec)
    assert torch.equal(
        sweep(weight, factor, grid, block_size=block_size, kernel=fused.sweep_block),
        sweep(weight, factor, grid, block_size=block_size, kernel=twin.sweep_block),
    )


@pytest.mark.parametrize("scales", ["static", "dynamic"])
def test_a_whole_solution_on_an_accelerator_is_the_twins(scales, device):
    weight, hessian = (tensor.to(device) for tensor in random_layer(9, 32, seed=5))
    spec = GridSpec(bits=3, group_size=16, symmetric=False)
    config = Config(bits=3, group_size=16, scales=scales, order="group", refinement_rounds=1, block_size=24)
    found, expected = (
        gptq.solve(
            weight,
            hessian,
            factorize(hessian, damping=0.01, order="group", group_width=16),
            spec,
            config,
            kernels,
        ).weight
        for kernels in (TRITON, TWIN)
    )
    assert found.codes.device == device
    assert same((found.codes, found.grid.scales), (expected.codes, expected.grid.scales))


def batch(dtype):
    """Three blocks of three weights of one shape, as the sweep takes them; each has its own order of groups."""
    weights = torch.randn(3, 20, 9, generator=torch.Generator().manual_seed(1), dtype=dtype)
    lower = torch.stack(
        [
            factorize(random_layer(1, 20, seed)[1], damping=0.01, order="natural", group_width=5).lower.to(dtype)
            for seed in range(3)
        ]
    )
    carried = weights.flip(0) / 8
    scales = weights.view(3, 4, 5, 9).abs().amax(2) / 3
    group = torch.stack([torch.randperm(20, generator=torch.Generator().manual_seed(s)) // 5 for s in range(3)])
    return there(weights, lower, carried, scales, torch.full_like(scales, 4), group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_one_shape_are_swept_in_one_launch(dtype):
    given = batch(dtype)
    each = [twin.sweep_block(*of_one, GridSpec(3)) for of_one in zip(*given, strict=True)]
    assert same(fused.sweep_block(*given, GridSpec(3)), (torch.stack(part) for part in zip(*each, strict=True)))


def test_scales_of_weights_of_one_shape_are_searched_in_one_launch():
    weights, spec = batch(torch.float32)[0], GridSpec(3, 5, False)
    importance = weights[..., 0].square()
    each = [twin.search_scales(*of_one, spec, scale_factors(spec)) for of_one in zip(weights, importance, strict=True)]
    found = fused.search_scales(weights, importance, spec, scale_factors(spec))
    assert same(found, (torch.stack(part) for part in zip(*each, strict=True)))


def test_many_candidates_are_searched_in_pieces(monkeypatch):
    weight, importance = there(random_layer(3, 20, seed=6)[0], torch.linspace(0.1, 2, 20, dtype=torch.float64))
    spec = GridSpec(bits=4, group_size=4)
    given = (weight.T, importance, spec, scale_factors(spec))
    whole = fused.search_scales(*given)
    launched = []
    search = fused._best_of
    monkeypatch.setattr(fused, "_best_of", lambda *group: launched.append(len(group[0])) or search(*group))
    monkeypatch.setattr(fused, "_CANDIDATES", 2 * 3 * len(scale_factors(spec)))
    assert same(fused.search_scales(*given), whole)
    assert launched == [2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients_round_to_the_nearest_code_and_ties_to_even(dtype):
    targets = [-1e9, -8.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.5000002, 6.5, 7.5, 2.0**22 + 0.5, 2.0**23 + 1, 1e9, 3e38]
    weight = torch.tensor([targets], dtype=dtype)
    ones = torch.ones(1, len(targets), dtype=dtype)
    group = torch.zeros(1, dtype=torch.int64)
    given = (*there(weight, ones[:, :1], torch.zeros_like(weight), ones, 8 * ones, group), GridSpec(4))
    codes, _ = fused.sweep_block(*given)
    assert codes.tolist() == [[0, 0, 6, 8, 8, 10, 10, 11, 14, 15, 15, 15, 15, 15]]
    assert same(fused.sweep_block(*given), twin.sweep_block(*given))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numbers that overflow
@pytest.mark.parametrize("importance", [0.0, 1.0])
# Squares of errors beyond float32 for all candidates, for some, and for none: losses are infinite, or not numbers.
@pytest.mark.parametrize("size", [1e30, 3e19, 1.0])
def test_losses_that_are_not_finite_are_never_the_least(size, importance):
    weight, spec = size * layer(3, 8, seed=3)[0].float(), GridSpec(4, 4, True, "float32")
    given = (weight.T, torch.full((8,), importance, device=DEVICE), spec, scale_factors(spec))
    assert same(fused.search_scales(*given), twin.search_scales(*given))


@pytest.mark.parametrize("importance", [0.0, 1e20])
def test_of_losses_that_are_alike_the_first_is_the_least(importance):
    # Squares of errors of 1e-26 are 0 in float32, whatever the columns count.
    weight, spec = 1e-25 * layer(3, 8, seed=3)[0].float(), GridSpec(4, 4, True, "float32")
    scales, _ = fused.search_scales(weight.T, torch.full((8,), importance, device=DEVICE), spec, scale_factors(spec))
    assert torch.equal(scales.T, min_max(weight, spec).scales)


def test_a_scale_that_overflows_is_refused_in_the_twins_words():
    weight, spec = torch.full((4, 2), 9e5, device=DEVICE), GridSpec(bits=2, group_size=4)
    said = []
    for search in (fused.search_scales, twin.search_scales):
        with pytest.raises(GridError) as refused:
            search(weight, torch.ones(4, device=DEVICE), spec, scale_factors(spec))
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_what_is_given_stays_as_it_was():
    given = batch(torch.float64)
    before = [tensor.clone() for tensor in given]
    fused.sweep_block(*given, GridSpec(3))
    spec = GridSpec(3, 5)
    fused.search_scales(given[0], given[2][..., 0].abs(), spec, scale_factors(spec))
    assert same(given, before)


def test_kernels_are_launched_on_the_tensors_own_device(device, monkeypatch):
    current = torch.accelerator.device_index
    asked = []
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: asked.append(index) or current(index))
    given = [tensor.to(device) for tensor in batch(torch.float32)]
    fused.sweep_block(*given, GridSpec(3))
    fused.search_scales(given[0], given[2][..., 0].abs(), GridSpec(3, 5), (1.0, 0.5))
    assert asked == [device.index] * 2


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu"])
@pytest.mark.parametrize("weights", [1, 1 << 20])
def test_devices_that_triton_compiles_for_get_its_kernels(device, weights):
    assert kernels_for(torch.device(device), weights) == TRITON


# The kernels are called as on a GPU, by their own functions; all is done but the launch.
COMPILE = """
import json
from itertools import product
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from hessquant.core.grid import FLOAT_GRIDS, scale_factors
from hessquant.kernels import triton as fused
from hessquant.records import GridSpec

class Absent:
    def __init__(self, target):
        self.target = target
    def get_current_target(self):
        return self.target
    def get_current_device(self):
        return self.target.arch
    def get_current_stream(self, device):
        return 0

run, made = JITFunction.run, []

def compiled(kernel, *args, warmup, **settings):
    code = run(kernel, *args, warmup=True, **settings)
    name = kernel.__name__ + (" of floats" if args[5] is None else "")
    made.append((name, driver.active.target.backend, str(args[0][0].dtype), dict(code.asm)))

JITFunction.run = compiled
for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    driver.set_active(Absent(target))
    for dtype, spec in product((torch.float32, torch.float64), (GridSpec(4, 64, False), FLOAT_GRIDS["mxfp4"])):
        weight, scales = torch.zeros(128, 512, dtype=dtype), torch.ones(2, 512, dtype=dtype)
        group = torch.arange(128) // 64
        fused.sweep_block(weight, torch.eye(128, dtype=dtype), weight, scales, scales, group, spec)
        fused.search_scales(weight, torch.ones(128, dtype=dtype), spec, scale_factors(spec))
print(json.dumps([(*names, asm.get("ptx", asm.get("amdgcn"))) for *names, asm in made]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Assembly by kernel, backend and dtype."""
    # In a process of its own: here all of Triton is the interpreter's.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    ended = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env={**kept, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return {tuple(names): assembly for *names, assembly in json.loads(ended.stdout)}


KERNELS = ("_sweep_block", "_search_scales", "_sweep_block of floats", "_search_scales of floats")
CASES = [(kernel, dtype) for kernel in KERNELS for dtype in ("32", "64")]


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_for_sm_90_every_operation_is_rounded_to_nearest_by_itself(compiled, kernel, dtype):
    ptx = compiled[kernel, "cuda", f"torch.float{dtype}"]
    assert not re.findall(r"\b(?:fma|mad)\.\S*f\d\d", ptx)
    operations = re.findall(rf"\b(?:add|sub|mul|div|rcp)\.\S*f{dtype}", ptx)
    assert set(operations) == {f"{name}.rn.f{dtype}" for name in ("add", "sub", "mul", "div")}
    if kernel.startswith("_sweep_block"):
        # Errors that other threads wrote are read after it.
        assert ptx.count("bar.sync") == 1


@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_for_gfx942_no_operations_are_fused_but_those_of_a_division(compiled, kernel, dtype):
    assembly = compiled[kernel, "hip", f"torch.float{dtype}"]
    divisions = assembly.count(f"v_div_fixup_f{dtype}")
    assert divisions >= 3
    assert len(re.findall(rf"v_(?:pk_)?(?:fma|fmac|mac|mad)_f{dtype}", assembly)) == 5 * divisions
