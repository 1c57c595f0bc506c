"""What a plan counts for solving a weight, against the tensors that solving it makes."""

from dataclasses import replace

import pytest
import torch
from tests.problems import correlated_inputs
from tests.watched import LiveBytes

from hessquant.config import Config
from hessquant.core import factor as factoring
from hessquant.core import gptq, objective, refine
from hessquant.core import hessian as summing
from hessquant.core.hessian import HessianAccumulator
from hessquant.kernels import cpu, twin
from hessquant.place import HOST, Place
from hessquant.planning import work as working
from hessquant.planning.work import at_once, work, work_together
from hessquant.records import GridSpec, Location, Target

KERNELS = gptq.Kernels(cpu.sweep_block, cpu.search_scales)
PLAIN = gptq.Kernels(twin.sweep_block, twin.search_scales)

DEVICE = Place(torch.device("xpu"), torch.float32)
"""An accelerator that is not there: what is counted follows from its kind alone."""


def target(rows, columns, group_size):
    return Target("w", (Location("w", rows),), 0, rows, columns, GridSpec(4, group_size), False, "w")


def held(rows, columns, group_size, config, kernels=KERNELS):
    """Bytes that are alive at most besides the weight and the sum that it is solved from."""
    spec, weight, accumulator = GridSpec(4, group_size), torch.randn(rows, columns), HessianAccumulator()
    accumulator.add(correlated_inputs(columns, columns, 0).float())
    statistics = accumulator.take()
    with LiveBytes() as live:
        mean = summing.hessian(statistics)
        width = spec.width(columns)
        factor = factoring.factorize(mean, damping=0.01, order=config.order, group_width=width, dtype=torch.float32)
        gptq.solve(weight, mean, factor, spec, config, kernels)
    return live.peak


@pytest.fixture
def small_pieces(monkeypatch):
    """Whatever is made in pieces is made in small ones."""
    monkeypatch.setattr(factoring, "_CHUNK", 1 << 12)
    monkeypatch.setattr(objective, "_CHUNK", 1 << 12)
    monkeypatch.setattr(refine, "_STRIP", 32)


@pytest.fixture
def device_of(monkeypatch):
    """Says what memory the accelerator has, and whether Triton compiles for it."""

    def device_of(memory=0, triton=False):
        monkeypatch.setattr(working, "device_memory", lambda device: memory)
        monkeypatch.setattr(working, "has_triton", lambda device: triton)
        return DEVICE

    return device_of


@pytest.mark.parametrize("shape", [(64, 512), (512, 512), (2048, 256)])
@pytest.mark.parametrize("group_size", [16, 64, -1])
@pytest.mark.parametrize(
    "settings",
    [{}, {"refinement_rounds": 1}, {"scales": "dynamic", "order": "group"}, {"scale_search": False}],
    ids=str,
)
@pytest.mark.usefixtures("small_pieces")
def test_the_estimate_covers_what_is_held_within_a_quarter(shape, group_size, settings):
    config = Config(block_size=32, **settings)
    found, estimate = held(*shape, group_size, config), work(target(*shape, group_size), config, HOST)
    assert found <= 1.02 * estimate
    assert estimate <= 1.25 * found


@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("settings", [{}, {"refinement_rounds": 1}, {"scale_search": False}], ids=str)
@pytest.mark.usefixtures("small_pieces")
def test_on_an_accelerator_what_its_kernels_hold_is_counted(group_size, settings, device_of):
    config = Config(block_size=32, **settings)
    found = held(256, 128, group_size, config, PLAIN)
    estimate = work(target(256, 128, group_size), config, device_of())
    assert found <= 1.02 * estimate
    assert estimate <= 1.35 * found


def test_a_kernel_of_tritons_takes_all_candidates_at_once(device_of):
    one, config = target(512, 512, 16), Config(block_size=32)
    of_search = work(one, config, device_of(triton=True)) - work(one, replace(config, scale_search=False), DEVICE)
    # 26 scales of 16 weights, each with what it is made of.
    assert of_search == pytest.approx(512 * 512 * 26 * 20 / 16, rel=0.35)
    assert work(one, config, device_of(triton=False)) < work(one, config, device_of(triton=True))


def test_experts_are_solved_together_as_far_as_a_sixteenth_of_the_memory_goes(device_of):
    one, config = target(768, 2048, 128), Config()
    each = work(one, config, device_of(triton=True))
    assert 12 * 2048**2 < each < 150e6
    for memory, together in ((0, 1), (16 * each - 1, 1), (16 * 7 * each, 7), (16 * 8 * each - 1, 7)):
        assert at_once(one, config, device_of(memory, triton=True)) == together
    assert at_once(one, config, HOST) == 1
    # All of Qwen3-30B-A3B's 128 on a card of 141 GB, and some 20 on one of 24.
    assert 128 <= at_once(one, config, device_of(141 * 10**9, triton=True)) <= 140
    assert 18 <= at_once(one, config, device_of(24 * 10**9, triton=True)) <= 24


def test_a_plan_counts_as_many_experts_as_there_are_and_are_solved_together(device_of):
    one, config = target(64, 128, 32), Config()
    each = work(one, config, device_of())
    place = device_of(memory=16 * 5 * each)
    for experts, together in ((2, 2), (5, 5), (9, 5)):
        beside = together * 4 * 64 * 128 + 16 * together * 128**2
        assert work_together(one, experts, config, place) == together * each + beside
    assert work_together(one, 1, config, place) == each
    assert work_together(one, 9, config, HOST) == work(one, config, HOST)


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
