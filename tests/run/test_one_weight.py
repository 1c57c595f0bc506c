"""What solving one weight holds and waits for, counted in the operations that torch runs."""

import pytest
import torch
from tests.problems import correlated_inputs
from tests.watched import LiveBytes, Waits

from hessquant.capture.stops import stops_of
from hessquant.config import Config
from hessquant.core import factor as factoring
from hessquant.core import gram, refine
from hessquant.core.hessian import HessianAccumulator
from hessquant.kernels import twin
from hessquant.records import GridSpec, Location, Target
from hessquant.run import solve as solving
from hessquant.run.solve import TargetSolver

ROWS = 4


def solver_of(columns, config, group_size, kind="w", members=1):
    """A solver of some weights that share their inputs; `kind` "experts": of a module's stacked experts."""
    names = [f"m.experts.{index}.{kind}" for index in range(members)]
    spec = GridSpec(config.bits, group_size)
    if kind == "experts":
        locations = [Location("m.experts.w", ROWS, piece=index, stacked=True) for index in range(members)]
        leaders, parameters = names, {"m.experts.w": torch.randn(members, ROWS, columns)}
    else:
        locations, leaders = [Location(name, ROWS) for name in names], [names[0]] * members
        parameters = {name: torch.randn(ROWS, columns) for name in names}
    targets = [
        Target(name, (location,), 0, ROWS, columns, spec, False, leader)
        for name, location, leader in zip(names, locations, leaders, strict=True)
    ]
    (stop,) = stops_of(targets)
    return TargetSolver(targets, parameters, config, lambda _: None), stop


def inputs_of(stop, columns):
    """Inputs of each of a stop's groups."""
    return [correlated_inputs(columns, columns, seed).float() for seed in range(len(stop.groups))]


def statistics_of(stop, inputs):
    """Their statistics, by the groups' leaders."""
    statistics = {}
    for group, seen in zip(stop.groups, inputs, strict=True):
        accumulator = HessianAccumulator()
        accumulator.add(seen)
        statistics[group.leader] = accumulator.take()
    return statistics


@pytest.fixture
def small_pieces(monkeypatch):
    """Whatever is made in pieces is made in small ones."""
    monkeypatch.setattr(factoring, "_CHUNK", 1 << 11)
    monkeypatch.setattr(refine, "_STRIP", 32)
    monkeypatch.setattr(gram, "_DIAGONAL_TILE", 32)
    gram.lower_tiles.cache_clear()
    yield
    gram.lower_tiles.cache_clear()


SETTINGS = [
    {},
    {"refinement_rounds": 2},
    {"scales": "dynamic", "order": "group"},
    {"order": "natural", "scale_search": False},
]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_float64_matrix_besides_the_hessian_is_all_that_is_held(settings, group_size):
    columns = 320
    solver, stop = solver_of(columns, Config(block_size=16, **settings), group_size, members=2)
    inputs = inputs_of(stop, columns)
    with LiveBytes() as live:
        solver.quantize(stop, statistics_of(stop, inputs))
    held = live.peak / columns**2
    assert len(solver.records) == 2
    # The Hessian in float32, and a float64 matrix where it is factored and M is in from then on. The rest is weights,
    # vectors and pieces; another matrix in float32 would be 16.
    assert 12 <= held < 13.5


@pytest.mark.usefixtures("small_pieces")
def test_an_experts_sum_is_let_go_before_its_hessian_is_factored():
    columns, experts = 256, 3
    solver, stop = solver_of(columns, Config(block_size=16), 16, "experts", experts)
    inputs = inputs_of(stop, columns)
    with LiveBytes() as live:
        solver.quantize(stop, statistics_of(stop, inputs))
    assert len(solver.records) == experts
    # All experts' sums but for the first, that of all, a Hessian, and its factor.
    assert live.peak / columns**2 < 4 * (experts - 1) + 4 + 12 + 2


def test_a_stops_statistics_are_taken_out_and_left_as_they_were():
    solver, stop = solver_of(32, Config(), 16)
    statistics = statistics_of(stop, inputs_of(stop, 32))
    seen = statistics[stop.leader]
    before = seen.sum.clone()
    solver.quantize(stop, statistics)
    assert statistics == {}
    assert torch.equal(seen.sum, before)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_host_does_not_wait_for_columns(settings, monkeypatch):
    # The kernels of accelerators; those of the CPU wait for nothing.
    monkeypatch.setattr(solving, "kernels_for", lambda *_: solving.gptq.Kernels(twin.sweep_block, twin.search_scales))
    waits = {}
    for members in (1, 2):
        for columns in (32, 128):
            solver, stop = solver_of(columns, Config(block_size=16, **settings), columns // 2, members=members)
            statistics = statistics_of(stop, inputs_of(stop, columns))
            with Waits() as found:
                solver.quantize(stop, statistics)
            waits[members, columns] = found.count
    # Dynamic scales are looked at once per group, of which there are two in either.
    assert waits[1, 32] == waits[1, 128]
    assert waits[2, 32] == waits[2, 128]
    # For a factor and for a weight.
    each = waits[2, 32] - waits[1, 32]
    assert waits[1, 32] - each <= 10
    assert each <= 14
