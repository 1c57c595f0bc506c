"""Experts on an accelerator are solved in batches, each to what it is by itself.

Products of a batch are single ones with the CPU's libraries, or differ from them in the last digits: then so do losses.
"""

from dataclasses import asdict, replace

import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.capture.stops import stops_of
from hessquant.config import Config
from hessquant.core import hessian
from hessquant.core.gptq import Kernels
from hessquant.core.hessian import HessianStatistics
from hessquant.errors import FactorizationError, GridError, NonFiniteError
from hessquant.kernels import twin
from hessquant.records import GridSpec, Location, Target
from hessquant.run import solve as solving
from hessquant.run.solve import TargetSolver

ROWS, COLUMNS = 6, 16
HOST = torch.device("cpu")


def experts(count):
    """Each with a gate and an up projection in one stack, and a down projection in another."""
    found = []
    for n in range(count):
        for at, kind in enumerate(("gate", "up")):
            location = Location("m.gate_up", ROWS, n, stacked=True, first_row=at * ROWS)
            found.append(Target(f"e{n}.{kind}", (location,), 0, ROWS, COLUMNS, GridSpec(4, 8), False, f"e{n}.gate"))
        location = Location("m.down", ROWS, n, stacked=True)
        found.append(Target(f"e{n}.down", (location,), 0, ROWS, COLUMNS, GridSpec(4, 8), False, f"e{n}.down"))
    return found


class Mixture:
    """A module of experts of which each saw other tokens, the third none."""

    def __init__(self, count=5, change=lambda parameters: None):
        generator = torch.Generator().manual_seed(0)
        self.targets = experts(count)
        self.parameters = {
            "m.gate_up": torch.randn(count, 2 * ROWS, COLUMNS, generator=generator),
            "m.down": torch.randn(count, ROWS, COLUMNS, generator=generator),
        }
        change(self.parameters)
        leaders = dict.fromkeys(target.shares_input_with for target in self.targets)
        inputs = {name: correlated_inputs(20 + 7 * seed, COLUMNS, seed).float() for seed, name in enumerate(leaders)}
        self.inputs = {name: seen for name, seen in inputs.items() if not name.startswith("e2.")}

    def solved(self, device, config=None, begin=lambda: None):
        """A solver after all of it, and the parameters as they are then; `begin` is called before it solves."""
        parameters = {name: tensor.to(device, copy=True) for name, tensor in self.parameters.items()}
        told = []
        solver = TargetSolver(self.targets, parameters, config or Config(), told.append)
        empty = HessianStatistics.empty(COLUMNS, device=device)
        statistics = {name: hessian.add(empty, seen.to(device)) for name, seen in self.inputs.items()}
        (stop,) = stops_of(self.targets)
        begin()
        solver.quantize(stop, statistics)
        assert told == solver.records
        assert statistics == {}
        return solver, {name: tensor.cpu() for name, tensor in parameters.items()}


def assert_same(there, here):
    """That what was solved there is what was solved here, code for code and in the same order."""
    assert list(there[0].quantized) == list(here[0].quantized)
    for name, expected in here[0].quantized.items():
        found = there[0].quantized[name]
        for one, other in ((found.codes, expected.codes), *zip(parts(found), parts(expected), strict=True)):
            assert one.device == HOST
            assert torch.equal(one, other), name
    for name, expected in here[1].items():
        assert torch.equal(there[1][name], expected)
    for one, other in zip(there[0].records, here[0].records, strict=True):
        told, expected = (asdict(replace(record, seconds=0.0)) for record in (one, other))
        losses = [name for name, value in expected.items() if isinstance(value, float)]
        assert [told.pop(name) for name in losses] == pytest.approx([expected.pop(name) for name in losses], rel=1e-5)
        assert told == expected


def parts(quantized):
    return quantized.grid.scales, quantized.grid.zeros


@pytest.fixture
def sweeps(monkeypatch):
    """Shapes of what was swept."""
    shapes = []

    def sweep_block(weight, *rest):
        shapes.append(tuple(weight.shape))
        return twin.sweep_block(weight, *rest)

    monkeypatch.setattr(solving, "kernels_for", lambda *_: Kernels(sweep_block, twin.search_scales))
    return shapes


