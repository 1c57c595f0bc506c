import re
from dataclasses import replace

import pytest
import torch
from tests.problems import correlated_inputs

from hessquant.capture.stops import stops_of
from hessquant.config import Config
from hessquant.core import gptq, hessian
from hessquant.core.experts import pooled, shrink
from hessquant.core.factor import factorize
from hessquant.core.hessian import HessianStatistics
from hessquant.kernels.dispatch import kernels_for
from hessquant.records import GridSpec, Location, Target
from hessquant.report.degraded import degradations
from hessquant.run.solve import TargetSolver
from hessquant.run.weights import matrix_at, put_back

STEM = "model.layers.1.mlp.experts"


def expert(number, rows=16, columns=32):
    name = f"{STEM}.{number}.down_proj.weight"
    location = Location(f"{STEM}.down_proj", rows, piece=number, stacked=True)
    return Target(name, (location,), 1, rows, columns, GridSpec(), False, name)


def statistics_of(inputs):
    return hessian.add(HessianStatistics.empty(inputs.shape[1]), inputs)


def solved(tokens, config=None):
    """A solver after a module of experts, the n-th of which saw that many tokens."""
    targets = [expert(number) for number in range(len(tokens))]
    stack = torch.randn(len(tokens), 16, 32, generator=torch.Generator().manual_seed(0))
    statistics = {
        target.name: statistics_of(correlated_inputs(count, 32, number).float())
        for number, (target, count) in enumerate(zip(targets, tokens, strict=True))
        if count
    }
    parameters = {f"{STEM}.down_proj": stack.clone()}
    solver = TargetSolver(targets, parameters, config or Config(), lambda _: None)
    (stop,) = stops_of(targets)
    solver.quantize(stop, statistics)
    return solver, parameters, stack


def test_each_expert_is_written_back_into_its_slice():
    solver, parameters, before = solved([64, 200, 3])
    for number in range(3):
        quantized = solver.quantized[f"{STEM}.{number}.down_proj.weight"].dequantize()
        assert torch.equal(parameters[f"{STEM}.down_proj"][number], quantized)
        assert not torch.equal(before[number], quantized)


def test_tokens_and_the_weight_of_the_pool_are_recorded_per_expert():
    solver, _, _ = solved([64, 200, 3])
    assert [record.tokens for record in solver.records] == [64, 200, 3]
    assert [round(record.pooled_share, 3) for record in solver.records] == [0.2, round(16 / 216, 3), round(16 / 19, 3)]
    assert {record.method for record in solver.records} == {"gptq"}


def test_an_expert_without_tokens_is_rounded_on_searched_scales_and_named():
    solver, _, _ = solved([64, 0, 200, 3])
    unseen = solver.records[1]
    assert (unseen.method, unseen.tokens, unseen.pooled_share) == ("rtn", 0, 1.0)
    # H = I: the squared error of the weights themselves, which searched scales make smaller than min-max ones.
    assert unseen.loss < unseen.rtn_loss
    sentences = degradations(solver.records)
    assert len(sentences) == 2
    assert sentences[0].startswith(f"{STEM}: no calibration token was routed to expert 1;")
    assert re.match(rf"{re.escape(STEM)}: only 3 to 3 calibration tokens were routed to expert 3;", sentences[1])


def test_many_experts_are_one_sentence():
    record = solved([3])[0].records[0]
    records = [replace(record, name=f"{STEM}.{n}.down_proj.weight", tokens=0, pooled_share=1.0) for n in range(64)]
    (sentence,) = degradations(records)
    assert "experts 0, 1, 2, 3," in sentence
    assert "19 and 44 more" in sentence


@pytest.mark.parametrize(
    ("name", "module", "named"),
    [
        ("layers.0.block_sparse_moe.experts.7.w1", "layers.0.block_sparse_moe.experts", "expert 7"),
        ("layers.0.mlp.experts.7.gate_proj", "layers.0.mlp.experts", "expert 7"),
        ("layers.0.mlp.experts.7", "layers.0.mlp.experts", "expert 7"),
        ("layers.0.mlp.experts.w1.7", "layers.0.mlp.experts.w1", "expert 7"),
        ("layers.0.mlp.experts.7.linear_2.0", "layers.0.mlp.experts", "expert 7"),
        ("block.1.layer.2.mlp.experts.expert_7.wi_0", "block.1.layer.2.mlp.experts", "expert 7"),
        ("layers.0.moe.input_linear.7", "layers.0.moe.input_linear", "expert 7"),
        ("layers.0.mlp.experts.down_proj", "layers.0.mlp.experts.down_proj", "it"),
        ("layers.0.moe.w2", "layers.0.moe.w2", "it"),
        ("moe.w2", "moe.w2", "it"),
    ],
)
def test_module_and_number_of_an_expert_are_named_whatever_its_name(name, module, named):
    record = replace(solved([3])[0].records[0], name=f"{name}.weight")
    (sentence,) = degradations([record])
    assert sentence.startswith(f"{module}: only 3 to 3 calibration tokens were routed to {named};")
    (sentence,) = degradations([replace(record, tokens=0, pooled_share=1.0)])
    assert sentence.startswith(f"{module}: no calibration token was routed to {named};")


def test_an_expert_is_solved_with_its_own_hessian_and_the_pools():
    tokens, config = [8, 0, 50], Config()
    solver, _, stack = solved(tokens, config)
    first, last = (statistics_of(correlated_inputs(tokens[number], 32, number).float()) for number in (0, 2))
    means, _ = shrink([first, None, last], hessian.hessian(pooled([first, last], 32, stack)))
    for number, mean in enumerate(means):
        factor = factorize(mean, damping=0.01, order=config.order, group_width=32, dtype=torch.float32)
        kernels = kernels_for(stack.device, stack[number].numel())
        expected = gptq.solve(stack[number], mean, factor, GridSpec(4), config, kernels).weight
        found = solver.quantized[f"{STEM}.{number}.down_proj.weight"]
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.grid.scales, expected.grid.scales)


def test_rows_in_several_places_are_gathered_and_put_back():
    # Rows of the checkpoint's matrix alternate between two of the model's, one of them stored transposed.
    locations = (
        Location("gate", 3, to_row=0, to_step=2),
        Location("up", 3, transposed=True, first_row=1, to_row=1, to_step=2),
    )
    target = Target("w", locations, 0, 6, 4, GridSpec(), False, "w")
    gate, up = torch.arange(12.0).view(3, 4), 100 + torch.arange(16.0).view(4, 4)
    parameters = {"gate": gate.clone(), "up": up.T.contiguous()}
    matrix = matrix_at(parameters, target)
    assert torch.equal(matrix[0::2], gate)
    assert torch.equal(matrix[1::2], up[1:])

    class Doubled:
        def to(self, device):
            return self

        def dequantize(self):
            return 2 * matrix

    put_back(Doubled(), target, parameters)
    assert torch.equal(parameters["gate"], 2 * gate)
    assert torch.equal(parameters["up"].T, torch.cat([up[:1], 2 * up[1:]]))
