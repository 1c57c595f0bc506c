"""The mathematics on an accelerator: it stays where its inputs are, and gives what it gives on the CPU."""

from dataclasses import fields, is_dataclass

import pytest
import torch
from tests.problems import correlated_inputs, random_layer

from hessquant.capture.stops import stops_of
from hessquant.config import Config
from hessquant.core import hessian, obq
from hessquant.core.experts import shrink
from hessquant.core.factor import effective_rank, factorize
from hessquant.core.grid import min_max
from hessquant.core.hessian import HessianStatistics, first_token_weights
from hessquant.errors import NonFiniteError
from hessquant.kernels.dispatch import solve
from hessquant.records import GridSpec, Location, Target
from hessquant.run.solve import TargetSolver

CONFIGS = {
    "default": Config(bits=3, group_size=16),
    "asymmetric": Config(bits=3, group_size=16, symmetric=False, order="natural"),
    "dynamic": Config(bits=3, group_size=16, order="group", scales="dynamic", block_size=8),
    "refined": Config(bits=3, group_size=16, refinement_rounds=2, scale_search=False, block_size=8),
    "min-max": Config(bits=4, group_size=-1, scale_search=False, refinement_rounds=0),
}


def assert_same(there, here, device):
    """That results are equal, and all their tensors on the device."""
    if isinstance(here, torch.Tensor):
        assert there.device == device
        assert torch.equal(there.cpu(), here)
    elif is_dataclass(here):
        for field in fields(here):
            assert_same(getattr(there, field.name), getattr(here, field.name), device)
    elif isinstance(here, tuple):
        for one, other in zip(there, here, strict=True):
            assert_same(one, other, device)
    else:
        assert there == here


def layer(rows, columns, dtype=torch.float32):
    """A weight and a Hessian with a dead column."""
    weight, matrix = random_layer(rows, columns, 3)
    matrix[:, 3] = matrix[3] = 0
    return weight.to(dtype), matrix.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_is_solved_where_it_is(name, dtype, accelerator):
    weight, matrix = layer(5, 32, dtype)
    there = weight.to(accelerator.device), matrix.to(accelerator.device)
    assert_same(solve(*there, CONFIGS[name]), solve(weight, matrix, CONFIGS[name]), accelerator.device)
    assert torch.equal(there[0].cpu(), weight)


@pytest.mark.parametrize("name", ["default", "refined", "min-max"])
def test_no_column_and_no_row_waits_for_the_host(name, accelerator):
    waits = []
    for rows, columns in ((4, 32), (4, 96), (12, 32)):
        weight, matrix = (tensor.to(accelerator.device) for tensor in layer(rows, columns))
        accelerator.waits.clear()
        solve(weight, matrix, CONFIGS[name])
        waits.append(dict(accelerator.waits))
    assert waits[0] == waits[1] == waits[2]


def test_a_weight_and_a_hessian_on_two_devices_are_not_solved(accelerator):
    weight, matrix = layer(4, 32)
    with pytest.raises(RuntimeError, match="same device"):
        solve(weight.to(accelerator.device), matrix)


def test_statistics_are_summed_where_the_inputs_are(accelerator):
    inputs, device = correlated_inputs(40, 200, 0), accelerator.device
    weights = first_token_weights(10)
    assert_same(weights.values(40, device), weights.values(40), device)
    here = hessian.add(HessianStatistics.empty(200, torch.float64), inputs, weights)
    there = hessian.add(HessianStatistics.empty(200, torch.float64, device), inputs.to(device), weights)
    assert (there.weight_sum, there.token_count) == (here.weight_sum, here.token_count)
    mean = hessian.hessian(here)
    assert_same(hessian.hessian(there), mean, device)
    assert_same(shrink([there, None], hessian.hessian(there)), shrink([here, None], mean), device)
    factors = [factorize(of, damping=0.01, order="activation", group_width=8) for of in (mean.to(device), mean)]
    assert_same(*factors, device)
    assert effective_rank(factors[0], mean.to(device)) == effective_rank(factors[1], mean)


def test_no_token_waits_for_the_host(accelerator):
    waits = []
    for tokens in (20, 80):
        inputs = correlated_inputs(tokens, 16, 0).to(accelerator.device)
        accelerator.waits.clear()
        hessian.add(HessianStatistics.empty(16, torch.float64, inputs.device), inputs)
        waits.append(accelerator.waited())
    assert 0 < waits[0] == waits[1]


def test_what_is_not_finite_is_named(accelerator):
    weight, matrix = (tensor.to(accelerator.device) for tensor in layer(4, 32))
    weight[2, 5] = torch.nan
    with pytest.raises(NonFiniteError, match="row 2, column 5 is nan"):
        solve(weight, matrix)
    with pytest.raises(NonFiniteError, match="token 2, channel 5 is nan"):
        hessian.add(HessianStatistics.empty(32, device=accelerator.device), weight)


def test_the_textbook_algorithms_run_there_too(accelerator):
    weight, matrix = layer(2, 8)
    spec = GridSpec(bits=3, group_size=4)
    there = weight.to(accelerator.device), matrix.to(accelerator.device)
    for algorithm in (obq.gptq_reference, obq.obq):
        here = algorithm(weight, matrix, min_max(weight, spec))
        assert_same(algorithm(*there, min_max(there[0], spec)), here, accelerator.device)


def test_experts_that_no_token_reached_are_rounded_where_they_are(accelerator):
    targets = [
        Target(f"e{n}", (Location("m.w", 8, n, stacked=True),), 0, 8, 16, GridSpec(4, 8), False, f"e{n}")
        for n in range(2)
    ]
    weights = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    solved = []
    for place in (weights.device, accelerator.device):
        parameters = {"m.w": weights.to(place, copy=True)}
        solver = TargetSolver(targets, parameters, Config(), lambda _: None)
        solver.quantize(stops_of(targets)[0], {})
        assert parameters["m.w"].device == place
        assert solver.quantized["e1"].codes.device == weights.device
        solved.append(parameters["m.w"].cpu())
    assert torch.equal(*solved)