SETTINGS = [
    {},
    {"refinement_rounds": 1, "block_size": 4},
    {"scales": "dynamic", "order": "group"},
    {"order": "natural", "scale_search": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_they_are_what_the_cpu_makes_of_each(settings, accelerator, sweeps):
    config = Config(**settings)
    here = Mixture().solved(HOST, config)
    assert {len(shape) for shape in sweeps} == {2}
    one_by_one = len(sweeps)
    sweeps.clear()
    assert_same(Mixture().solved(accelerator.device, config), here)
    assert {shape[0] for shape in sweeps} == {5}
    assert 5 * len(sweeps) == one_by_one


def test_more_experts_neither_make_the_host_wait_more_nor_start_more_kernels(accelerator, sweeps):
    waits = []
    for count in (4, 12):
        Mixture(count).solved(accelerator.device, begin=accelerator.waits.clear)
        waits.append({line: times for line, times in accelerator.waits.items() if "test_batches" not in line})
    assert len(sweeps) == 2 * 3
    assert waits[0] == waits[1]


@pytest.mark.parametrize(("together", "sizes"), [(1, []), (2, [2, 2]), (3, [3, 2]), (4, [4])])
def test_pieces_are_no_larger_than_there_is_room_for(together, sizes, accelerator, sweeps, monkeypatch):
    here = Mixture().solved(HOST)
    sweeps.clear()
    monkeypatch.setattr(solving, "at_once", lambda *_: together)
    assert_same(Mixture().solved(accelerator.device), here)
    assert [shape[0] for shape in sweeps if len(shape) == 3] == [size for size in sizes for _ in range(2)] + sizes


@pytest.fixture
def odd_ones(monkeypatch):
    """Of whatever experts are solved, the second has a dead column, and the fourth needs more damping."""
    shrink = solving.shrink

    def changed(seen, common):
        means, shares = shrink(seen, common)
        for mean, own in zip(means, seen, strict=True):
            if own is not None and own.token_count in (20 + 7 * 2, 20 + 7 * 3):
                mean[5] = mean[:, 5] = 0
            if own is not None and own.token_count in (20 + 7 * 6, 20 + 7 * 7):
                mean.fill_(1)
        return means, shares

    monkeypatch.setattr(solving, "shrink", changed)


@pytest.mark.usefixtures("odd_ones")
def test_one_with_dead_columns_and_one_that_needs_more_damping_are_solved_by_themselves(accelerator, sweeps):
    config = Config(damping=0.0)
    here = Mixture().solved(HOST, config)
    sweeps.clear()
    there = Mixture().solved(accelerator.device, config)
    assert_same(there, here)
    known = {record.name: (record.dead_columns, record.factorizations > 1) for record in there[0].records}
    assert {name for name, (dead, _) in known.items() if dead} == {"e1.gate", "e1.up", "e1.down"}
    assert {name for name, (_, raised) in known.items() if raised} == {"e3.gate", "e3.up", "e3.down"}
    assert [shape[0] for shape in sweeps if len(shape) == 3] == [3] * 3
    assert len(sweeps) == 3 + 2 * 3


def test_those_with_other_settings_are_another_batch(accelerator, sweeps):
    def mixture():
        made = Mixture()
        made.targets = [
            replace(target, grid=GridSpec(3, 16)) if target.name in ("e1.up", "e4.up", "e0.down") else target
            for target in made.targets
        ]
        return made

    for settings in ({}, {"order": "group"}):
        here = mixture().solved(HOST, Config(**settings))
        sweeps.clear()
        assert_same(mixture().solved(accelerator.device, Config(**settings)), here)
        assert sorted(shape[0] for shape in sweeps if len(shape) == 3) == [2, 2, 3, 3, 4]


def spoil(kind, *at, value):
    def change(parameters):
        parameters[kind][at] = value

    return change


def test_the_expert_that_fails_is_named(accelerator):
    for change, error, message in (
        (spoil("m.gate_up", 3, 7, 2, value=torch.nan), NonFiniteError, "e3.up: weight at row 1, column 2 is nan"),
        (spoil("m.down", 4, 0, 9, value=1e9), GridError, "e4.down: a scale of "),
    ):
        for device in (HOST, accelerator.device):
            with pytest.raises(error, match=f"^{message}"):
                Mixture(5, change).solved(device)


def test_so_is_one_whose_hessian_cannot_be_factored(accelerator, monkeypatch):
    for bad, error in ((9.0, FactorizationError), (torch.inf, NonFiniteError)):
        with monkeypatch.context() as patch:
            shrink = solving.shrink

            def changed(seen, common, bad=bad, shrink=shrink):
                means, shares = shrink(seen, common)
                means[-2, 1, 0] = means[-2, 0, 1] = bad * means[-2].diagonal().amax()
                return means, shares

            patch.setattr(solving, "shrink", changed)
            with pytest.raises(error, match=r"^e3\.gate: the Hessian "):
                Mixture().solved(accelerator.device)
