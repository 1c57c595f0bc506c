"""What a plan counts for solving a weight, against the tensors that solving it makes."""

import pytest
import torch
from tests.problems import correlated_inputs
from tests.watched import LiveBytes

from hessquant.config import Config
from hessquant.core import factor as factoring
from hessquant.core import gptq, objective, refine
from hessquant.core import hessian as summing
from hessquant.core.hessian import HessianAccumulator
from hessquant.kernels import cpu
from hessquant.place import HOST, Place
from hessquant.planning.work import work
from hessquant.records import GridSpec, Location, Target

KERNELS = gptq.Kernels(cpu.sweep_block, cpu.search_scales)


def target(rows, columns, group_size):
    return Target("w", (Location("w", rows),), 0, rows, columns, GridSpec(4, group_size), False, "w")


def held(rows, columns, group_size, config):
    """Bytes that are alive at most besides the weight and the sum that it is solved from."""
    spec, weight, accumulator = GridSpec(4, group_size), torch.randn(rows, columns), HessianAccumulator()
    accumulator.add(correlated_inputs(columns, columns, 0).float())
    statistics = accumulator.take()
    with LiveBytes() as live:
        mean = summing.hessian(statistics)
        width = spec.width(columns)
        factor = factoring.factorize(mean, damping=0.01, order=config.order, group_width=width, dtype=torch.float32)
        gptq.solve(weight, mean, factor, spec, config, KERNELS)
    return live.peak


@pytest.mark.parametrize("shape", [(64, 512), (512, 512), (2048, 256)])
@pytest.mark.parametrize("group_size", [16, 64, -1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"refinement_rounds": 1}, {"scales": "dynamic", "order": "group"}, {"scale_search": False}],
    ids=str,
)
def test_the_estimate_covers_what_is_held_within_a_quarter(shape, group_size, settings, monkeypatch):
    monkeypatch.setattr(factoring, "_CHUNK", 1 << 12)
    monkeypatch.setattr(objective, "_CHUNK", 1 << 12)
    monkeypatch.setattr(refine, "_STRIP", 32)
    config = Config(block_size=32, **settings)
    found, estimate = held(*shape, group_size, config), work(target(*shape, group_size), config, HOST)
    assert found <= 1.02 * estimate
    assert estimate <= 1.25 * found


def test_a_weight_of_16_bits_is_counted_with_its_copy():
    of_one = target(512, 64, 16)
    half = Place(HOST.device, torch.bfloat16)
    assert work(of_one, Config(), half) - work(of_one, Config(), HOST) == 4 * 512 * 64


def test_the_widest_weight_of_a_70b_model_is_solved_within_24_gb():
    of_one = target(8192, 28672, 128)
    for place in (HOST, Place(HOST.device, torch.bfloat16)):
        for rounds in (0, 1):
            with_itself = work(of_one, Config(refinement_rounds=rounds), place) + 8192 * 28672 * place.dtype.itemsize
            assert with_itself < 16e9
