from dataclasses import asdict, replace

import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.capture.stops import stops_of
from hessquant.config import Config
from hessquant.core import gptq, hessian
from hessquant.core.factor import effective_rank, factorize
from hessquant.core.gptq import Kernels
from hessquant.core.grid import encode, min_max
from hessquant.core.hessian import HessianStatistics
from hessquant.errors import NonFiniteError
from hessquant.kernels import twin
from hessquant.records import GridSpec, Location, Target
from hessquant.report.degraded import degradations
from hessquant.run import solve as solving
from hessquant.run.solve import TargetSolver


def target(name, rows, columns, *, leader=None, transposed=False, group_size=-1):
    return Target(
        name,
        (Location(name, rows, transposed=transposed),),
        0,
        rows,
        columns,
        GridSpec(4, group_size),
        transposed,
        leader or name,
    )


def statistics_of(inputs):
    return hessian.add(HessianStatistics.empty(inputs.shape[1], inputs.dtype), inputs)


def solve(parameters, targets, inputs, config=None):
    seen = []
    solver = TargetSolver(targets, parameters, config or Config(), seen.append)
    (stop,) = stops_of(targets)
    solver.quantize(stop, {stop.leader: statistics_of(inputs)})
    assert seen == solver.records
    return solver


def test_quantized_values_replace_the_parameters_and_the_codes_are_kept():
    torch.manual_seed(0)
    weight = torch.randn(8, 16)
    parameters = {"a": weight.clone(), "b": torch.randn(4, 16)}
    solver = solve(
        parameters, [target("a", 8, 16), target("b", 4, 16, leader="a")], correlated_inputs(64, 16, 0).float()
    )
    assert list(solver.quantized) == ["a", "b"]
    for name, quantized in solver.quantized.items():
        assert torch.equal(parameters[name], quantized.dequantize())
    assert not torch.equal(parameters["a"], weight)
    assert [record.shares_hessian_with for record in solver.records] == ["a", "a"]
    assert [record.tokens for record in solver.records] == [64, 64]


def test_a_transposed_weight_is_quantized_along_its_inputs():
    torch.manual_seed(1)
    weight, inputs = torch.randn(16, 16), correlated_inputs(64, 16, 1).float()
    plain = {"w": weight.clone()}
    stored_transposed = {"w": weight.T.clone()}
    first = solve(plain, [target("w", 16, 16, group_size=8)], inputs)
    second = solve(stored_transposed, [target("w", 16, 16, group_size=8, transposed=True)], inputs)
    assert torch.equal(first.quantized["w"].codes, second.quantized["w"].codes)
    assert torch.equal(stored_transposed["w"], plain["w"].T)


def test_one_vector_repeated_ends_finite_and_reports_the_damping_it_took():
    # CASES A2: 1024 inputs, one random vector 64 times; no damping asked for.
    torch.manual_seed(2)
    inputs = torch.randn(1, 1024).repeat(64, 1)
    parameters = {"w": torch.randn(64, 1024)}
    solver = solve(parameters, [target("w", 64, 1024)], inputs, Config(damping=0.0))
    record = solver.records[0]
    assert record.factorizations > 1
    assert 0 < record.damping_used <= 1e-2
    assert torch.isfinite(parameters["w"]).all()
    assert record.loss <= record.rtn_loss
    sentences = degradations(solver.records)
    assert any("damping was raised from 0 to" in sentence for sentence in sentences)
    assert any("only 64 calibration tokens for 1024 inputs" in sentence for sentence in sentences)


def test_a_well_posed_layer_is_not_called_degraded():
    solver = solve({"w": torch.randn(8, 16)}, [target("w", 8, 16)], correlated_inputs(64, 16, 3).float())
    assert degradations(solver.records) == ()


def test_a_record_tells_what_was_solved():
    inputs, weight = correlated_inputs(64, 16, 3).float(), torch.randn(8, 16)
    config = Config(damping=0.02)
    record = solve({"w": weight.clone()}, [target("w", 8, 16, group_size=8)], inputs, config).records[0]
    mean = hessian.hessian(statistics_of(inputs))
    factor = factorize(mean, damping=0.02, order=config.order, group_width=8, dtype=torch.float32)
    spec = GridSpec(4, 8)
    solution = gptq.solve(weight, mean, factor, spec, config, Kernels(twin.sweep_block, twin.search_scales))
    told = {name: getattr(record, name) for name in asdict(record)}
    for name in ("loss", "rtn_loss", "output_energy", "expected_loss", "floor", "fallback_rows"):
        assert told.pop(name) == getattr(solution, name), name
    assert len({solution.loss, solution.rtn_loss, solution.output_energy, solution.expected_loss, solution.floor}) == 5
    del told["seconds"]
    assert told == {
        "name": "w",
        "rows": 8,
        "columns": 16,
        "bits": 4,
        "group_size": 8,
        "tokens": 64,
        "shares_hessian_with": "w",
        "pooled_share": 0.0,
        "method": "gptq",
        "damping": 0.02,
        "damping_used": 0.02,
        "factorizations": 1,
        "dead_columns": 0,
        "zero_groups": 0,
        "tiny_groups": 0,
        "effective_rank": effective_rank(factor, mean),
        "built": True,
    }


def test_dead_inputs_are_counted():
    inputs = correlated_inputs(64, 16, 4).float()
    inputs[:, [3, 5]] = 0
    solver = solve({"w": torch.randn(8, 16)}, [target("w", 8, 16)], inputs)
    assert solver.records[0].dead_columns == 2


def test_a_bad_weight_is_named_with_its_layer():
    weight = torch.randn(4, 16)
    weight[2, 7] = float("inf")
    with pytest.raises(NonFiniteError, match=r"^second: weight at row 2, column 7 is inf"):
        solve(
            {"first": torch.randn(4, 16), "second": weight},
            [target("first", 4, 16), target("second", 4, 16, leader="first")],
            correlated_inputs(64, 16, 5).float(),
        )


def test_a_layer_where_round_to_nearest_wins_every_row_keeps_it_and_says_so(monkeypatch):
    def useless_sweep(weight, lower, carried, scales, zeros, group, top):
        return torch.zeros(weight.shape, dtype=torch.uint8), torch.zeros_like(weight)

    monkeypatch.setattr(solving, "kernels_for", lambda *_: Kernels(useless_sweep, twin.search_scales))
    weight = torch.randn(8, 16)
    solver = solve({"w": weight.clone()}, [target("w", 8, 16)], correlated_inputs(64, 16, 6).float())
    record = solver.records[0]
    assert (record.method, record.fallback_rows) == ("rtn", 8)
    assert record.loss == record.rtn_loss
    nearest = min_max(weight, GridSpec(bits=4))
    assert torch.equal(solver.quantized["w"].codes, encode(weight, nearest))
    assert any("round-to-nearest" in sentence for sentence in degradations(solver.records))


def test_a_weight_where_many_rows_fell_back_counts_as_degraded_and_a_few_rows_do_not():
    record = solve({"w": torch.randn(40, 16)}, [target("w", 40, 16)], correlated_inputs(64, 16, 3).float()).records[0]
    assert degradations([replace(record, fallback_rows=4)]) == ()
    assert "in 5 of 40 rows" in degradations([replace(record, fallback_rows=5)])[0]
